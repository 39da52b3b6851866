"""What each engine reads from a draft's config.json, as a table with sources.

Engines differ in what they look for and what they make of its absence; most of them answer a wrong
value with low acceptance, not with an error. One :class:`Rule` is one sentence about one key. Rules
are about the file alone (no weights, no target) and need not be able to parse it.

Sources: "vLLM" is vLLM 0.32.0, read and where possible executed; "ATOM" is ROCm/ATOM at ffdf3bb
(August 2026); "contract" is docs/contract.md, which holds what all engines have in common; the
others are public reports of what a broken rule did to somebody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dspark.config.layers import LayerConvention, to_convention
from dspark.doctor import predicates as p
from dspark.doctor.findings import Check, failed, passed, warned

Engine = Literal["vllm", "atom", "sglang", "hf"]
ENGINES: tuple[Engine, ...] = ("vllm", "atom", "sglang", "hf")
BOTH: tuple[p.Flavour, ...] = ("k3", "qwen3")


@dataclass(frozen=True)
class Rule:
    """``broken`` says what was found, or None when the rule holds."""

    engines: tuple[Engine, ...]
    key: str
    requirement: str
    why: str
    mend: str
    source: str
    broken: p.Broken
    flavours: tuple[p.Flavour, ...] = BOTH
    severity: Literal["fail", "warn"] = "fail"


VLLM_K3 = "vLLM models/kimi_k3/nvidia/dspark_mla.py and transformers_utils/configs/k3_dspark.py"
VLLM_LAYERS = "vLLM v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
VLLM_ROPE = "vLLM models/kimi_k3/nvidia/mla.py and layers/rotary_embedding"
VLLM_QWEN3 = "vLLM models/qwen3_dspark.py and qwen3_dflash.py"
ATOM_MLA = "ATOM atom/models/kimi_k3_dspark.py, K3DSparkMLAAttention"
ATOM_NAMES = "ATOM atom/config.py, _normalize_draft_dspark_config"
CONTRACT = "contract, section 9"

RULES: tuple[Rule, ...] = (
    Rule(
        ENGINES, "architectures", "K3DSparkModel with model_type k3_dspark, or Qwen3DSparkModel "
        "with qwen3", "engines choose the draft by it; with another name vLLM and ATOM take it for "
        "a DeepSeek-V4 draft", "Set both to the published names.",
        "vLLM config/speculative.py; ATOM atom/config.py, hf_config_override", p.architecture,
    ),
    Rule(
        ("vllm", "hf"), "sizes", "all written",
        "a missing size is no error: DeepSeek's own default takes its place (kv_lora_rank 512, "
        "vocab_size 129280)", "Write every size.", VLLM_K3, p.written(p.K3_SIZES), ("k3",),
    ),
    Rule(
        ("vllm", "hf"), "sizes", "all written",
        "a missing size is no error: Qwen3's own default takes its place (head_dim 128)",
        "Write every size.", VLLM_QWEN3, p.written(p.QWEN3_SIZES), ("qwen3",),
    ),
    Rule(
        ENGINES, "sample_from_anchor", "written, and true",
        "without it engines guess between the anchor-first and the 1+N fill-in layout; the wrong "
        "guess drafts with an acceptance length near 1 and no error",
        "Write sample_from_anchor: true if the draft was trained anchor-first; a fill-in draft is "
        "another model and must be trained again.",
        "sgl-project/sglang #30852, vllm-project/vllm #56792", p.equals("sample_from_anchor", True),
    ),
    Rule(
        ("vllm",), "dspark_bonus_anchor", "false", "vLLM refuses the draft", "Write false.",
        VLLM_K3, p.equals_if_written("dspark_bonus_anchor", False),
    ),
    Rule(
        ("atom",), "rope_interleave", "absent",
        "ATOM passes it on as is_neox_style, so true makes it rotate half-split pairs",
        "Delete rope_interleave: latent attention rotates interleaved pairs without it.",
        ATOM_MLA, p.absent("rope_interleave"), ("k3",),
    ),
    Rule(
        ("vllm",), "is_neox_style", "true or absent",
        "the published kind rotates half-split pairs; false is for weights that nobody else reads",
        "Export with half-split rotary pairs and delete is_neox_style.",
        VLLM_QWEN3, p.equals_if_written("is_neox_style", True), ("qwen3",),
    ),
    Rule(
        ("atom", "vllm", "sglang"), "rope_parameters", "present",
        "ATOM reads no rope_scaling: theta falls back to 10000 and YaRN is dropped",
        "Move the rotary section to rope_parameters, rope_theta included.",
        ATOM_MLA, p.rope_section,
    ),
    Rule(
        ENGINES, "rope_scaling", "absent, or equal to rope_parameters",
        "engines that read the one rotate otherwise than engines that read the other",
        "Delete rope_scaling and keep rope_parameters.", CONTRACT, p.one_rope_section,
    ),
    Rule(
        ENGINES, "rope_parameters.attention_factor", "absent",
        "with 1.0 vLLM leaves out the YaRN factor of the softmax scale; others let it replace what "
        "mscale and mscale_all_dim say", "Delete attention_factor.", VLLM_ROPE, p.attention_factor,
    ),
    Rule(
        ENGINES, "rope_parameters.mscale_all_dim", "written with yarn",
        "ATOM and vLLM take a missing one as 0: the softmax scale loses its YaRN factor, "
        "(0.1 * mscale_all_dim * ln(factor) + 1)^2",
        "Write mscale_all_dim (1.0 for the published drafts).",
        f"{VLLM_ROPE}; {ATOM_MLA}", p.yarn_has("mscale_all_dim"), ("k3",),
    ),
    Rule(
        ENGINES, "rope_parameters.original_max_position_embeddings", "written with yarn",
        "ATOM fills in max_position_embeddings, which moves the YaRN correction range",
        "Write the context length the frequencies were made for.",
        ATOM_MLA, p.yarn_has("original_max_position_embeddings"),
    ),
    Rule(
        ("vllm",), "max_position_embeddings", "at most original_max_position_embeddings x factor",
        "vLLM's YaRN table has that many rows and is read beyond its end",
        "Lower max_position_embeddings.", VLLM_ROPE, p.yarn_length,
    ),
    Rule(
        ("vllm",), "rope_parameters.factor", "1 unless rope_type is yarn",
        "vLLM multiplies the draft's context length by it", "Set rope_type yarn or factor 1.0.",
        "vLLM config/model.py", p.default_factor,
    ),
    Rule(
        ("atom", "vllm"), "num_target_layers", "the number of tapped layers",
        "context_proj is built target_hidden_size * num_target_layers wide and vLLM refuses any "
        "other; the target's depth belongs in target_num_hidden_layers",
        "Set num_target_layers to the length of target_layer_ids.",
        f"{VLLM_K3}; ATOM atom/models/kimi_k3_dspark.py, KimiK3DSpark", p.tapped_count, ("k3",),
    ),
    Rule(
        ("sglang", "hf"), "num_target_layers", "the target's depth",
        "DeepSpec writes the depth under this name for grouped-attention drafts",
        "Set num_target_layers to target_num_hidden_layers.", "DeepSpec, published configs",
        p.same("num_target_layers", "target_num_hidden_layers"), ("qwen3",),
    ),
    Rule(
        ENGINES, "num_key_value_heads", "equal to num_attention_heads",
        "latent attention has no grouped heads; an engine that sizes a cache by it would cut it",
        "Set num_key_value_heads to num_attention_heads.", CONTRACT,
        p.same("num_key_value_heads", "num_attention_heads"), ("k3",),
    ),
    Rule(
        ("vllm", "atom", "sglang"), "dspark_target_layer_ids", "equal to target_layer_ids",
        "vLLM prefers it to target_layer_ids, ATOM overwrites it", "Make both lists equal.",
        f"{VLLM_LAYERS}; {ATOM_NAMES}", p.same("dspark_target_layer_ids", "target_layer_ids"),
    ),
    Rule(
        ("vllm",), "eagle_aux_hidden_state_layer_ids", "absent",
        "it counts from 1 (our id + 1) and takes precedence over target_layer_ids",
        "Delete it.", VLLM_LAYERS, p.absent("eagle_aux_hidden_state_layer_ids"),
    ),
    Rule(
        ("vllm",), "dflash_config", "absent",
        "its layer ids, mask token and causality win over the draft's own", "Delete dflash_config.",
        VLLM_LAYERS, p.absent("dflash_config"),
    ),
    Rule(
        ("vllm",), "eagle_config", "absent", "its keys win over the draft's own",
        "Delete eagle_config.", VLLM_QWEN3, p.absent("eagle_config"),
    ),
    Rule(
        ("atom", "vllm", "sglang"), "dspark_noise_token_id", "equal to mask_token_id",
        "it is the same token under an engine's own name", "Make both ids equal.",
        ATOM_NAMES, p.same("dspark_noise_token_id", "mask_token_id"),
    ),
    Rule(
        ("atom",), "dspark_markov_rank", "equal to markov_rank",
        "it is the same rank under an engine's own name", "Make both ranks equal.",
        ATOM_NAMES, p.same("dspark_markov_rank", "markov_rank"),
    ),
    Rule(
        ("vllm", "atom"), "markov_head_type", "vanilla",
        "both know one kind of head, W2 . W1[previous]: ATOM ignores the key, vLLM stops at the "
        "extra weight", "Serve it with dspark, or train a vanilla head.",
        "vLLM models/qwen3_dspark.py; ATOM atom/models/kimi_k3_dspark.py, DSparkMarkovHead",
        p.equals_if_written("markov_head_type", "vanilla"),
    ),
    Rule(
        ("vllm",), "enable_confidence_head", "written, and true",
        "it is off by default: the head's weights are dropped without a word", "Write true.",
        VLLM_K3, p.equals("enable_confidence_head", True),
    ),
    Rule(
        ("vllm",), "confidence_head_with_markov", "written, and true",
        "it is off by default, and the head is then built without the Markov features",
        "Write true.", VLLM_K3, p.equals("confidence_head_with_markov", True),
    ),
    Rule(
        ("vllm", "atom", "sglang"), "dspark_block_size", "equal to block_size",
        "engines draft as many tokens as the key they know says; another width than trained "
        "loses acceptance without an error", "Make both sizes equal to the trained one.",
        "vLLM config/speculative.py; ATOM atom/spec_decode/dspark_proposer.py, _resolve_mtp_k; "
        "vllm-project/vllm #50012", p.same("dspark_block_size", "block_size"),
    ),
    Rule(
        ENGINES, "draft_vocab_size", "equal to vocab_size",
        "the draft scores with the target's own lm_head, row for row",
        "Set draft_vocab_size to vocab_size.", VLLM_K3, p.same("draft_vocab_size", "vocab_size"),
    ),
    Rule(
        ("vllm",), "layer_types", "full attention everywhere",
        "vLLM makes a sliding layer of a draft causal", "Train with full attention.",
        VLLM_QWEN3, p.full_attention,
    ),
    Rule(
        ("vllm",), "quantization_config.ignore", "the modules that stay BF16, by run-time name",
        "vLLM fuses q_a_proj and kv_a_proj_with_mqa into fused_qkv_a_proj and counts draft layers "
        "from the target's depth; a pattern that misses them builds them as FP8",
        "Use patterns that start with re:.* , name fused_qkv_a_proj, and hold no layer number.",
        "vLLM quantization/compressed_tensors, contract section 8", p.quantized_ignores, ("k3",),
    ),
    Rule(
        ("hf", "vllm"), "tie_word_embeddings", "false",
        "a true value lets a loader tie a head that the draft does not have", "Write false.",
        CONTRACT, p.equals("tie_word_embeddings", False), BOTH, "warn",
    ),
)  # fmt: skip


def check_rules(raw: p.Raw, engines: tuple[str, ...]) -> list[Check]:
    """One check ``rules.<key>`` per rule that concerns the draft's flavour and ``engines``."""
    flavour, out = p.flavour_of(raw), []
    for rule in RULES:
        wanted = [engine for engine in rule.engines if engine in engines]
        if not wanted or flavour not in rule.flavours:
            continue
        id, asked = f"rules.{rule.key}", f"{rule.key} is {rule.requirement} ({', '.join(wanted)})"
        found = rule.broken(raw)
        if found is None:
            out.append(passed(id, asked, "as required", rule.source))
            continue
        make = failed if rule.severity == "fail" else warned
        out.append(make(id, asked, found, rule.why, rule.mend, rule.source))
    return out


def layer_id_table(ids: list[int]) -> dict[str, dict[str, Any]]:
    """How each engine's own setting names the layers ``ids`` of config.json.

    Id i is the residual stream after decoder layer i, counted from 0 (contract, section 2).
    """
    rows: dict[str, tuple[str, LayerConvention]] = {
        "config.json; ATOM, TorchSpec, SpecForge": ("target_layer_ids", "target_layer_ids"),
        "vLLM, config.json (it adds 1 itself)": ("target_layer_ids", "target_layer_ids"),
        "vLLM, internal (+1)": ("aux_hidden_state_layers", "vllm_aux_hidden_state_layers"),
        "vLLM, extract_hidden_states (+1)": (
            "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids",
        ),
        "speculators (+1)": (
            "aux_hidden_state_layer_ids", "speculators_aux_hidden_state_layer_ids",
        ),
        "transformers (+1)": ("hidden_states", "hf_hidden_states"),
    }  # fmt: skip
    return {
        where: {"key": key, "ids": list(to_convention(ids, convention))}
        for where, (key, convention) in rows.items()
    }
