"""Our drafts inside the real vLLM on a CPU, through its own ``method: dspark`` configuration.

Two runs of vLLM, without and with the draft, answer the same batches: short prompts, long prompts
in chunks of 64 tokens with a shared beginning, the same again (from the prefix cache), answers up
to the longest context in a cache too small for all of them, and mixed sampling parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_pair import TrainedPair, trained_pair
from vllm_environment import judge, vllm_python

from dspark import Engine, SamplingParams
from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.target import load_target
from dspark.config.engine import EngineOptions
from dspark.config.recipe import TargetSection
from dspark.data.chat import prompt_ids
from dspark.decoding.sampling import RandomStreams
from dspark.engine.drafter import Block, Drafter
from dspark.engine.sampler import RequestSampler
from dspark.model.spans import Span

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

CONTEXT, WIDTH = 256, 7
GREEDY = {"temperature": 0, "max_tokens": 64}
ENGINE: dict[str, Any] = {
    "max_model_len": CONTEXT,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "long_prefill_token_threshold": 64,
    "block_size": 32,
    "num_gpu_blocks_override": 72,
}
SHORT, LONG, AGAIN, FULL, MIXED, SEEDED, SEEDED_AGAIN = range(7)


@dataclass(frozen=True)
class Asked:
    """The pair and the prompts of each batch, as token ids."""

    pair: TrainedPair
    prompts: list[list[list[int]]]
    sampling: list[Any]

    @property
    def batches(self) -> list[dict[str, Any]]:
        rows = zip(self.prompts, self.sampling, strict=True)
        return [{"prompts": p, "sampling": s} for p, s in rows]


@pytest.fixture(scope="module", params=["qwen3", "k3"])
def asked(request: pytest.FixtureRequest) -> Asked:
    vllm_python()
    pair = trained_pair(Path(request.config.cache.mkdir("vllm")), request.param)
    tokenizer = load_target(TargetSection(source=str(pair.target), max_context=CONTEXT)).tokenizer
    short = [prompt_ids(tokenizer, [{"role": "user", "content": q}]) for q in pair.questions(100)]
    shots = [i for ids in short[:5] for i in ids]
    long = [shots + ids for ids in short[5:21]]
    assert min(map(len, long)) > 2 * 64
    other = [i for ids in reversed(short[25:30]) for i in ids]
    seeded = [other + ids for ids in short[30:34]]
    seeds = [{"temperature": 1.0, "max_tokens": 64, "seed": s} for s in range(4)]
    full = {"temperature": 0, "max_tokens": CONTEXT, "ignore_eos": True}
    mixed = [
        GREEDY,
        {"temperature": 1.0, "max_tokens": 64},
        {"temperature": 0.7, "top_p": 0.9, "max_tokens": 64},
        {"temperature": 1.3, "top_k": 5, "max_tokens": 64},
    ] * 4
    return Asked(
        pair,
        [short, long, long, short[:16], short[:16], seeded, seeded],
        [GREEDY, GREEDY, GREEDY, full, mixed, seeds, seeds],
    )


def answers(asked: Asked, folder: Path, **speculative: Any) -> list[dict[str, Any]]:
    engine = {"model": str(asked.pair.target), **ENGINE}
    if speculative:
        spec = {"method": "dspark", "model": str(asked.pair.draft), **speculative}
        engine["speculative_config"] = {"num_speculative_tokens": WIDTH, **spec}
    job = {"engine": engine, "batches": asked.batches}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    found = judge("run_offline.py", folder, plugin=True).answer["batches"]
    assert isinstance(found, list)
    return found


@pytest.fixture(scope="module")
def plain(asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers(asked, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def drafted(asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers(asked, tmp_path_factory.mktemp("drafted"), draft_sample_method="greedy")


@pytest.fixture(scope="module")
def probable(asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers(asked, tmp_path_factory.mktemp("prob"), draft_sample_method="probabilistic")


def growth(found: list[dict[str, Any]], batch: int, name: str) -> int:
    """A counter's growth over one batch."""
    values = [b["counters"].get(f"vllm:{name}", 0) for b in found]
    return int(values[batch] - (values[batch - 1] if batch else 0))


def acceptance_length(found: list[dict[str, Any]], batch: int) -> float:
    accepted = growth(found, batch, "spec_decode_num_accepted_tokens")
    return 1 + accepted / growth(found, batch, "spec_decode_num_drafts")


def greedy_rows(asked: Asked, batch: int) -> list[int]:
    sampling = asked.sampling[batch]
    each = sampling if isinstance(sampling, list) else [sampling] * len(asked.prompts[batch])
    return [i for i, s in enumerate(each) if s["temperature"] == 0]


