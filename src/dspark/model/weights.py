"""The only place that knows checkpoint keys: of targets, and where the flavours of a draft differ.

Llama-family checkpoints use the half-split rotary layout; ours is interleaved. Rows of q and k (and
of Qwen3's per-head norms) are permuted once here, which leaves every dot product unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.config.architecture import Flavour
from dspark.config.target import TargetConfig
from dspark.errors import TargetError


class DraftNames(NamedTuple):
    """Published names of the parts of a draft that are called differently in its two flavours."""

    context_proj: str
    context_norm: str
    final_norm: str


DRAFT_NAMES: Mapping[Flavour, DraftNames] = {
    "k3": DraftNames("context_proj", "context_norm", "final_norm"),
    "qwen3": DraftNames("fc", "hidden_norm", "norm"),
}


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows (0..d/2-1, d/2..d-1) to pairs (0, d/2, 1, d/2+1, ...)."""
    half = torch.arange(head_dim // 2)
    order = torch.stack([half, half + head_dim // 2], dim=1).flatten()
    heads: Tensor = torch.unflatten(weight, 0, (-1, head_dim))
    return heads[:, order].flatten(0, 1)


class _Taken:
    """A source state dict that remembers which names were used, so leftovers can be refused."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        self.source = source
        self.used: set[str] = set()

    def __call__(self, name: str) -> Tensor:
        if name not in self.source:
            raise TargetError(
                expected=f"a weight named {name}",
                found=f"{len(self.source)} tensors without it",
                where="target checkpoint",
                fix="Check that config.json and weights belong together.",
            )
        self.used.add(name)
        return self.source[name]


def target_state(config: TargetConfig, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Translate a Hugging Face causal-LM state dict to :class:`DecoderTarget` names.

    Raises:
        TargetError: a weight is missing, or one is left over that our decoder would ignore.
    """
    take = _Taken(source)
    embedding = take("model.embed_tokens.weight")
    out = {"embed_tokens.weight": embedding, "final_norm.weight": take("model.norm.weight")}
    if config.residual_block is not None:
        out.update(_mix(take, "model.output_attn_res", "final_mix."))
    tied = config.tie_word_embeddings
    out["lm_head.weight"] = embedding if tied else take("lm_head.weight")
    for i in range(config.num_hidden_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[ours + norm] = take(hf + norm)
        if config.residual_block is not None:
            out.update(_mix(take, hf + "self_attention_res", ours + "attention_mix."))
            out.update(_mix(take, hf + "mlp_res", ours + "mlp_mix."))
        experts = config.experts_of(i)
        if experts is None:
            out.update(_mlp(take, hf + "mlp.", ours + "mlp."))
        elif experts.routed_expert_hidden_size is not None:
            out.update(_latent_experts(config, take, hf + "block_sparse_moe.", ours + "mlp."))
        else:
            out.update(_experts(config, take, hf + "mlp.", ours + "mlp."))
        attention = _gqa if config.attention == "gqa" else _mla
        if i in config.recurrent_layers:
            attention = _kda
        for name, tensor in attention(config, take, hf + "self_attn.").items():
            out[ours + "self_attn." + name] = tensor
        if config.output_gate and attention is _mla:
            out[ours + "self_attn.g_proj.weight"] = take(hf + "self_attn.g_proj.weight")
    ignorable = {"lm_head.weight"} if tied else set()
    left = {n for n in source if n not in take.used and "rotary_emb" not in n} - ignorable
    if left:
        raise TargetError(
            expected="only weights our decoder knows",
            found=f"{len(left)} more, for instance {sorted(left)[0]}",
            where="target checkpoint",
            fix="The transformers adapter can run this target.",
        )
    return out


def _mlp(take: _Taken, at: str, ours: str) -> dict[str, Tensor]:
    gate, up = take(at + "gate_proj.weight"), take(at + "up_proj.weight")
    return {
        ours + "gate_up_proj.weight": torch.cat([gate, up]),
        ours + "down_proj.weight": take(at + "down_proj.weight"),
    }


def _experts(config: TargetConfig, take: _Taken, at: str, ours: str) -> dict[str, Tensor]:
    """transformers stacks the experts' weights; checkpoints have them one by one."""
    assert config.experts is not None
    out = {
        ours + "gate.weight": take(at + "gate.weight"),
        ours + "gate.correction": take(at + "gate.e_score_correction_bias"),
        **_mlp(take, at + "shared_experts.", ours + "shared_experts."),
    }
    stacked = at + "experts.gate_up_proj" in take.source
    gate_up = take(at + "experts.gate_up_proj") if stacked else None
    down = take(at + "experts.down_proj") if stacked else None
    for n in range(config.experts.n_routed_experts):
        own = f"{ours}experts.{n}."
        if gate_up is not None and down is not None:
            out[own + "gate_up_proj.weight"] = gate_up[n]
            out[own + "down_proj.weight"] = down[n]
        else:
            out.update(_mlp(take, f"{at}experts.{n}.", own))
    return out


def _gqa(config: TargetConfig, take: _Taken, at: str) -> dict[str, Tensor]:
    d = config.head_dim
    out = {"o_proj.weight": take(at + "o_proj.weight")}
    for kind in ("weight", "bias") if config.attention_bias else ("weight",):
        parts = [take(f"{at}{p}_proj.{kind}") for p in "qkv"]
        out[f"qkv_proj.{kind}"] = torch.cat(
            [_interleave(parts[0], d), _interleave(parts[1], d), parts[2]]
        )
    if config.qk_norm:
        for p in "qk":
            out[f"{p}_norm.weight"] = _interleave(take(f"{at}{p}_norm.weight"), d)
    return out


def _mla(config: TargetConfig, take: _Taken, at: str) -> dict[str, Tensor]:
    """DeepSeek-V3 names are ours; half-split rope parts (``rope_interleave`` off) are permuted."""
    names = ["kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight",
             "o_proj.weight"]  # fmt: skip
    if config.q_lora_rank is None:
        query = "q_proj.weight"
        names.append(query)
    else:
        query = "q_b_proj.weight"
        names += ["q_a_proj.weight", "q_a_layernorm.weight", query]
    if config.attention_bias:
        names += ["kv_a_proj_with_mqa.bias", "o_proj.bias"]
        names += ["q_a_proj.bias"] if config.q_lora_rank is not None else []
    out = {f"core.{name}": take(at + name) for name in names}
    if config.rotary and not config.rope_interleave:
        rope, nope = int(config.qk_rope_head_dim or 0), int(config.qk_nope_head_dim or 0)
        heads = torch.unflatten(out["core." + query], 0, (-1, nope + rope))
        roped = _interleave(heads[:, nope:].flatten(0, 1), rope)
        roped = torch.unflatten(roped, 0, (-1, rope))
        out["core." + query] = torch.cat([heads[:, :nope], roped], 1).flatten(0, 1)
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            key = f"core.kv_a_proj_with_mqa.{kind}"
            kv, rope_rows = out[key][:-rope], out[key][-rope:]
            out[key] = torch.cat([kv, _interleave(rope_rows, rope)])
    return out


def _kda(config: TargetConfig, take: _Taken, at: str) -> dict[str, Tensor]:
    """transformers' names of Kimi Linear, and those of K3's own files where it differs; what reads
    the same input is joined."""
    linear = config.linear
    assert linear is not None

    def joined(*names: str) -> Tensor:
        return torch.cat([take(f"{at}{name}.weight") for name in names])

    own = linear.full_rank_gate  # K3's files
    gate = at if own else at + "forget_gate."
    out = {
        "qkv_proj.weight": joined("q_proj", "k_proj", "v_proj"),
        "f_b_proj.weight": take(gate + "f_b_proj.weight"),
        # K3's file has more numbers than heads; its own code reads as many as there are heads.
        "forget.rate": take(gate + "A_log").flatten()[: linear.heads],
        "forget.offset": take(gate + "dt_bias").flatten(),
        "o_norm": take(at + "o_norm.weight"),
        "o_proj.weight": take(at + "o_proj.weight"),
    }
    if own:
        out["conv"] = joined("q_conv1d", "k_conv1d", "v_conv1d").squeeze(1)
        out["gates_proj.weight"] = joined("f_a_proj", "g_proj", "b_proj")
    else:
        out["conv"] = take(at + "conv1d.weight").squeeze(1)
        out["gates_proj.weight"] = joined("forget_gate.f_a_proj", "g_a_proj", "b_proj")
        out["g_b_proj.weight"] = take(at + "g_b_proj.weight")
    return out


def _mix(take: _Taken, at: str, ours: str) -> dict[str, Tensor]:
    """Attention residuals, K3's names."""
    norm, proj = take(at + "_norm.weight"), take(at + "_proj.weight")
    return {ours + "norm": norm, ours + "proj": proj.flatten()}


def _latent_experts(config: TargetConfig, take: _Taken, at: str, ours: str) -> dict[str, Tensor]:
    """Experts in a latent space, K3's names: w1 is the gate, w3 up, w2 down."""
    assert config.experts is not None
    out = {
        ours + "gate.weight": take(at + "gate.weight"),
        ours + "gate.correction": take(at + "gate.e_score_correction_bias"),
        ours + "routed_down_proj.weight": take(at + "routed_expert_down_proj.weight"),
        ours + "routed_up_proj.weight": take(at + "routed_expert_up_proj.weight"),
        **_mlp(take, at + "shared_experts.", ours + "shared_experts."),
    }
    if config.experts.latent_moe_use_norm:
        out[ours + "routed_norm.weight"] = take(at + "routed_expert_norm.weight")
    for n in range(config.experts.n_routed_experts):
        expert, own = f"{at}experts.{n}.", f"{ours}experts.{n}."
        gate, up = take(expert + "w1.weight"), take(expert + "w3.weight")
        out[own + "gate_up_proj.weight"] = torch.cat([gate, up])
        out[own + "down_proj.weight"] = take(expert + "w2.weight")
    return out
