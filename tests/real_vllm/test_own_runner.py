"""vLLM's own V2 runner and DSparkSpeculator, which GPUs use, draft what our engine drafts.

Nothing of dspark runs there: a trained draft of the qwen3 flavour goes in as files, and tokens come
out. The kernels go through Triton's interpreter (``interpreted_triton``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafted_blocks import Redrafted, blocks_of, matched
from trained_pair import TrainedPair, trained_pair
from vllm_environment import judge, vllm_python

from dspark import Engine, SamplingParams
from dspark.checkpoint.target import load_target
from dspark.config.engine import EngineOptions
from dspark.config.recipe import TargetSection
from dspark.data.chat import prompt_ids

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

CONTEXT, WIDTH, TOKENS = 256, 7, 48
ENGINE: dict[str, Any] = {
    "max_model_len": CONTEXT,
    "max_num_seqs": 8,
    # Longer prompts are read in several steps, beside others that are decoded.
    "max_num_batched_tokens": 80,
    "block_size": 32,
    "num_gpu_blocks_override": 72,
}


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> TrainedPair:
    vllm_python()
    return trained_pair(Path(request.config.cache.mkdir("vllm")))


@pytest.fixture(scope="module")
def prompts(pair: TrainedPair) -> list[list[int]]:
    loaded = load_target(TargetSection(source=str(pair.target), max_context=CONTEXT))
    short = [
        prompt_ids(loaded.tokenizer, [{"role": "user", "content": q}]) for q in pair.questions(20)
    ]
    shots = [i for ids in short[:5] for i in ids]
    long = [shots + ids for ids in short[5:8]]
    assert min(map(len, long)) > 80
    return [*short[8:], *long]


@pytest.fixture(scope="module")
def found(
    pair: TrainedPair, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("v2")
    spec = {"method": "dspark", "model": str(pair.draft), "num_speculative_tokens": WIDTH}
    engine = {"model": str(pair.target), **ENGINE, "speculative_config": spec}
    sampling = {"temperature": 0, "max_tokens": TOKENS}
    job = {"engine": engine, "batches": [{"prompts": prompts, "sampling": sampling}]}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return judge("run_v2.py", folder).answer


def test_it_is_the_runner_of_gpus_that_answers(found: dict[str, Any]) -> None:
    assert found["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert found["speculator"] == "vllm.v1.worker.gpu.spec_decode.dspark.speculator"


def test_every_token_it_drafts_is_the_one_our_engine_drafts(
    pair: TrainedPair, prompts: list[list[int]], found: dict[str, Any]
) -> None:
    loaded = load_target(TargetSection(source=str(pair.target), max_context=CONTEXT))
    redrafted = Redrafted(loaded, pair.draft)
    redrafted.compare(blocks_of(found, prompts), CONTEXT)
    assert redrafted.compared > 500
    assert redrafted.differing <= redrafted.compared // 500, str(redrafted)


def test_its_texts_and_acceptance_are_those_of_our_engine(
    pair: TrainedPair, prompts: list[list[int]], found: dict[str, Any]
) -> None:
    options = EngineOptions(verification="standard", draft_sample_method="greedy")
    engine = Engine(pair.target, pair.draft, options=options)
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=TOKENS))
    assert [list(o.completions[0].ids) for o in outputs] == found["answers"]
    counts = [o.acceptance for o in outputs if o.acceptance is not None]
    kept = sum(c.accepted for c in counts)
    assert 1 + kept / sum(c.steps for c in counts) > 4
    assert matched(found, prompts) == pytest.approx(kept, rel=0.02)
