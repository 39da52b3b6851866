"""Above temperature 0: what leaves vLLM with our draft has the target's distribution."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_pair import TrainedPair, trained_pair
from vllm_environment import judge, vllm_python

from dspark.checkpoint.target import load_target
from dspark.config.recipe import TargetSection
from dspark.data.chat import prompt_ids

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

SAMPLES, LENGTH = 12_000, 4
CASES: list[dict[str, Any]] = [
    {"temperature": 2.0, "top_k": 4},
    {"temperature": 2.0, "top_k": 6, "top_p": 0.98},
]
WAYS = {"greedy": "qwen3", "probabilistic": "qwen3", "latent": "k3"}


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    vllm_python()
    return Path(request.config.cache.mkdir("vllm"))


def prompt_of(pair: TrainedPair) -> list[int]:
    """A prompt that ends inside an answer, where the target is of several minds."""
    tokenizer = load_target(TargetSection(source=str(pair.target), max_context=256)).tokenizer
    question = "tom has 4 and gets 8"
    return [*prompt_ids(tokenizer, [{"role": "user", "content": question}]), 25, 17]


def kept(logits: torch.Tensor, case: dict[str, Any]) -> dict[int, float]:
    """Temperature, then top_k, then top_p, in that order: token -> probability."""
    p = torch.softmax(logits.double() / case["temperature"], -1)
    values, ids = p.sort(descending=True)
    values = values[: case["top_k"]] / values[: case["top_k"]].sum()
    # The smallest set whose mass reaches top_p.
    before = values.cumsum(0) - values
    inside = before < case.get("top_p", 1.0)
    values = values[inside] / values[inside].sum()
    return dict(zip(ids[: len(values)].tolist(), values.tolist(), strict=True))


@torch.inference_mode()
def exact(
    pair: TrainedPair, prompt: list[int], case: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """Probability of every possible answer of LENGTH tokens, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        texts = list(open_)
        logits = model(torch.tensor([[*prompt, *t] for t in texts])).logits[:, -1]
        grown: dict[tuple[int, ...], float] = {}
        for text, row in zip(texts, logits, strict=True):
            for token, p in kept(row, case).items():
                grown[(*text, token)] = open_[text] * p
        open_ = grown
    return open_


def chi_square(found: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    """Upper tail probability, cells expected less than 10 times taken together."""
    total = sum(found.values())
    statistic = rest_wanted = rest_found = 0.0
    cells = 0
    for cell, p in wanted.items():
        if p * total < 10:
            rest_wanted += p * total
            rest_found += found[cell]
            continue
        statistic += (found[cell] - p * total) ** 2 / (p * total)
        cells += 1
    if rest_wanted >= 10:
        statistic += (rest_found - rest_wanted) ** 2 / rest_wanted
        cells += 1
    assert cells > 20, "nothing to tell apart"
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("way", WAYS)
def test_sampled_answers_have_the_targets_distribution(
    way: str, cache: Path, tmp_path: Path
) -> None:
    pair = trained_pair(cache, WAYS[way])
    prompt = prompt_of(pair)
    job = {
        "engine": {
            "model": str(pair.target),
            "max_model_len": 128,
            "max_num_seqs": 128,
            "speculative_config": {
                "method": "dspark",
                "model": str(pair.draft),
                "num_speculative_tokens": 7,
                "draft_sample_method": "greedy" if way == "greedy" else "probabilistic",
            },
        },
        "batches": [
            {
                "prompts": [prompt] * SAMPLES,
                "sampling": {**case, "max_tokens": LENGTH, "ignore_eos": True},
            }
            for case in CASES
        ],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    batches = judge("run_offline.py", tmp_path, plugin=True).answer["batches"]
    for case, batch in zip(CASES, batches, strict=True):
        wanted = exact(pair, prompt, case)
        assert math.isclose(sum(wanted.values()), 1.0, rel_tol=1e-9)
        found = Counter(tuple(a) for a in batch["answers"])
        # fp32 may put a token on the other side of a cut; nothing else may lie outside.
        assert sum(n for a, n in found.items() if a not in wanted) <= SAMPLES // 1000
        assert chi_square(found, wanted) > 1e-4, case
        accepted = batch["counters"]["vllm:spec_decode_num_accepted_tokens"]
        assert accepted > SAMPLES // 10, "hardly anything was drafted"


def test_the_chi_square_would_tell_another_temperature(cache: Path) -> None:
    pair = trained_pair(cache)
    prompt = prompt_of(pair)
    wanted, other = (exact(pair, prompt, {"temperature": t, "top_k": 4}) for t in (2.0, 1.85))
    counts = Counter({a: round(SAMPLES * p) for a, p in other.items()})
    assert chi_square(counts, wanted) < 1e-4
