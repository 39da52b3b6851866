"""The engine without loading or text prompts: token ids in, answers out, one step at a time.

:meth:`EngineCore.submit` queues a prompt, :meth:`EngineCore.step` advances everything by one step
and returns what is new, :meth:`EngineCore.abort` forgets a request in whatever state it is. Drivers
(`generate`, the stream, asyncio) are loops around these three.

A verify step may accept tokens beyond the end of an answer. Tokens, their kinds, log-probabilities
and text are taken one by one and stop together at an end token, a stop string or the limit, so that
nothing behind it reaches the user or the usage count.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspark.config.engine import EngineOptions
from dspark.decoding.acceptance import AcceptanceCounter
from dspark.decoding.cost import CostTable
from dspark.decoding.params import SamplingParams
from dspark.decoding.processors import LogitRules
from dspark.decoding.sampling import RandomStreams
from dspark.decoding.verify import check_modes
from dspark.engine.admission import Admission
from dspark.engine.answer import Answer, Delta, RequestOutput, Times
from dspark.engine.confidence import Mode
from dspark.engine.drafter import Drafter
from dspark.engine.grammar import GrammarCompiler, GrammarRows
from dspark.engine.memory import page_count
from dspark.engine.offload import made_offload
from dspark.engine.pages import PagePool
from dspark.engine.request import Request
from dspark.engine.runner import Runner
from dspark.engine.sampler import RequestSampler
from dspark.engine.scheduler import Scheduler
from dspark.engine.snapshots import Snapshots
from dspark.engine.text import TextStream
from dspark.errors import DecodingError
from dspark.model.delta import BLOCK
from dspark.model.target import DecoderTarget, Target


class EngineCore:
    """One target, with or without a draft.

    Args:
        target: built with the draft's tapped layers.
        drafter: None decodes plainly.
        end_ids: the target's own end tokens.
        decode: ids to text, without special tokens; None gives answers without text (stop strings
            are then refused).
        decode_all: the same with special tokens shown, for requests that ask for it.
        tokenizer: a Hugging Face tokenizer, needed for grammars only.
        options: see :class:`EngineOptions`.
        identity: of target and draft, for the prefix cache.
        costs: what steps take here, for schedulers that weigh time; see
            ``dspark.engine.measure``.
        calibrations: temperatures of the confidence head, by sampling mode.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        end_ids: frozenset[int],
        *,
        decode: Callable[[list[int]], str] | None = None,
        decode_all: Callable[[list[int]], str] | None = None,
        tokenizer: Any = None,
        options: EngineOptions | None = None,
        identity: str = "",
        costs: CostTable | None = None,
        calibrations: Mapping[Mode, Sequence[float]] | None = None,
    ) -> None:
        self.target, self.drafter, self.end_ids = target, drafter, end_ids
        self.decode, self.decode_all = decode, decode_all
        self._tokenizer = tokenizer
        self._grammars: GrammarCompiler | None = None
        self.options = options = options or EngineOptions()
        block = drafter.block_size if drafter else 0
        own = target if isinstance(target, DecoderTarget) else None
        snapshots = None
        if own is not None and own.state_dims is not None and options.prefix_cache:
            snapshots = Snapshots(options.max_requests, options.state_snapshots, BLOCK)
        self.pool = PagePool(
            page_count(target, drafter, options),
            options.page_size,
            identity=identity,
            drafting=drafter is not None,
            # Rows outside pages (the transformers adapter) cannot be shared.
            share=options.prefix_cache and own is not None,
            snapshots=snapshots,
        )
        self.scheduler = Scheduler(
            self.pool,
            max_requests=options.max_requests,
            token_budget=options.max_batch_tokens,
            lookahead=block,
            max_length=target.max_context,
        )
        self.admission = Admission(block, options, costs, calibrations or {})
        longest = self.scheduler.max_length + block + 1
        self.runner = Runner(
            target, drafter, self.pool, longest, self.admission, options.max_requests
        )
        self.offload = made_offload(
            options, self.runner.rows, self.pool, self.runner.first_draft_layer
        )
        self.runner.offload = self.pool.backing = self.offload
        if options.draft_tokens is not None:
            self.runner.draft_tokens = min(block, options.draft_tokens)
        self.reset_counts()
        self._answers: dict[Request, Answer] = {}
        self._groups: dict[str, list[Answer]] = {}
        self._numbers = itertools.count()

    @property
    def unfinished(self) -> bool:
        return self.scheduler.unfinished

    def reset_counts(self) -> None:
        """Count from now on: ``totals`` of acceptance (None without a draft), and ``generated``
        tokens."""
        block = self.drafter.block_size if self.drafter else 0
        self.totals = AcceptanceCounter(block) if block else None
        self.generated = 0

    def submit(self, prompt: Sequence[int], params: SamplingParams, id: str | None = None) -> str:
        """Queue ``prompt``; returns the id its answers come under.

        Raises:
            DecodingError: an id in use, an impossible prompt, or parameters that this engine cannot
                serve exactly.
        """
        name = f"request-{next(self._numbers)}" if id is None else id
        if name in self._groups:
            raise DecodingError(
                expected="a request id that is not in use",
                found=repr(name),
                where="submit",
                fix="Wait for the first request to end, or use another id.",
            )
        strange = [i for i in prompt if not 0 <= i < self.target.vocab_size]
        if strange:
            raise DecodingError(
                expected=f"token ids below the vocabulary of {self.target.vocab_size}",
                found=f"{strange[:3]}",
                where=f"prompt of {name}",
                fix="Encode the prompt with the target's own tokenizer.",
            )
        prepared = [self._prepare(name, i, list(prompt), params) for i in range(params.n)]
        answers = [answer for answer, _ in prepared]
        for answer, sampler in prepared:
            self.scheduler.add(
                answer.request
            )  # all have the same prompt: only the first may refuse
            self._answers[answer.request] = answer
            self.runner.samplers[answer.request] = sampler
            answer.request.sibling = answers[0].request if answer.index else None
        self._groups[name] = answers
        return name

    def step(self) -> list[Delta]:
        """One step of everything; what is new of each answer it touched."""
        deltas = []
        plan, now = self.scheduler.schedule(), time.perf_counter()
        for request in (*(chunk.request for chunk in plan.prefill), *plan.decode):
            times = self._answers[request].times
            if times.started is None:
                times.started = now
        results = self.runner.step(plan)
        ended = time.perf_counter()
        for result in results:
            request = result.request
            answer = self._answers[request]
            answer.take(result)
            if answer.count is not None and self.totals is not None:
                self.totals.add(answer.count)
            # Rows behind a trimmed end belong to no token that is kept.
            late = self.runner.context.missing(request)
            self.scheduler.advance(request, min(result.rows, request.length), late)
            if result.snapshot is not None:
                self.pool.keep_state(request.table, result.snapshot)
            if answer.finish_reason is not None:
                self._retire(answer)
            if result.tokens:
                deltas.append(answer.delta(ended))
                self.generated += len(deltas[-1].ids)
        return deltas

    def abort(self, id: str) -> list[Delta]:
        """Stop all answers of a request; unknown or finished ones are left alone."""
        deltas = []
        for answer in self._groups.get(id, []):
            if answer.finish_reason is None:
                answer.abort()
                self._retire(answer)
                deltas.append(answer.delta(time.perf_counter()))
        return deltas

    def collect(self, id: str) -> RequestOutput:
        """The whole result of a request whose answers all ended; the engine then forgets it."""
        answers = self._groups[id]
        assert all(a.finish_reason is not None for a in answers), f"{id} is not finished"
        del self._groups[id]
        return RequestOutput(
            id=id,
            prompt_ids=tuple(answers[0].request.prompt),
            cached_tokens=answers[0].request.cached_rows or 0,
            completions=tuple(a.completion() for a in answers),
        )

    def forget(self, id: str) -> None:
        """Abort a request and drop its result; an unknown id is left alone."""
        if id in self._groups:
            self.abort(id)
            self.collect(id)

    @property
    def running(self) -> list[str]:
        """Ids of requests that hold pages: those a failed step was about."""
        return list(dict.fromkeys(self._answers[r].id for r in self.scheduler.running))

    def finished(self, id: str) -> bool:
        """Whether all answers of a request ended."""
        return all(a.finish_reason is not None for a in self._groups[id])

    def _retire(self, answer: Answer) -> None:
        # Whoever goes on from this answer finds its pages only with their draft rows.
        if self.pool.share and self.runner.context.catch_up([answer.request]):
            self.scheduler.advance(answer.request, answer.request.table.rows)
        self.scheduler.finish(answer.request)
        self.runner.drop(answer.request)
        del self._answers[answer.request]

    def _prepare(
        self, name: str, index: int, prompt: list[int], params: SamplingParams
    ) -> tuple[Answer, RequestSampler]:
        options = self.options
        method = options.draft_sample_method
        rule = check_modes(options.verification, method, params.temperature)
        request = Request(f"{name}/{index}", prompt, params.max_new_tokens)
        ends = set(params.stop_ids) | (set() if params.ignore_eos else self.end_ids)
        device = self.target.device
        rules = None
        if LogitRules.needed(params):
            rules = LogitRules(params, prompt, ends, self.target.vocab_size, device)
        seed = _seed_of(params.seed_or_fresh(), index)
        sampler = RequestSampler(
            params,
            rule,
            RandomStreams(seed),
            one_hot=method == "greedy",
            truncate=options.truncate_draft,
            rules=rules,
            grammar=self._grammar(params),
        )
        text = self._text(params)
        block = self.drafter.block_size if self.drafter else 0
        counter = AcceptanceCounter(block) if block else None
        times = Times(time.perf_counter())
        answer = Answer(name, index, request, params, frozenset(ends), seed, text, counter, times)
        return answer, sampler

    def _grammar(self, params: SamplingParams) -> GrammarRows | None:
        if params.grammar is None:
            return None
        if self._tokenizer is None:
            raise _no_tokenizer("grammar")
        if self._grammars is None:
            size, device = self.target.vocab_size, self.target.device
            self._grammars = GrammarCompiler(self._tokenizer, self.end_ids, size, device)
        return self._grammars.rows(params)

    def _text(self, params: SamplingParams) -> TextStream | None:
        decode = self.decode if params.skip_special_tokens else self.decode_all
        if decode is None:
            if params.stop or not params.skip_special_tokens:
                raise _no_tokenizer("stop" if params.stop else "skip_special_tokens")
            return None
        return TextStream(decode, params.stop, include_stop=params.include_stop)


def _no_tokenizer(name: str) -> DecodingError:
    return DecodingError(
        expected="an engine that knows text",
        found="one that was made without a tokenizer",
        where=f"sampling parameter {name}",
        fix=f"Leave {name} out, or make the engine with a tokenizer.",
    )


def _seed_of(seed: int, index: int) -> int:
    """The first answer uses the seed itself; the others one derived from it and their index."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"dspark/answer/{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
