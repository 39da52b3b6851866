"""Drafts of DeepSpec and speculators: the same model under our roof, or a refusal that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.checkpoint.draft import load_draft, save_draft
from dspark.checkpoint.foreign import format_of
from dspark.checkpoint.published import read_config
from dspark.config.architecture import Qwen3DraftConfig
from dspark.errors import CheckpointError
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise
from dspark.model.support import read_support
from dspark.training.warmstart import continue_from

VOCAB, HIDDEN, RANK, DEPTH = 29, 16, 3, 6
KEPT = torch.tensor([0, 2, 3, 7, 11, 19, 28])
CONFIG = Qwen3DraftConfig(
    hidden_size=HIDDEN,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    target_layer_ids=(0, 2, 4),
    target_num_hidden_layers=DEPTH,
    target_hidden_size=HIDDEN,
    mask_token_id=27,
    markov_rank=RANK,
    block_size=3,
)
# As transformers writes the config of DeepSpec's class, its own settings included.
DEEPSPEC: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 3,
    "bos_token_id": None,
    "confidence_head_with_markov": True,
    "dtype": "float32",
    "enable_confidence_head": True,
    "head_dim": 6,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 20,
    "layer_types": ["full_attention", "full_attention"],
    "markov_head_type": "vanilla",
    "markov_rank": RANK,
    "mask_token_id": 27,
    "max_position_embeddings": 64,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_anchors": 6,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": DEPTH,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "sliding_window": None,
    "target_layer_ids": [0, 2, 4],
    "tie_word_embeddings": False,
    "transformers_version": "5.10.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
# Fields at transformers' defaults (rms_norm_eps, rope, no sliding window) are left out there.
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "nobody/target", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "aux_hidden_state_layer_ids": [1, 3, 5],
    "block_size": 3,
    "draft_vocab_size": VOCAB,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_head_type": "vanilla",
    "markov_rank": RANK,
    "mask_token_id": 27,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "target_hidden_size": None,
    "target_num_hidden_layers": DEPTH,
}


def random_draft(config: Qwen3DraftConfig = CONFIG) -> DSparkDraft:
    draft = initialise(DSparkDraft(config), None, seed=3)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "norm" in name or "confidence" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
            elif "markov" in name:
                weight.normal_(0, 1, generator=generator)
    return draft.eval().requires_grad_(False)


def head() -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def whole(draft: DSparkDraft) -> dict[str, Tensor]:
    return {**draft.state_dict(), "lm_head.weight": head()}


def reduced(draft: DSparkDraft) -> dict[str, Tensor]:
    """As speculators stores a draft that only knows KEPT."""
    state = draft.state_dict()
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[KEPT] = True
    return {
        **state,
        "markov_head.markov_w2.weight": state["markov_head.markov_w2.weight"][KEPT],
        "lm_head.weight": head()[KEPT],
        "d2t": KEPT - torch.arange(len(KEPT)),
        "t2d": mask,
    }


@pytest.mark.parametrize("raw", [DEEPSPEC, SPECULATORS], ids=["deepspec", "speculators"])
def test_a_whole_draft_is_loaded_bit_by_bit_and_written_as_ours(
    tmp_path: Path, raw: dict[str, Any]
) -> None:
    want = random_draft()
    folder = write(tmp_path / "theirs", raw, whole(want))
    draft, provenance = load_draft(folder, head=head())
    assert draft.config == CONFIG
    assert provenance["converted_from"] == format_of(raw)
    assert set(draft.state_dict()) == set(want.state_dict())
    for name, weight in want.state_dict().items():
        assert torch.equal(draft.state_dict()[name], weight), name
    mine = tmp_path / "ours"
    mine.mkdir()
    save_draft(mine, draft, provenance, torch.float32)
    written = load_file(str(mine / "model.safetensors"))
    theirs = load_file(str(folder / "model.safetensors"))
    theirs.pop("lm_head.weight")
    assert set(written) == set(theirs)
    assert all(torch.equal(written[name], theirs[name]) for name in theirs)
    again = json.loads((mine / "config.json").read_text())
    assert format_of(again) == "dspark"
    assert read_config(mine)[0] == CONFIG


def test_our_own_config_may_lie_beside_an_lm_head(tmp_path: Path) -> None:
    want = random_draft()
    folder = write(tmp_path / "both", CONFIG.to_json(), whole(want))
    draft, provenance = load_draft(folder, head=head())
    assert "converted_from" not in provenance
    assert torch.equal(draft.context_proj.get_parameter("weight"), want.state_dict()["fc.weight"])


def test_another_targets_lm_head_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", DEEPSPEC, whole(random_draft()))
    load_draft(folder, head=head())
    with pytest.raises(CheckpointError, match="lm_head"):
        load_draft(folder, head=head() + 1)
    rounded = {**whole(random_draft()), "lm_head.weight": head().bfloat16()}
    load_draft(write(tmp_path / "rounded", DEEPSPEC, rounded), head=head())


@torch.no_grad()
def test_a_reduced_vocabulary_keeps_every_probability(tmp_path: Path) -> None:
    want = random_draft()
    raw = SPECULATORS | {"draft_vocab_size": len(KEPT)}
    draft, _ = load_draft(write(tmp_path / "theirs", raw, reduced(want)), head=head())
    assert draft.config.markov_rank == RANK + 1
    found = read_support(draft)
    assert found is not None
    assert torch.equal(found, KEPT)
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(5, HIDDEN, generator=generator)
    previous = torch.randint(0, VOCAB, (5,), generator=generator)
    small = states @ head()[KEPT].T
    small = small + want.markov_head.markov_w1(previous) @ want.markov_head.markov_w2.weight[KEPT].T
    m, e = draft.markov_head.block(previous, states)
    ours = torch.softmax(states @ head().T + draft.markov_head.markov_w2(m), -1)
    assert torch.allclose(ours[:, KEPT], torch.softmax(small, -1), atol=1e-6)
    assert float(ours.sum(-1).sub(ours[:, KEPT].sum(-1)).abs().max()) < 1e-6
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[KEPT] = False
    assert not bool(ours[:, outside].any())
    theirs = want.confidence_head(states, want.markov_head.markov_w1(previous))
    assert torch.allclose(draft.confidence_head(states, e), theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"sample_from_anchor": False}, "sample_from_anchor", "another model"),
        ({"sample_from_anchor": None}, "sample_from_anchor", "nothing means false"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type", "another method"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type", "another method"),
        ({"mask_token_id": None}, "mask_token_id", "nothing"),
        ({"aux_hidden_state_layer_ids": [0, 3, 5]}, "aux_hidden_state_layer_ids", "embedding"),
        ({"target_num_hidden_layers": None}, "target_num_hidden_layers", "nobody/target"),
        (
            {"transformer_layer_config": {"model_type": "llama"}},
            "transformer_layer_config",
            "llama",
        ),
        ({"draft_vocab_size": 7, "markov_head_type": "rnn"}, "draft_vocab_size", "vanilla"),
        ({"block_size": 0}, "config.json", "block_size"),
        ({"aux_hidden_state_layer_ids": [1, 3, 6]}, "config.json", "last of 6 layers"),
        ({"enable_confidence_head": False}, "config.json", "enable_confidence_head"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_key(
    tmp_path: Path, change: dict[str, Any], key: str, says: str
) -> None:
    folder = write(tmp_path / "theirs", SPECULATORS | change, whole(random_draft()))
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder)
    assert key in caught.value.where
    assert says in str(caught.value), str(caught.value)


def test_the_targets_depth_comes_from_a_verifier_that_is_here(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 9}))
    raw = SPECULATORS | {"target_num_hidden_layers": None}
    raw["speculators_config"] = {"verifier": {"name_or_path": str(target)}}
    config, provenance = read_config(write(tmp_path / "theirs", raw, whole(random_draft())))
    assert config.target_num_hidden_layers == 9
    assert provenance["target"] == str(target)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"d2t": None}, "nothing"),
        ({"d2t": torch.zeros(7)}, "float32"),
        ({"d2t": torch.full((7,), 40)}, "outside"),
        ({"d2t": torch.tensor([0, -1, 0, 0, 0, 0, 0])}, "twice"),
        ({"d2t": torch.arange(5)}, "markov_w2"),
        ({"markov_head.markov_w1.weight": None}, "markov"),
        ({"fc.weight": None}, "missing fc.weight"),
        ({"layers.0.self_attn.q_proj.bias": torch.zeros(24)}, "unexpected"),
    ],
)
def test_tables_and_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, Tensor | None], says: str
) -> None:
    merged = {**reduced(random_draft()), **change}
    tensors = {name: tensor for name, tensor in merged.items() if tensor is not None}
    raw = SPECULATORS | {"draft_vocab_size": 7}
    with pytest.raises(CheckpointError, match=says):
        load_draft(write(tmp_path / "theirs", raw, tensors))


def test_a_layout_that_nobody_declares_is_refused(tmp_path: Path) -> None:
    """Only DeepSpec's own writer may leave it out: its class has no other layout."""
    raw = {k: v for k, v in DEEPSPEC.items() if k != "num_anchors"}
    with pytest.raises(CheckpointError, match="sample_from_anchor"):
        load_draft(write(tmp_path / "theirs", raw, whole(random_draft())))


def test_drafts_for_other_targets_of_deepspec_are_named(tmp_path: Path) -> None:
    raw = DEEPSPEC | {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4"}
    with pytest.raises(CheckpointError, match="Gemma4DSparkModel"):
        load_draft(write(tmp_path / "theirs", raw, whole(random_draft())))


def test_training_goes_on_from_a_foreign_draft(tmp_path: Path) -> None:
    theirs = random_draft()
    start, _ = load_draft(write(tmp_path / "theirs", DEEPSPEC, whole(theirs)), head=head())
    draft = initialise(DSparkDraft(CONFIG), theirs.embed_tokens.weight, seed=1)
    assert continue_from(draft, start, None) is None
    assert torch.equal(draft.final_norm.weight, theirs.final_norm.weight)
