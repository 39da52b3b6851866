"""Tiny random Kimi Linear models, and flat forwards over pages and state slots by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.model.paged import PagedRows
from dspark.model.spans import PagedSpan, Segment
from dspark.model.states import SlotStates
from dspark.model.target import DecoderTarget, TargetOutput
from model.tiny_targets import transformers_model

CPU = torch.device("cpu")
_KIMI: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "rms_norm_eps": 1e-4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention",
          "full_attention"]  # fmt: skip

# name -> fields beyond the tiny sizes
KIMI: dict[str, dict[str, Any]] = {
    "kimi": _KIMI,
    "kimi-mixed": {**_KIMI, "layer_types": _MIXED, "q_lora_rank": 12},
    "kimi-kernel": {**_KIMI, "linear_conv_kernel_dim": 2, "mlp_layer_types": ["dense"] * 5},
    "kimi-groups": {
        **_KIMI, "layer_types": _MIXED, "num_local_experts": 12, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 3, "n_shared_experts": 2, "norm_topk_prob": False,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
    },
}  # fmt: skip


def kimi_model(name: str, **fields: Any) -> Any:
    """The transformers side of :data:`KIMI`."""
    return transformers_model("kimi_linear", **{**KIMI[name], **fields})


class Slots:
    """A hybrid target's rows and states of a few requests, one long run of pages each."""

    def __init__(self, target: DecoderTarget, count: int, capacity: int = 128) -> None:
        assert target.state_dims is not None
        self.target, self.size = target, 16
        per = capacity // self.size
        self.tables = [list(range(i * per, (i + 1) * per)) for i in range(count)]
        parts = [(heads, width, target.dtype) for heads, width in target.row_parts]
        self.rows = PagedRows([parts] * target.row_layers, count * per, self.size, CPU)
        self.rows.states = self.states = SlotStates(target.state_dims, 2 * count, CPU)
        self.at = [0] * count

    def run(self, requests: Sequence[int], texts: Sequence[Sequence[int]]) -> TargetOutput:
        """Run ``texts`` behind what is committed of each request; commits nothing."""
        lengths = [len(t) for t in texts]
        spans = [
            Segment(self.tables[r], self.at[r], n) for r, n in zip(requests, lengths, strict=True)
        ]
        self.running = list(requests)
        self.states.enter(requests, lengths)
        span = PagedSpan.of(spans, self.size, self.rows.spare, CPU)
        ids = torch.tensor([[token for text in texts for token in text]])
        with torch.inference_mode():
            return self.target.forward(ids, span, self.rows)

    def commit(self, counts: Sequence[int], saved: Sequence[tuple[int, int, int]] = ()) -> None:
        with torch.inference_mode():
            self.states.commit(counts, saved)
        for request, count in zip(self.running, counts, strict=True):
            self.at[request] += count

    def state(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.states.matrices[:, slot].clone(), self.states.inputs[:, slot].clone()
