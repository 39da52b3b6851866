"""Kimi-K3's text model as plainly as it can be written: the oracle of our decoder.

One token at a time where the maths is recurrent, lists instead of stacks, no cache; written from
the public descriptions that ``dspark.model.residuals`` names. ``made`` gives a tiny random model as
a config and tensors under the names of the published checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONFIG: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 1.5,
        "activation_situ_linear_beta": 2.5,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 5,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "routed_expert_hidden_size": 20,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "attn_res_block_size": 3,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "num_heads": 3,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "kda_layers": [1, 2, 3, 5, 6],
            "full_attn_layers": [4, 7],
        },
    },
}
T = CONFIG["text_config"]
L = T["linear_attn_config"]


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint."""
    h, heads = T["hidden_size"], T["num_attention_heads"]
    q, kv, nope, rope, v = (T[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
                                           "qk_rope_head_dim", "v_head_dim"))  # fmt: skip
    d, width = L["head_dim"], L["num_heads"] * L["head_dim"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (T["vocab_size"], h),
        "lm_head.weight": (T["vocab_size"], h),
        "model.norm.weight": (h,),
        "model.output_attn_res_norm.weight": (h,),
        "model.output_attn_res_proj.weight": (1, h),
    }
    for i in range(T["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {}
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm",
                     "mlp_res_norm"):  # fmt: skip
            own[f"{name}.weight"] = (h,)
        own["self_attention_res_proj.weight"] = own["mlp_res_proj.weight"] = (1, h)
        if i + 1 in L["kda_layers"]:
            for p in "qkv":
                own[f"self_attn.{p}_proj.weight"] = (width, h)
                own[f"self_attn.{p}_conv1d.weight"] = (width, 1, L["short_conv_kernel_size"])
            own |= {"self_attn.f_a_proj.weight": (d, h), "self_attn.f_b_proj.weight": (width, d),
                    "self_attn.b_proj.weight": (L["num_heads"], h),
                    "self_attn.g_proj.weight": (width, h), "self_attn.A_log": (d,),
                    "self_attn.dt_bias": (width,), "self_attn.o_norm.weight": (d,),
                    "self_attn.o_proj.weight": (h, width)}  # fmt: skip
        else:
            own |= {"self_attn.q_a_proj.weight": (q, h), "self_attn.q_a_layernorm.weight": (q,),
                    "self_attn.q_b_proj.weight": (heads * (nope + rope), q),
                    "self_attn.kv_a_proj_with_mqa.weight": (kv + rope, h),
                    "self_attn.kv_a_layernorm.weight": (kv,),
                    "self_attn.kv_b_proj.weight": (heads * (nope + v), kv),
                    "self_attn.g_proj.weight": (heads * v, h),
                    "self_attn.o_proj.weight": (h, heads * v)}  # fmt: skip
        if i < T["first_k_dense_replace"]:
            own |= _mlp_shapes("mlp", h, T["intermediate_size"])
        else:
            size, latent, at = (T["moe_intermediate_size"], T["routed_expert_hidden_size"],
                                "block_sparse_moe")  # fmt: skip
            own |= _mlp_shapes(f"{at}.shared_experts", h, size * T["num_shared_experts"])
            own |= {f"{at}.gate.weight": (T["num_experts"], h),
                    f"{at}.gate.e_score_correction_bias": (T["num_experts"],),
                    f"{at}.routed_expert_down_proj.weight": (latent, h),
                    f"{at}.routed_expert_norm.weight": (latent,),
                    f"{at}.routed_expert_up_proj.weight": (h, latent)}  # fmt: skip
            for n in range(T["num_experts"]):
                own[f"{at}.experts.{n}.w1.weight"] = own[f"{at}.experts.{n}.w3.weight"] = (
                    size, latent)  # fmt: skip
                own[f"{at}.experts.{n}.w2.weight"] = (latent, size)
        out |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    return out


def _mlp_shapes(at: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}.gate_proj.weight": (size, hidden), f"{at}.up_proj.weight": (size, hidden),
            f"{at}.down_proj.weight": (hidden, size)}  # fmt: skip


