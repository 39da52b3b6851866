"""Drafts that other tools wrote, turned into ours or refused with the reason.

Two formats hold the very model we call qwen3:

- ``deepspec``: a Qwen3 config with the draft's fields beside it, and the target's embedding and
  lm_head among the weights (deepseek-ai/DeepSpec, which knows one block layout and never writes
  it: ``sample_from_anchor`` is true).
- ``speculators``: the Qwen3 part nested and without fields that are at transformers' defaults,
  layers counted from 1, and possibly a reduced vocabulary with tables ``d2t`` and ``t2d``
  (vllm-project/speculators). The same file may declare the fill-in layout of DFlash
  (``sample_from_anchor: false``, or nothing, which engines read as false there): another model.

A reduced vocabulary is exact in our form too: the output rows go where they belong and one more
Markov rank forbids all other tokens (``dspark.model.support``), which a vanilla head can hold.
lm_head is the target's own in every draft, so it is compared with the target's where that is at
hand, and never kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from dspark.config.architecture import DraftConfig, Qwen3DraftConfig
from dspark.config.layers import from_convention
from dspark.errors import CheckpointError
from dspark.model.support import OUTSIDE_BIAS

Format = Literal["dspark", "deepspec", "speculators"]

CONVERTED = "converted_from"
"""Key of the provenance block: the format that a checkpoint was read from."""

HEAD = "lm_head.weight"
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
DRAFT_FIELDS = (
    "block_size", "confidence_head_with_markov", "enable_confidence_head", "markov_head_type",
    "markov_rank", "mask_token_id", "sample_from_anchor",
)  # fmt: skip


def format_of(raw: Mapping[str, Any]) -> Format:
    """Whose config.json this is, by what only its writer says."""
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        return "speculators"
    ours = [Qwen3DraftConfig.architecture] == raw.get("architectures")
    # DeepSpec's class asserts num_anchors and has no field for the layout.
    if ours and "num_anchors" in raw and "sample_from_anchor" not in raw:
        return "deepspec"
    return "dspark"


def our_fields(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """``raw`` as config.json of ours, checked no further; unchanged when it is ours already.

    Raises:
        CheckpointError: a draft of another kind, or one that leaves out what must be known.
    """
    kind = format_of(raw)
    if kind == "deepspec":
        said = {
            "sample_from_anchor": True,
            "target_hidden_size": raw.get("hidden_size"),
            "target_num_hidden_layers": raw.get("num_target_layers"),
        }
        return {**raw, **said, "dspark_provenance": {CONVERTED: kind}}
    return _from_speculators(raw, where) if kind == "speculators" else raw


def _from_speculators(raw: dict[str, Any], where: str) -> dict[str, Any]:
    kind = raw.get("speculators_model_type")
    if kind != "dspark":
        _refuse(where, "speculators_model_type", "dspark", repr(kind), "It is another method.")
    if raw.get("sample_from_anchor") is not True:
        _refuse(
            where,
            "sample_from_anchor",
            "true: K inputs, the first slot predicts the token behind the anchor",
            f"{raw.get('sample_from_anchor')} (nothing means false in this format)",
            "The fill-in layout (1 + K inputs) is another model; train one with "
            "sample_from_anchor: true.",
        )
    core = _qwen3_fields(raw.get("transformer_layer_config"), where)
    missing = [k for k in (*DRAFT_FIELDS, "aux_hidden_state_layer_ids") if raw.get(k) is None]
    if missing:
        _refuse(where, missing[0], "a value", "nothing", "Export the draft again.")
    target = _verifier(raw)
    out = {**core, **{key: raw[key] for key in DRAFT_FIELDS}}
    out["architectures"] = [Qwen3DraftConfig.architecture]
    try:
        taps = from_convention(
            raw["aux_hidden_state_layer_ids"], "speculators_aux_hidden_state_layer_ids"
        )
    except (TypeError, ValueError) as error:
        found = f"{raw['aux_hidden_state_layer_ids']} ({error})"
        _refuse(where, "aux_hidden_state_layer_ids", "numbers from 1 on", found, "Export it again.")
    out["target_layer_ids"] = list(taps)
    out["target_hidden_size"] = raw.get("target_hidden_size") or core["hidden_size"]
    out["target_num_hidden_layers"] = _target_depth(raw, target, where)
    if _reduced(raw, core["vocab_size"]):
        if out["markov_head_type"] != "vanilla":
            _refuse(
                where,
                "draft_vocab_size",
                f"{core['vocab_size']}, the whole vocabulary",
                f"{raw['draft_vocab_size']} with a {out['markov_head_type']} Markov head",
                "Only a vanilla head can hold a reduced vocabulary; serve it where it was made.",
            )
        out["markov_rank"] += 1
    named = {} if target is None else {"target": target}
    out["dspark_provenance"] = {CONVERTED: "speculators", **named}
    return out


def _qwen3_fields(written: Any, where: str) -> dict[str, Any]:
    """All fields of the nested config; its writer leaves out what equals transformers' default."""
    from transformers import Qwen3Config

    key = "transformer_layer_config"
    if not isinstance(written, dict) or written.get("model_type", "qwen3") != "qwen3":
        kind = written.get("model_type") if isinstance(written, dict) else written
        _refuse(where, key, "model_type qwen3", repr(kind), "It is another kind of draft.")
    try:
        full: dict[str, Any] = Qwen3Config(**written).to_dict()
    except (TypeError, ValueError, KeyError) as error:
        _refuse(where, key, "a Qwen3 config", str(error)[:200], "Export the draft again.")
    for name in ("architectures", "transformers_version", "torch_dtype", "_name_or_path"):
        full.pop(name, None)
    # Copied from the target; the draft stores embedding and lm_head apart all the same.
    full["tie_word_embeddings"] = False
    return full


