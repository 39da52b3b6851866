"""dspark's plugin acts only where it was written for, and says what it cannot do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm_environment import judge, vllm_python
from vllm_pairs import QWEN3, export, loud

from dspark.model.draft import DSparkDraft

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "probabilistic": {"draft_sample_method": "probabilistic"},
    "fewer tokens": {"num_speculative_tokens": 3},
    "block": {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"},
    "more tokens": {"num_speculative_tokens": QWEN3.block_size + 1},
    "top-k": {"dspark_draft_topk": 8},
    "adaptive": {"enable_adaptive_verification": True},
    "long": {"engine": {"max_model_len": 2048}},
}


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    vllm_python()
    folder = tmp_path_factory.mktemp("plugin")
    export(folder, loud(DSparkDraft(QWEN3.model_copy(update={"max_position_embeddings": 1024}))))
    (folder / "cases.json").write_text(json.dumps(CASES), encoding="utf-8")
    return judge("judge_plugin.py", folder, plugin=True).answer


def test_it_leaves_gpus_and_unknown_versions_alone(answer: dict[str, Any]) -> None:
    assert not answer["at once"]
    assert not answer["another version"]
    assert not answer["on a GPU"]
    assert "dspark speculative decoding" in answer["without"]
    assert answer["here"]
    assert answer["twice is once"]


@pytest.mark.parametrize("case", ["usual", "probabilistic", "fewer tokens"])
def test_the_unchanged_configuration_is_taken(answer: dict[str, Any], case: str) -> None:
    assert answer["cases"][case] == ""


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("block", "rejection_sample_method block"),
        ("more tokens", "more than the block of 7"),
        ("top-k", "dspark_draft_topk"),
        ("adaptive", "adaptive draft verification"),
        ("long", "--max-model-len 1024"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    answer: dict[str, Any], case: str, reason: str
) -> None:
    assert reason in answer["cases"][case]