def made(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors, spread so that every part shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes().items():
        weight = torch.randn(shape, generator=generator)
        if "norm" in name:
            weight = 1 + 0.3 * weight
        elif "res_proj" in name:
            weight = 0.2 * weight  # sharper mixtures would only magnify rounding
        elif len(shape) > 1:
            weight = weight * shape[-1] ** -0.5 * (2 if "w" in name.split(".")[-2] else 1)
        out[name] = weight if "dt_bias" not in name else 0.3 * weight
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class PlainK3:
    """``run`` gives logits and, per layer, both streams that can be tapped."""

    def __init__(self, w: dict[str, Tensor]) -> None:
        self.w = w

    def run(self, ids: list[int]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Logits [T, V]; prefix sums [T, H] behind each layer; what the next reader mixes."""
        w, size = self.w, T["attn_res_block_size"]
        prefix = w["model.embed_tokens.weight"][torch.tensor(ids)]
        bank: list[Tensor] = []
        sums, mixtures = [], []
        for i in range(T["num_hidden_layers"]):
            at = f"model.layers.{i}."
            x = self.mix(bank, prefix, at + "self_attention_res") if bank else prefix
            if i:
                mixtures.append(x)
            begins = i % size == 0
            if begins:
                bank.append(prefix)
            attention = self.kda if i + 1 in L["kda_layers"] else self.mla
            a = attention(self.normed(x, at + "input_layernorm"), at + "self_attn.")
            prefix = a if begins else prefix + a
            h = self.mix(bank, prefix, at + "mlp_res")
            prefix = prefix + self.ffn(self.normed(h, at + "post_attention_layernorm"), i, at)
            sums.append(prefix)
        x = self.mix(bank, prefix, "model.output_attn_res")
        mixtures.append(x)
        return self.normed(x, "model.norm") @ w["lm_head.weight"].T, sums, mixtures

    def normed(self, x: Tensor, name: str, eps: float = T["rms_norm_eps"]) -> Tensor:
        return norm(x, self.w[name + ".weight"], eps)

    def mix(self, bank: list[Tensor], prefix: Tensor, at: str) -> Tensor:
        scores = []
        for source in (*bank, prefix):
            key = self.normed(source, at + "_norm")
            scores.append(key @ self.w[at + "_proj.weight"][0])
        weights = torch.stack(scores, -1).softmax(-1)
        return sum(weights[:, n : n + 1] * s for n, s in enumerate((*bank, prefix)))

    def kda(self, x: Tensor, at: str) -> Tensor:
        w, heads, d = self.w, L["num_heads"], L["head_dim"]
        q, k, v = (
            self.conv(x @ w[f"{at}{p}_proj.weight"].T, w[f"{at}{p}_conv1d.weight"][:, 0])
            for p in "qkv"
        )
        raw = x @ w[at + "f_a_proj.weight"].T @ w[at + "f_b_proj.weight"].T + w[at + "dt_bias"]
        beta = (x @ w[at + "b_proj.weight"].T).sigmoid()
        rows = []
        state = torch.zeros(heads, d, d)
        for t in range(len(x)):
            out = []
            for n in range(heads):
                one = slice(n * d, (n + 1) * d)
                rate = w[at + "A_log"][n].exp()
                decay = (L["gate_lower_bound"] * (rate * raw[t, one]).sigmoid()).exp()
                key = k[t, one] / (k[t, one].square().sum() + 1e-6).sqrt()
                query = q[t, one] / (q[t, one].square().sum() + 1e-6).sqrt() * d**-0.5
                old = decay[:, None] * state[n]
                state[n] = old + beta[t, n] * torch.outer(key, v[t, one] - key @ old)
                out.append(norm(query @ state[n], w[at + "o_norm.weight"], T["rms_norm_eps"]))
            rows.append(torch.cat(out))
        gate = (x @ w[at + "g_proj.weight"].T).sigmoid()
        return (torch.stack(rows) * gate) @ w[at + "o_proj.weight"].T

    @staticmethod
    def conv(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for back in range(min(weight.shape[1], t + 1)):
                out[t] += weight[:, -1 - back] * x[t - back]
        return F.silu(out)

    def mla(self, x: Tensor, at: str) -> Tensor:
        w, heads = self.w, T["num_attention_heads"]
        nope, rope, v, kv = (T[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                                            "kv_lora_rank"))  # fmt: skip
        low = self.normed(x @ w[at + "q_a_proj.weight"].T, at + "q_a_layernorm", 1e-6)
        q = (low @ w[at + "q_b_proj.weight"].T).view(len(x), heads, nope + rope)
        latent = x @ w[at + "kv_a_proj_with_mqa.weight"].T
        shared = latent[:, kv:]
        inner = self.normed(latent[:, :kv], at + "kv_a_layernorm", 1e-6)
        both = (inner @ w[at + "kv_b_proj.weight"].T).view(len(x), heads, nope + v)
        rows = []
        for t in range(len(x)):
            out = []
            for n in range(heads):
                keys = torch.cat([both[: t + 1, n, :nope], shared[: t + 1]], 1)
                scores = keys @ q[t, n] * (nope + rope) ** -0.5
                out.append(scores.softmax(0) @ both[: t + 1, n, nope:])
            rows.append(torch.cat(out))
        gate = (x @ w[at + "g_proj.weight"].T).sigmoid()
        return (torch.stack(rows) * gate) @ w[at + "o_proj.weight"].T

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        a, b = T["activation_situ_beta"], T["activation_situ_linear_beta"]
        return a * (gate / a).tanh() * gate.sigmoid() * b * (up / b).tanh()

    def swiglu(self, x: Tensor, names: tuple[str, str, str]) -> Tensor:
        gate, up, down = (self.w[name + ".weight"] for name in names)
        return self.situ(x @ gate.T, x @ up.T) @ down.T

    def ffn(self, x: Tensor, layer: int, at: str) -> Tensor:
        def named(prefix: str) -> tuple[str, str, str]:
            return (f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj")

        if layer < T["first_k_dense_replace"]:
            return self.swiglu(x, named(at + "mlp"))
        moe = at + "block_sparse_moe."
        scores = (x @ self.w[moe + "gate.weight"].T).sigmoid()
        latent = x @ self.w[moe + "routed_expert_down_proj.weight"].T
        rows = []
        for t in range(len(x)):
            ranked = scores[t] + self.w[moe + "gate.e_score_correction_bias"]
            chosen = ranked.topk(T["num_experts_per_token"]).indices.tolist()
            total = sum(scores[t, n] for n in chosen)
            row = torch.zeros(latent.shape[1])
            for n in chosen:
                e = f"{moe}experts.{n}."
                part = self.swiglu(latent[t : t + 1], (e + "w1", e + "w3", e + "w2"))[0]
                row += scores[t, n] / total * part
            rows.append(row)
        routed = self.normed(torch.stack(rows), moe + "routed_expert_norm")
        routed = routed @ self.w[moe + "routed_expert_up_proj.weight"].T
        return routed + self.swiglu(x, named(moe + "shared_experts"))