def _verifier(raw: dict[str, Any]) -> str | None:
    part = raw.get("speculators_config")
    part = part.get("verifier") if isinstance(part, dict) else None
    name = part.get("name_or_path") if isinstance(part, dict) else None
    return name if isinstance(name, str) else None


def _target_depth(raw: dict[str, Any], target: str | None, where: str) -> int:
    """The number of target layers: written by a user, or that of the verifier if it is here."""
    from transformers import AutoConfig

    written = raw.get("target_num_hidden_layers")
    if isinstance(written, int):
        return written
    try:
        found = AutoConfig.from_pretrained(target or "", local_files_only=True)
        return int(found.get_text_config().num_hidden_layers)
    except (OSError, ValueError, AttributeError):
        _refuse(
            where,
            "target_num_hidden_layers",
            "the number of target layers, which this format leaves out",
            f"no config of the verifier {target!r} on this machine",
            "Add target_num_hidden_layers to config.json, or download the verifier's config.",
        )


def _reduced(raw: Mapping[str, Any], vocabulary: int) -> bool:
    return raw.get("draft_vocab_size") not in {None, vocabulary}


# --- weights -------------------------------------------------------------------------------------


def our_tensors(
    raw: Mapping[str, Any],
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    where: str,
    head: Tensor | None = None,
) -> dict[str, Tensor]:
    """Weights of a qwen3 checkpoint under our names and shapes, checked no further.

    An lm_head, which published files may hold in any format, is dropped. ``head`` is the target's
    [V, H], with which it must agree.

    Raises:
        CheckpointError: a vocabulary table that is absent or no table, or another lm_head.
    """
    out = dict(tensors)
    stored = out.pop(HEAD, None)
    kept = None
    if _reduced(raw, config.vocab_size):
        kept = _vocabulary(config.vocab_size, out.pop("d2t", None), where)
        out.pop("t2d", None)
        _fold(out, kept, config, where)
    if stored is not None and head is not None:
        same = head.cpu() if kept is None else head.cpu()[kept]
        narrow = min((stored.dtype, same.dtype), key=lambda d: d.itemsize)
        if stored.shape != same.shape or not torch.equal(stored.to(narrow), same.to(narrow)):
            _refuse(
                where,
                HEAD,
                "the target's own lm_head",
                "another one",
                "The draft belongs to another target, or to another revision of it.",
            )
    return out


def _vocabulary(size: int, table: Tensor | None, where: str) -> Tensor:
    """Target ids [V'] of the draft's own ids, from the offsets ``d2t``."""
    if table is None or table.dtype.is_floating_point or table.dim() != 1:
        found = "nothing" if table is None else f"{tuple(table.shape)} of {table.dtype}"
        _refuse(where, "d2t", "one whole number a draft token", found, "Export the draft again.")
    ids = torch.arange(len(table)) + table.cpu().long()
    if not bool(((ids >= 0) & (ids < size)).all()) or len(ids.unique()) != len(ids):
        found = "ids outside the vocabulary, or one twice"
        _refuse(where, "d2t", "distinct target tokens", found, "Export the draft again.")
    return ids


def _fold(tensors: dict[str, Tensor], kept: Tensor, config: DraftConfig, where: str) -> None:
    """Write the vocabulary into one more Markov rank, in place."""
    rank = config.markov_rank - 1
    w1, w2, confidence = (tensors.get(name) for name in (W1, W2, CONFIDENCE))
    if w1 is None or w2 is None or confidence is None or w2.shape != (len(kept), rank):
        found = "nothing" if w2 is None else str(tuple(w2.shape))
        _refuse(where, W2, f"{(len(kept), rank)} beside d2t", found, "Export the draft again.")
    tensors[W1] = torch.cat([w1, w1.new_ones(len(w1), 1)], 1)
    wide = w2.new_zeros(config.vocab_size, rank + 1)
    wide[:, -1] = OUTSIDE_BIAS
    wide[kept, :rank], wide[kept, -1] = w2, 0
    tensors[W2] = wide
    tensors[CONFIDENCE] = torch.cat([confidence, confidence.new_zeros(len(confidence), 1)], 1)


def _refuse(where: str, key: str, expected: str, found: str, fix: str) -> NoReturn:
    raise CheckpointError(expected=expected, found=found, where=f"{where}: {key}", fix=fix)
