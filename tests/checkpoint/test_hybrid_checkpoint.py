"""A Kimi Linear checkpoint on disk becomes our own decoder, and its plan knows the states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_targets import made_model, saved

from dspark.checkpoint.sizes import read_sizes
from dspark.checkpoint.source import find_target
from dspark.checkpoint.target import load_target
from dspark.config.recipe import TargetSection
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget

FIELDS = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "linear_head_dim": 8, "linear_num_heads": 3, "pad_token_id": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip


@pytest.fixture
def section(tmp_path: Path) -> TargetSection:
    return TargetSection(source=str(saved(tmp_path, "kimi_linear", **FIELDS)), max_context=64)


def test_a_saved_hybrid_loads_into_our_decoder(section: TargetSection) -> None:
    loaded = load_target(section)
    assert loaded.adapter_reason == ""
    target = loaded.build((0,))
    assert isinstance(target, DecoderTarget)
    assert target.config.recurrent_layers == (0, 2)
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        want = made_model("kimi_linear", **FIELDS)(ids).logits
        out = target.forward(ids, Span.alone(1, 20, ids.device))
    torch.testing.assert_close(target.logits(out.final), want, rtol=1e-4, atol=1e-4)


def test_its_sizes_count_rows_and_states_apart(section: TargetSection) -> None:
    sizes = read_sizes(section, find_target(section.source, None))
    assert sizes.own_decoder
    assert sizes.row_bytes == (16 + 8) * 4
    assert sizes.state_bytes == 2 * (3 * 8 * 8 * 4 + 3 * 3 * 24 * 4)
    whole = made_model("kimi_linear", **FIELDS)
    assert sizes.parameters == sum(p.numel() for p in whole.parameters())
