"""The keys and values that a launch line may give vLLM for a DSpark draft, asked of vLLM itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm_environment import judge, vllm_python
from vllm_pairs import K3, export, loud

from dspark.model.draft import DSparkDraft

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "block size": {"num_speculative_tokens": K3.block_size},
    "more than trained": {"num_speculative_tokens": K3.block_size + 2},
    "probabilistic": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
    "backend": {"attention_backend": "flashinfer_mla"},
    "unknown backend": {"attention_backend": "nonsense"},
    "unknown sampling": {"draft_sample_method": "gumbel"},
    "unknown key": {"block_size": 7},
    "unknown method": {"method": "k3_dspark"},
    "no method": {"method": None, "num_speculative_tokens": 7},
    "tensor parallel": {"tensor_parallel_size": 1},
    "draft tensor parallel": {"draft_tensor_parallel_size": 1},
    "top-k": {"dspark_draft_topk": 8},
}


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    vllm_python()
    # A name without "dspark", from which vLLM would guess the method.
    folder = tmp_path_factory.mktemp("speculative")
    export(folder, loud(DSparkDraft(K3)))
    (folder / "cases.json").write_text(json.dumps(CASES), encoding="utf-8")
    return judge("judge_speculative.py", folder).answer


def test_width_comes_from_our_config_and_can_be_repeated(answer: dict[str, Any]) -> None:
    for case in ("nothing", "block size"):
        assert answer[case] == {
            "method": "dspark",
            "num_speculative_tokens": K3.block_size,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
            "attention_backend": None,
        }


def test_a_width_beyond_the_trained_block_is_not_refused_by_vllm(answer: dict[str, Any]) -> None:
    """So whoever writes the launch line has to refuse it."""
    assert answer["more than trained"]["num_speculative_tokens"] == K3.block_size + 2


def test_sampling_verification_and_backend_are_taken_as_given(answer: dict[str, Any]) -> None:
    assert answer["probabilistic"]["draft_sample_method"] == "probabilistic"
    assert answer["probabilistic"]["rejection_sample_method"] == "block"
    assert answer["backend"]["attention_backend"] == "FLASHINFER_MLA"
    assert "refused" not in answer["draft tensor parallel"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unknown backend", "Unknown attention backend"),
        ("unknown sampling", "'greedy' or 'probabilistic'"),
        ("unknown key", "Unexpected keyword argument"),
        ("unknown method", "method Input should be"),
        ("tensor parallel", "draft_tensor_parallel_size"),
        ("top-k", "only supported by Qwen3DSparkModel"),
    ],
)
def test_other_values_are_refused(answer: dict[str, Any], case: str, reason: str) -> None:
    assert reason in answer[case]["refused"]


def test_without_a_method_a_k3_draft_is_taken_for_an_ordinary_model(answer: dict[str, Any]) -> None:
    assert answer["no method"].get("method") == "draft_model"


def test_the_cpu_build_refuses_the_method_only_in_its_runner(answer: dict[str, Any]) -> None:
    refusal = "Model Runner V1 does not support: dspark speculative decoding"
    assert refusal in answer["V1 untouched"]["refused"]
    assert "Model Runner V2 requires Triton" in answer["V2 untouched"]["refused"]
