"""The tiny trained pair as engines of every kind, for tests of the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conftest import write_prompts
from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.target import LoadedTarget, load_target
from dspark.config.engine import EngineOptions
from dspark.config.recipe import TargetSection
from dspark.data.chat import prompt_ids
from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Completion
from dspark.engine.core import EngineCore
from dspark.engine.drafter import Drafter
from dspark.engine.memory import bytes_per_token
from dspark.engine.request import Request
from dspark.model.spans import Reads, Span

END = frozenset({2})


@dataclass
class Pair:
    """A target, its draft and prompts."""

    loaded: LoadedTarget
    target: Any
    drafter: Drafter
    prompts: list[list[int]]

    @staticmethod
    def of(run: Path, folder: Path, scratch: Path) -> Pair:
        loaded = load_target(TargetSection(source=str(folder), max_context=256))
        target = loaded.build((0, 1, 2))
        draft, _ = load_draft(run / "draft")
        path = write_prompts(scratch / "p.jsonl", 40)
        texts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        prompts = [prompt_ids(loaded.tokenizer, [{"role": "user", "content": t}]) for t in texts]
        return Pair(loaded, target, Drafter(draft, target.head_weight()), prompts)

    def decode(self, ids: list[int]) -> str:
        return str(self.loaded.tokenizer.decode(ids, skip_special_tokens=True))

    def engine(
        self,
        *,
        draft: bool = True,
        ends: frozenset[int] = END,
        pages: int | None = None,
        target: Any = None,
        **options: Any,
    ) -> EngineCore:
        """``pages`` fixes the cache's size exactly."""
        drafter = self.drafter if draft else None
        if pages is not None:
            per_page = bytes_per_token(target or self.target, drafter) * 16
            options["cache_gib"] = (pages + 0.5) * per_page / 2**30
        return EngineCore(
            target or self.target, drafter, ends, decode=self.decode,
            tokenizer=self.loaded.tokenizer,
            options=EngineOptions(**options),
        )  # fmt: skip


def run(
    engine: EngineCore, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[Completion]:
    """Answers to ``prompts``, one each, decoded together as far as the engine's options go."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    names = [engine.submit(ids, p) for ids, p in zip(prompts, each, strict=True)]
    while engine.unfinished:
        engine.step()
    assert engine.pool.available == engine.pool.count, "pages leaked"
    assert not engine.runner.samplers
    return [engine.collect(name).completions[0] for name in names]


def check_rows_after_decoding(core: EngineCore, prompt: list[int], params: SamplingParams) -> None:
    """Some steps in, the draft's rows must be those of a fresh prefill of the committed text."""
    core.submit(prompt, params)
    (answer,) = core._answers.values()
    for _ in range(7):
        core.step()
    request = answer.request
    core.runner.context.catch_up([request])
    assert request.table.rows == request.length - 1
    assert answer.counter is not None
    assert answer.counter.admitted > answer.counter.accepted, "nothing was rejected"
    check_rows(core, request, request.table.rows)


def check_rows(core: EngineCore, request: Request, count: int) -> None:
    """The draft's first ``count`` rows are those of a fresh prefill."""
    drafter, rows, text = core.drafter, core.runner.rows, request.tokens(0, count)
    assert drafter is not None
    device = core.target.device
    reads = Reads.of([request.table.pages], [len(text)], core.pool.page_size, rows.spare, device)
    with torch.inference_mode():
        out = core.target.forward(torch.tensor([text]), Span.alone(1, len(text), device), None)
        fresh = drafter.context_rows(out.taps[0], torch.arange(len(text)))
        for layer, new in enumerate(fresh):
            kept = rows.read(core.runner.first_draft_layer + layer, reads)[0][0, 0]
            assert kept.shape[-1] == drafter.draft.config.row_width
            torch.testing.assert_close(kept, new, rtol=1e-4, atol=1e-5)