@pytest.mark.parametrize("batch", [SHORT, LONG, AGAIN, FULL, MIXED])
@pytest.mark.parametrize("way", ["drafted", "probable"])
def test_greedy_texts_are_those_of_vllm_without_a_draft(
    asked: Asked, plain: Any, batch: int, way: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(way)
    rows = greedy_rows(asked, batch)
    assert len(rows) in {100, 16, 4}
    assert [found[batch]["answers"][i] for i in rows] == [plain[batch]["answers"][i] for i in rows]


def test_a_seed_gives_the_same_answer_however_its_prompt_was_cut(plain: Any, drafted: Any) -> None:
    """vLLM's own runner dies of a seed in a prompt of several chunks on a CPU; the plugin mends it."""
    for found in (plain, drafted):
        hits = [growth(found, b, "prefix_cache_hits") for b in (SEEDED, SEEDED_AGAIN)]
        assert hits[1] > hits[0]
    assert plain[SEEDED]["answers"] == plain[SEEDED_AGAIN]["answers"]


def test_the_batches_are_what_they_are_meant_to_be(asked: Asked, drafted: Any) -> None:
    assert growth(drafted, LONG, "prefix_cache_hits") > 0, "the shared beginning was not found"
    assert growth(drafted, AGAIN, "prefix_cache_hits") > growth(drafted, LONG, "prefix_cache_hits")
    assert growth(drafted, FULL, "num_preemptions") > 0, "the cache was large enough"
    ends = {
        len(p) + len(a) for p, a in zip(asked.prompts[FULL], drafted[FULL]["answers"], strict=True)
    }
    assert ends == {CONTEXT}, "answers up to the longest context"


def blocks_of(
    found: dict[str, Any], prompts: list[list[int]]
) -> list[tuple[list[int], int, int, list[int]]]:
    """(text of the request, anchor's position, anchor, drafted) of every block behind the prompt."""
    texts = {
        name: prompt + answer
        for name, prompt, answer in zip(found["requests"], prompts, found["answers"], strict=True)
    }
    rows = []
    for name, position, anchor, tokens in found["drafted"]:
        # vLLM adds a random ending to the names of requests.
        text = texts[name.rpartition("-")[0]]
        if position < len(text):
            rows.append((text, position, anchor, tokens))
    return rows


@torch.inference_mode()
def test_every_drafted_token_is_the_one_our_engine_drafts(asked: Asked, drafted: Any) -> None:
    """Slot by slot: short and long prompts, cold and from the prefix cache, and after preemption."""
    loaded = load_target(TargetSection(source=str(asked.pair.target), max_context=CONTEXT))
    draft, _ = load_draft(asked.pair.draft)
    target = loaded.build(draft.config.target_layer_ids)
    drafter = Drafter(draft, target.head_weight())
    sampler = RequestSampler(SamplingParams(temperature=0), "greedy", RandomStreams(0))
    compared = differing = 0
    rows: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for batch in (SHORT, LONG, AGAIN, FULL):
        found = blocks_of(drafted[batch], asked.prompts[batch])
        assert len(found) > 50
        for text, position, anchor, tokens in found:
            assert text[position] == anchor
            key = tuple(text)
            if key not in rows:
                out = target.forward(
                    torch.tensor([text]), Span.alone(1, len(text), target.device), None
                )
                rows[key] = drafter.context_rows(out.taps[0], torch.arange(len(text)))
            context = [r[:position].unsqueeze(0) for r in rows[key]]
            states = drafter.block_states(
                torch.tensor([anchor]), torch.tensor([position]), context, None
            )
            block = Block(sampler, [], anchor, WIDTH)
            drafter.draw(states, [block])
            inside = min(WIDTH, CONTEXT - 1 - position)
            compared += inside
            differing += sum(
                a != b for a, b in zip(block.ids[:inside], tokens[:inside], strict=True)
            )
    assert compared > 5000
    # Two implementations in fp32: a near tie may fall either way, and takes the slots behind it along.
    assert differing <= compared // 1000, f"{differing} of {compared} drafted tokens differ"


def test_acceptance_is_that_of_our_engine_on_the_same_prompts(asked: Asked, drafted: Any) -> None:
    engine = Engine(
        asked.pair.target, asked.pair.draft,
        options=EngineOptions(verification="standard", draft_sample_method="greedy"),
    )  # fmt: skip
    outputs = engine.generate(
        asked.prompts[SHORT], SamplingParams(temperature=0, max_new_tokens=64)
    )
    ours = [c.acceptance for o in outputs for c in o.completions if c.acceptance is not None]
    steps, kept = sum(c.steps for c in ours), sum(c.accepted for c in ours)
    assert 1 + kept / steps > 4, "the draft learnt nothing, so nothing is compared"
    assert growth(drafted, SHORT, "spec_decode_num_drafts") == pytest.approx(steps, rel=0.01)
    accepted = growth(drafted, SHORT, "spec_decode_num_accepted_tokens")
    # vLLM also counts what was accepted behind the end of an answer, ours what was kept.
    assert 0.99 * kept <= accepted <= kept + WIDTH * len(outputs)
    assert matched(drafted[SHORT], asked.prompts[SHORT]) == pytest.approx(kept, rel=0.01)


def matched(found: dict[str, Any], prompts: list[list[int]]) -> int:
    """Tokens of vLLM's blocks that agree with the text behind their anchor, counted to its end."""
    total = 0
    for text, position, _, tokens in blocks_of(found, prompts):
        for at, token in enumerate(tokens, start=position + 1):
            if at >= len(text) or text[at] != token:
                break
            total += 1
    return total


def test_rows_from_the_prefix_cache_draft_as_well_as_cold_ones(drafted: Any) -> None:
    assert drafted[AGAIN]["answers"] == drafted[LONG]["answers"]
    assert acceptance_length(drafted, AGAIN) == pytest.approx(
        acceptance_length(drafted, LONG), rel=0.01
    )


def test_probabilistic_drafts_are_accepted_about_as_often_as_greedy_ones(
    probable: Any, drafted: Any
) -> None:
    assert acceptance_length(probable, SHORT) == acceptance_length(drafted, SHORT)
    assert acceptance_length(probable, MIXED) > 3
