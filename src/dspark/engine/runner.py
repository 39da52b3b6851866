"""One step in tensors: prefill chunks, one draft pass, one verify forward, new context rows.

A step of the plan runs in this order. Prefill chunks go through the target in one flat forward; a
prompt that is complete gives its first token. Then all decoding requests at once: the draft makes a
block for each that :class:`~dspark.engine.admission.Admission` chooses and cuts it to what is worth
verifying, the target runs ``[anchor, drafts...]`` of all of them in one flat forward without
padding, verification decides per request, and the taps of what was accepted become context rows
(``dspark.engine.context``), for requests that did not draft too. Rows of rejected tokens are
overwritten by the next block and never read.

The runner knows nothing of stop strings or of who waits: it returns emitted tokens, and the engine
decides what stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from dspark.decoding.acceptance import StepCount
from dspark.decoding.estimator import Signals
from dspark.decoding.request import TokenKind
from dspark.engine.admission import Admission
from dspark.engine.context import ContextRows
from dspark.engine.drafter import Block, Drafter
from dspark.engine.forward import FlatRunner, HybridRunner, Part, SingleRunner, TargetRunner
from dspark.engine.offload import Offload
from dspark.engine.pages import PagePool
from dspark.engine.request import Request, StepResult, TokenLogprob
from dspark.engine.sampler import RequestSampler
from dspark.engine.scheduler import Chunk, Plan
from dspark.engine.settle import Claim, Settled, settle
from dspark.engine.snapshots import Snapshot
from dspark.model.paged import PagedRows
from dspark.model.spans import BlockContext, PagedSpan, Reads, Segment, groups_of
from dspark.model.states import SlotStates
from dspark.model.target import DecoderTarget, Target


class Runner:
    """Executes plans. ``samplers`` holds one entry per request in work; ``requests`` is how many
    may hold pages at once."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        pool: PagePool,
        max_length: int,
        admission: Admission,
        requests: int,
    ) -> None:
        self.target, self.drafter, self.pool = target, drafter, pool
        self.admission = admission
        self.samplers: dict[Request, RequestSampler] = {}
        self.draft_tokens = drafter.block_size if drafter else 0
        layers: list[list[tuple[int, int, torch.dtype]]] = []
        if isinstance(target, DecoderTarget):
            parts = [(heads, width, target.dtype) for heads, width in target.row_parts]
            layers += [parts] * target.row_layers
        self.first_draft_layer = len(layers)
        if drafter is not None:
            layers += [[(1, drafter.row_width, drafter.dtype)]] * drafter.layers
        self.rows = PagedRows(layers, pool.count, pool.page_size, target.device)
        self.offload: Offload | None = None
        self._hybrid: HybridRunner | None = None
        self._run: TargetRunner
        if not isinstance(target, DecoderTarget):
            self._run = SingleRunner(target, max_length)
        elif target.state_dims is None:
            self._run = FlatRunner(target, self.rows)
        else:
            kept = 0 if pool.snapshots is None else pool.snapshots.count
            states = SlotStates(target.state_dims, requests + kept, target.device)
            self._run = self._hybrid = HybridRunner(
                target, self.rows, states, requests, pool.page_size, pool.snapshots
            )
        self.context = ContextRows(
            drafter, self.rows, self.first_draft_layer, wait=self._hybrid is None
        )

    @torch.inference_mode()
    def step(self, plan: Plan) -> list[StepResult]:
        """Run a plan; one result per chunk and per decoding request."""
        for request in plan.preempted:
            self._run.drop(request)
            self.context.drop(request)
        if self.offload is not None:
            self.offload.exchange()
        for source, to in plan.copies:
            self.rows.copy(source, to)
        if self._hybrid is not None:
            self._hybrid.begin()
            for request, slot in plan.restored:
                self._hybrid.restore(request, slot, request.table.rows)
        results = self._prefill(plan.prefill) if plan.prefill else []
        return results + (self._decode(plan.decode) if plan.decode else [])

    def drop(self, request: Request) -> None:
        """The request is over."""
        self._run.drop(request)
        self.context.drop(request)
        self.samplers.pop(request, None)
        self.admission.drop(request)

    def forward(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor, PagedSpan]:
        """(final [total, H], taps [total, L, H], span)."""
        segments = [Segment(p.request.table.pages, p.start, len(p.tokens)) for p in parts]
        span = PagedSpan.of(segments, self.pool.page_size, self.rows.spare, self.target.device)
        out = self._run.run(parts, span)
        return out.final, out.taps, span

    def write_context(self, taps: Tensor, span: PagedSpan, kept: Tensor | None) -> None:
        """Context rows of flat tokens ``kept`` (None: all) of a forward."""
        if self.drafter is None:
            return
        positions, slots = span.positions[0], span.slots
        if kept is not None:
            taps, positions, slots = taps[kept], positions[kept], slots[kept]
        self.context.write(taps, positions, slots)

    def commit(
        self, parts: Sequence[Part], counts: Sequence[int], *, keep: bool = True
    ) -> list[Snapshot | None]:
        """The first ``counts[i]`` tokens of each part stay: into the states of a hybrid target.

        ``keep`` off keeps no states for texts that begin alike.
        """
        if self._hybrid is None:
            return []
        with torch.inference_mode():
            return self._hybrid.commit(parts, counts, keep=keep)

    def _prefill(self, chunks: Sequence[Chunk]) -> list[StepResult]:
        parts = [
            Part(c.request, c.request.tokens(c.start, c.start + c.count), c.start) for c in chunks
        ]
        final, taps, span = self.forward(parts)
        self.write_context(taps, span, None)
        kept = self.commit(parts, [c.count for c in chunks])
        ends = torch.tensor([c.count for c in chunks]).cumsum(0) - 1
        starting = [i for i, c in enumerate(chunks) if c.completes and not c.request.output]
        logits = self.target.logits(final[ends[starting].to(final.device)])
        claims = [
            Claim(self.samplers[chunks[i].request], chunks[i].request.output, logits[row : row + 1])
            for row, i in enumerate(starting)
        ]
        settled = dict(zip(starting, settle(claims, logits, self._spread), strict=True))
        results = []
        for index, chunk in enumerate(chunks):
            rows = chunk.start + chunk.count
            if index in settled:
                claim = claims[starting.index(index)]
                results.append(_result(chunk.request, claim, settled[index], rows, counts=False))
            else:
                results.append(StepResult(chunk.request, rows, [], [], None, []))
        return _with_snapshots(results, kept) if kept else results

    def _decode(self, requests: Sequence[Request]) -> list[StepResult]:
        chosen = self.admission.choose(requests, self.samplers)
        self.context.catch_up(chosen)
        started = time.perf_counter()
        blocks, signals = self.draft(chosen)
        drafted = time.perf_counter()
        self.admission.admit(len(requests), blocks, signals)
        parts = [
            Part(r, [r.output[-1], *(blocks[r].ids if r in blocks else [])], r.length - 1)
            for r in requests
        ]
        # Attention pads neighbours to one length.
        parts.sort(key=lambda part: (len(part.tokens), part.start))
        final, taps, span = self.forward(parts)
        logits = self.target.logits(final)
        claims, offset = [], 0
        for part in parts:
            own = logits[offset : offset + len(part.tokens)]
            request = part.request
            sampler, block = self.samplers[request], blocks.get(request)
            claims.append(Claim(sampler, request.output, own, block))
            offset += len(part.tokens)
        results: list[StepResult] = []
        kept: list[int] = []
        offset = 0
        for part, claim, settled in zip(
            parts, claims, settle(claims, logits, self._spread), strict=True
        ):
            if self.context.waits and part.request not in blocks:
                self.context.keep(part.request, part.start, taps[offset : offset + 1])
            else:
                kept += range(offset, offset + settled.accepted + 1)
            results.append(
                _result(part.request, claim, settled, part.start + 1, self._counts(part))
            )
            offset += len(part.tokens)
        if kept:
            self.write_context(taps, span, torch.tensor(kept, device=taps.device))
        self.context.catch_up(self.context.due(requests))
        if self._hybrid is not None:
            counts = [len(result.tokens) for result in results]
            results = _with_snapshots(results, self.commit(parts, counts))
        ended = time.perf_counter()
        accepted = {r.request: len(r.tokens) - 1 for r in results}
        self.admission.learn(accepted, len(blocks), drafted - started, offset, ended - drafted)
        return results

    def _counts(self, part: Part) -> bool:
        """Whether a step counts in acceptance: an answer's last token leaves nothing to draft, and
        who asks for no drafts is not counted."""
        speculates = self.samplers[part.request].params.speculate
        return self.drafter is not None and part.request.room > 1 and speculates

    def _spread(self, probs: Tensor) -> Tensor:
        assert self.drafter is not None
        return self.drafter.spread(probs)

    def draft(self, requests: Sequence[Request]) -> tuple[dict[Request, Block], Signals | None]:
        """A block for each of ``requests``, and the signals that the admission wants."""
        if self.drafter is None or not requests:
            return {}, None
        size, device = self.drafter.block_size, self.target.device
        # Attention pads neighbours to one length. No more drafts than could still be emitted: a
        # bonus always follows.
        blocks = {
            r: Block(self.samplers[r], r.output, r.output[-1], min(self.draft_tokens, r.room - 1))
            for r in sorted(requests, key=lambda request: request.length)
        }
        segments = [Segment(r.table.pages, r.length - 1, size) for r in blocks]
        contexts = [self._context(segments[low:high]) for low, high in groups_of(segments)]
        positions = torch.tensor([s.start for s in segments], device=device)
        anchors = torch.tensor([b.anchor for b in blocks.values()], device=device)
        states = self.drafter.block_states(anchors, positions, contexts)
        wanted = self.admission.wants(requests)
        gauge = None if wanted is None else self.drafter.gauge(whole=wanted)
        self.drafter.draw(states, list(blocks.values()), gauge)
        return blocks, None if gauge is None else gauge.signals(size)

    def _context(self, blocks: Sequence[Segment]) -> BlockContext:
        """Rows of the draft's layers before these ``blocks``, padded to the longest context."""
        assert self.drafter is not None
        device, starts = self.target.device, [b.start for b in blocks]
        pages, size = [b.pages for b in blocks], self.pool.page_size
        reads = Reads.of(pages, starts, size, self.rows.spare, device)
        layers = range(self.first_draft_layer, self.first_draft_layer + self.drafter.layers)
        rows = [self.rows.read(layer, reads)[0].squeeze(1) for layer in layers]
        return BlockContext.padded(rows, torch.tensor(starts, device=device), blocks[0].length)


