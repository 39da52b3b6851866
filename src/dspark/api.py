"""The engine for Python programs: text or chats in, text and acceptance out.

    from dspark import Engine, SamplingParams

    engine = Engine("path/to/target", "path/to/draft")
    for output in engine.generate(["Once upon a time"], SamplingParams(temperature=0.7)):
        print(output.text, output.acceptance.acceptance_length)

A prompt is a string (taken as it is), a list of token ids, or a list of chat messages, which go
through the target's own template. Everything below this class works on ids
(``dspark.engine.core``).
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from dspark.checkpoint.calibration import read_calibration
from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.identity import draft_hash
from dspark.checkpoint.pretrained import read_config as read_target_config
from dspark.checkpoint.pretrained import text_sizes
from dspark.checkpoint.published import read_config
from dspark.checkpoint.source import TargetFiles, fetch, find_target
from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.config.engine import EngineOptions
from dspark.config.recipe import TargetSection
from dspark.data.chat import end_ids, prompt_ids
from dspark.decoding.params import SamplingParams, SchedulerName
from dspark.engine.answer import Delta, RequestOutput
from dspark.engine.asynchronous import AsyncDriver
from dspark.engine.confidence import Mode
from dspark.engine.core import EngineCore
from dspark.engine.cost_file import fingerprint, read_costs, write_costs
from dspark.engine.drafter import Drafter
from dspark.engine.measure import costs_hold, measure_costs
from dspark.errors import CheckpointError, DecodingError
from dspark.model.fp8 import serving_form
from dspark.pairing import check_pair, target_section

DEFAULT_CONTEXT = 2048
T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Engine:
    """A target with or without a draft.

    Args:
        target: a path, ``package:NAME`` or hub id; or a target that is already loaded; None with a
            draft whose provenance names its target.
        draft: folder of a draft checkpoint, or None for plain decoding.
        options: memory, batch, verification and scheduling.
        scheduler: instead of the one in ``options``.
        dtype, max_context: of a target that is loaded here. Left out: as the draft was made with;
            without a draft float32, and ``DEFAULT_CONTEXT`` tokens or the target's own limit where
            that is shorter.
        device: of a target that is loaded here.

    Raises:
        TargetError, CheckpointError: what is loaded is absent, damaged, or does not fit together:
            see :func:`dspark.pairing.check_pair`. A target that is named explicitly may have other
            weights than the draft was trained for; a ``UserWarning`` says so.
    """

    def __init__(
        self,
        target: str | Path | LoadedTarget | None,
        draft: str | Path | None = None,
        *,
        options: EngineOptions | None = None,
        scheduler: SchedulerName | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
        device: str = "auto",
        max_context: int | None = None,
    ) -> None:
        folder = None if draft is None else Path(draft)
        named = target is not None
        if scheduler is not None:
            fields = (options or EngineOptions()).model_dump()
            options = EngineOptions(**{**fields, "scheduler": scheduler})
        if not isinstance(target, LoadedTarget):
            files, section = _section(target, folder, dtype, device, max_context)
            target = load_target(section, files)
        self.loaded, self.tokenizer = target, target.tokenizer
        # Of content, not of places: pages outlive the process and go to other machines.
        self._draft_hash = "none" if folder is None else draft_hash(folder)
        self.identity = f"{target.hashes.weights} {self._draft_hash}"
        drafter: Drafter | None = None
        layer_ids: tuple[int, ...] = ()
        if folder is not None:
            check_pair(folder, target, _warn, named=named)
            layer_ids = read_config(folder)[0].target_layer_ids
        model = target.build(layer_ids)
        if folder is not None:
            head = model.head_weight()
            loaded, _ = load_draft(
                folder,
                dtype=target.dtype,
                device=target.device,
                head=head,
                fp8=serving_form(target.device),
            )
            drafter = Drafter(loaded, head)
        self._folder = folder
        self.core = EngineCore(
            model,
            drafter,
            end_ids(target),
            decode=self.decode,
            decode_all=lambda ids: str(self.tokenizer.decode(ids, skip_special_tokens=False)),
            tokenizer=self.tokenizer,
            options=options,
            identity=self.identity,
        )
        self._driver = AsyncDriver(self.core)
        if drafter is not None and self.core.options.scheduler != "fixed":
            self.enable_scheduling()

    @property
    def banner(self) -> str:
        """How drafted tokens are admitted to verification here, in a line."""
        return self.core.admission.banner

    def enable_scheduling(self) -> None:
        """Give schedulers what they weigh: costs (measured now, or here before), calibration.

        Done at the start of an engine whose ``scheduler`` is not ``fixed``; needed once where only
        requests name a scheduler. Without a draft nothing happens.

        Raises:
            CheckpointError: a calibration of another draft or target.
            DecodingError: a damaged cost file, or requests in work.
            StorageError: the cache folder cannot be written.
        """
        if self._folder is None:
            return
        draft, target = self._draft_hash, self.loaded.hashes.weights
        admission = self.core.admission
        block = admission.slots
        found = read_calibration(self._folder, draft=draft, target=target, block_size=block)
        if found is not None:
            modes = {Mode(m.rule, m.one_hot, m.temperature): m.temperatures for m in found.modes}
            admission.confidence.calibrations.update(modes)
        wanted = fingerprint(self.core, target, draft)
        costs = read_costs(wanted)
        if costs is None or not costs_hold(self.core, costs):
            costs = measure_costs(self.core)
            write_costs(costs, wanted)
        admission.costs = costs

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt of any kind.

        Raises:
            DataError, TargetError: messages that the target's template refuses.
            DecodingError: a prompt of no such kind.
        """
        if isinstance(prompt, str):
            return [int(i) for i in self.tokenizer.encode(prompt)]
        ids = [part for part in prompt if isinstance(part, int)]
        messages = [dict(part) for part in prompt if isinstance(part, Mapping)]
        if len(ids) == len(prompt):
            return ids
        if len(messages) == len(prompt):
            return prompt_ids(self.tokenizer, messages)
        raise DecodingError(
            expected="a string, token ids, or chat messages",
            found=f"a list of {sorted({type(part).__name__ for part in prompt})}",
            where="prompt",
            fix='Messages look like {"role": "user", "content": "..."}.',
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_delta: Callable[[Delta], None] = lambda _: None,
    ) -> list[RequestOutput]:
        """Answer all ``prompts`` together; results in their order.

        Args:
            prompts: one prompt, or several.
            params: for all, or one for each.
            on_delta: called with every new piece.

        Raises:
            DecodingError: an impossible prompt or parameters; nothing is generated then.
        """
        every = _many(prompts)
        each = _each(params, len(every))
        names: list[str] = []
        try:
            for prompt, own in zip(every, each, strict=True):
                names.append(self.core.submit(self.encode(prompt), own))
            while not all(self.core.finished(name) for name in names):
                for delta in self.core.step():
                    on_delta(delta)
        except BaseException:
            for name in names:
                self.core.abort(name)
                self.core.collect(name)
            raise
        return [self.core.collect(name) for name in names]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Pieces of one prompt's answers as they come; leaving the loop early aborts."""
        name = self.core.submit(self.encode(prompt), params or SamplingParams())
        try:
            while not self.core.finished(name):
                yield from (delta for delta in self.core.step() if delta.id == name)
        finally:
            self.core.abort(name)
            self.core.collect(name)

    def stream_async(
        self, prompt: Prompt, params: SamplingParams | None = None, id: str | None = None
    ) -> AsyncIterator[Delta]:
        """As :meth:`stream`, under asyncio; many may run at once and share batches."""
        return self._driver.stream(self.encode(prompt), params or SamplingParams(), id)

    async def generate_async(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        id: str | None = None,
        on_delta: Callable[[Delta], None] = lambda _: None,
    ) -> RequestOutput:
        """One prompt's whole result, under asyncio; many may run at once and share batches."""
        own = params or SamplingParams()
        return await self._driver.generate(self.encode(prompt), own, id, on_delta)

    def events_async(
        self, prompt: Prompt, params: SamplingParams | None = None, id: str | None = None
    ) -> AsyncIterator[Delta | RequestOutput]:
        """As :meth:`stream_async`, with the whole result as the last item."""
        return self._driver.events(self.encode(prompt), params or SamplingParams(), id)

    def batches_async(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        id: str | None = None,
        *,
        eager: bool = True,
    ) -> AsyncIterator[list[Delta] | RequestOutput]:
        """As :meth:`stream_async` with pieces that wait together, and the whole result as the last
        item; see :meth:`AsyncDriver.batches`."""
        own = params or SamplingParams()
        return self._driver.batches(self.encode(prompt), own, id, eager=eager)

    async def abort_async(self, id: str) -> None:
        """End a request of :meth:`stream_async` or :meth:`generate_async`."""
        await self._driver.abort(id)

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Do ``work`` with ``core`` under asyncio, while nothing else touches it."""
        return await self._driver.between_steps(work)


def _many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Mapping))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise DecodingError(
            expected=f"{count} sampling parameters, one for each prompt",
            found=f"{len(params)}",
            where="generate",
            fix="Pass one for all, or one for each.",
        )
    return params


def _section(
    target: str | Path | None, folder: Path | None, dtype: Any, device: str, max_context: int | None
) -> tuple[TargetFiles, TargetSection]:
    """What to load: as the draft records it, or the target's own context limit."""
    if folder is None and target is None:
        raise CheckpointError(
            expected="a target, or a draft whose provenance names one",
            found="neither",
            where="Engine",
            fix="Name the target: Engine(TARGET).",
        )
    given = {"dtype": dtype, "max_context": max_context}
    wanted = {name: value for name, value in given.items() if value is not None}
    if folder is None:
        files = fetch(find_target(str(target)))
        wanted.setdefault("max_context", min(_longest(files), DEFAULT_CONTEXT))
        return files, TargetSection(source=str(target), device=device, **wanted)
    recorded = target_section(folder, None if target is None else str(target))
    section = TargetSection.model_validate({**recorded.model_dump(), **wanted, "device": device})
    return fetch(find_target(section.source, section.revision)), section


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def _longest(files: TargetFiles) -> int:
    """The longest context a target was made for."""
    found = text_sizes(files, read_target_config(files)).get("max_position_embeddings")
    return DEFAULT_CONTEXT if found is None else int(found)