def _with_snapshots(
    results: list[StepResult], snapshots: Sequence[Snapshot | None]
) -> list[StepResult]:
    return [
        result if snapshot is None else replace(result, snapshot=snapshot)
        for result, snapshot in zip(results, snapshots, strict=True)
    ]


def _result(
    request: Request, claim: Claim, settled: Settled, rows: int, counts: bool
) -> StepResult:
    """``rows`` are sound if none of the drafted tokens stays; ``counts`` asks for a count."""
    ids, accepted = claim.ids, settled.accepted
    last: TokenKind = "bonus" if accepted == len(ids) else "corrected"
    drafted: TokenKind = "accepted"
    tokens = [*ids[:accepted], settled.following]
    return StepResult(
        request,
        rows + accepted,
        tokens,
        [*repeat(drafted, accepted), last],
        StepCount(claim.drafted, len(ids), accepted) if counts else None,
        _logprobs(claim.logits, tokens, claim.sampler.params.logprobs),
        tuple(ids[accepted:]),
    )


def _logprobs(logits: Tensor, tokens: list[int], wanted: int | None) -> list[TokenLogprob]:
    """Of emitted ``tokens``, whose rows are the first ones of ``logits``."""
    if wanted is None:
        return []
    rows = torch.log_softmax(logits[: len(tokens)].float(), -1)
    own = rows.gather(1, torch.tensor(tokens, device=rows.device).unsqueeze(1)).squeeze(1).tolist()
    best = rows.topk(min(wanted, rows.shape[1]), dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprob(token, value, tuple(zip(i, v, strict=True)))
        for token, value, i, v in zip(tokens, own, ids, values, strict=True)
    ]
