"""Draft checkpoints: safetensors + config.json with a provenance block, loaded strictly.

Engines accept many wrong drafts without an error and then draft rubbish, so loading here refuses
whatever is not exactly a draft: the config by the rules of ``dspark.checkpoint.published``, the
files by those of ``dspark.checkpoint.tensorfile``, and here the tensors: missing, extra,
mis-shaped, not floating point, non-finite, an embedding that is not the target's.

Drafts that other tools wrote are converted first (``dspark.checkpoint.foreign``).

A *slim* checkpoint has no embedding; its provenance says so and holds the hash of the one it needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save
from torch import Tensor

from dspark.artifacts import atomic_json, atomic_write, sha256_file
from dspark.checkpoint.foreign import CONVERTED, our_tensors
from dspark.checkpoint.layout import EMBEDDING, Shape, meta_draft
from dspark.checkpoint.published import CONFIG, PROVENANCE, read_config, read_raw
from dspark.checkpoint.shards import WEIGHTS, Weights, open_weights
from dspark.checkpoint.tensors import FORMAT_NAMES, WEIGHT_DTYPES, as_tensor, digest_of
from dspark.errors import CheckpointError
from dspark.model.draft import DSparkDraft

EMBEDDING_NOTE = "embedding"
"""Key of the provenance block: ``included``, ``dtype`` and ``sha256`` of the embedding's bytes."""


def save_draft(
    folder: Path, draft: DSparkDraft, provenance: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write ``model.safetensors`` (in ``dtype``) and ``config.json`` atomically."""
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in draft.state_dict().items()
    }
    atomic_write(folder / WEIGHTS, save(tensors, {"format": "pt"}))
    config = {**draft.config.to_json(), "torch_dtype": str(dtype).removeprefix("torch.")}
    embedding = {"included": True, **digest_of(tensors[EMBEDDING])}
    atomic_json(folder / CONFIG, {**config, PROVENANCE: {**provenance, EMBEDDING_NOTE: embedding}})


def load_draft(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    head: Tensor | None = None,
    embedding: Tensor | None = None,
) -> tuple[DSparkDraft, dict[str, Any]]:
    """The draft and its provenance.

    Args:
        folder: holds config.json and weights.
        dtype: of the loaded parameters, whatever the file holds.
        device: where they go.
        head: the target's lm_head [V, H]: a stored one (foreign formats) must be the same.
        embedding: the target's [V, H]. A slim checkpoint needs it; another one must hold the same.

    Raises:
        CheckpointError: see the module docstring; names the tensor.
    """
    config, provenance = read_config(folder)
    weights = open_weights(folder)
    draft = meta_draft(config)
    shapes = {name: tuple(t.shape) for name, t in draft.state_dict().items()}
    if CONVERTED in provenance:
        tensors = {n: as_tensor(e, weights.read(n)) for n, e in weights.entries.items()}
        tensors = our_tensors(read_raw(folder), config, tensors, weights.where, head)
        _check({n: (FORMAT_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()},
               shapes, provenance, weights.where)  # fmt: skip
        read = iter(tensors.items())
    else:
        check_tensors(weights, shapes, provenance)
        read = ((n, as_tensor(e, weights.read(n))) for n, e in weights.entries.items())
    state: dict[str, Tensor] = {}
    for name, tensor in read:
        _require_finite(weights.where, name, tensor)
        if name == EMBEDDING and embedding is not None:
            _require_same_embedding(weights.where, tensor, embedding)
        state[name] = tensor.to(device, dtype)
    if EMBEDDING not in state:
        lent = _lent_embedding(weights.where, embedding, shapes[EMBEDDING], provenance)
        state[EMBEDDING] = lent.to(device, dtype)
    draft.load_state_dict(state, assign=True)
    draft.embed_tokens.weight.requires_grad_(False)
    return draft.eval(), provenance


def content_hash(folder: Path) -> str:
    """sha256 (hex) over config.json and all weight files: what a draft started from.

    Raises:
        CheckpointError: no draft there.
    """
    read_config(folder)
    digest = hashlib.sha256()
    for path in sorted([folder / CONFIG, *folder.glob("*.safetensors")]):
        digest.update(f"{path.name}:{sha256_file(path)[1]}\n".encode())
    return digest.hexdigest()


def check_tensors(
    weights: Weights, shapes: Mapping[str, Shape], provenance: dict[str, Any]
) -> None:
    """Names, shapes and dtypes from the headers alone.

    Raises:
        CheckpointError: names the first three faults and counts the rest.
    """
    found = {name: (entry.dtype, entry.shape) for name, entry in weights.entries.items()}
    _check(found, shapes, provenance, weights.where)


def _check(
    tensors: Mapping[str, tuple[str, Shape]],
    shapes: Mapping[str, Shape],
    provenance: dict[str, Any],
    where: str,
) -> None:
    """``tensors``: name -> (dtype as the format spells it, shape)."""
    slim = is_slim(provenance)
    expected = {n: s for n, s in shapes.items() if not (slim and n == EMBEDDING)}
    faults = [f"missing {name}" for name in expected if name not in tensors]
    faults += [f"unexpected {name}" for name in tensors if name not in expected]
    for name in (n for n in expected if n in tensors):
        dtype, shape = tensors[name]
        if shape != expected[name]:
            faults.append(f"{name} has shape {shape}, config implies {expected[name]}")
        elif dtype not in WEIGHT_DTYPES:
            scaled = f"{name}_scale" in tensors
            kind = "quantized, with a scale" if scaled else "without a scale it means nothing"
            faults.append(f"{name} has dtype {dtype} ({kind})")
    if faults:
        more = f" and {len(faults) - 3} more" if faults[3:] else ""
        _refuse(
            where,
            f"exactly the {len(expected)} tensors of this config, in {', '.join(WEIGHT_DTYPES)}",
            "; ".join(faults[:3]) + more,
            "Config and weights do not belong together, or the file is of another format.",
        )


def is_slim(provenance: dict[str, Any]) -> bool:
    """Whether the checkpoint says that it was written without the embedding."""
    note = provenance.get(EMBEDDING_NOTE)
    return isinstance(note, dict) and note.get("included") is False


def verify_tensors(weights: Weights) -> Iterator[tuple[str, int]]:
    """Read every byte in pieces and check that all numbers are finite; yields (name, bytes read).

    Peak memory is a few pieces, whatever the size of a tensor.

    Raises:
        CheckpointError: names the tensor that holds NaN or infinity.
    """
    for name, entry in weights.entries.items():
        for piece in weights.pieces(name):
            if entry.dtype in WEIGHT_DTYPES:
                numbers = torch.frombuffer(piece, dtype=WEIGHT_DTYPES[entry.dtype])
                _require_finite(weights.where, name, numbers)
            yield name, len(piece)


def _require_finite(where: str, name: str, tensor: Tensor) -> None:
    # min and max carry NaN and infinity along and need no mask as large as the tensor.
    if tensor.numel() and not bool(torch.isfinite(torch.stack(tensor.aminmax())).all()):
        found = f"{name} holds NaN or infinity"
        _refuse(where, "finite weights", found, "Training went wrong or the file is damaged.")


def _require_same_embedding(where: str, stored: Tensor, target: Tensor) -> None:
    """Both rounded to the narrower of the two dtypes: one may have been widened or cast down."""
    narrow = min((stored.dtype, target.dtype), key=lambda d: (d.itemsize, d != torch.bfloat16))
    if stored.shape == target.shape and stored.to(narrow).equal(target.to("cpu", narrow)):
        return
    _refuse(
        where,
        "the target's own embedding",
        f"another {EMBEDDING} of shape {tuple(stored.shape)}",
        "This draft belongs to another target, or was exported without its embedding.",
    )


def _lent_embedding(
    where: str, embedding: Tensor | None, shape: Shape, provenance: dict[str, Any]
) -> Tensor:
    """The target's embedding for a slim checkpoint, checked against the recorded hash."""
    if embedding is None:
        _refuse(
            where,
            f"{EMBEDDING}, or the target to take it from",
            "a slim checkpoint and no target",
            "Load it together with its target, or export it again without --slim.",
        )
    note = provenance[EMBEDDING_NOTE]
    dtype = WEIGHT_DTYPES.get(note.get("dtype"))
    if tuple(embedding.shape) != shape or dtype is None:
        found = f"shape {tuple(embedding.shape)}, recorded dtype {note.get('dtype')!r}"
        _refuse(where, f"an embedding of shape {shape}", found, "Name the draft's own target.")
    lent = embedding.detach().to("cpu", dtype)
    if digest_of(lent)["sha256"] != note.get("sha256"):
        _refuse(
            where,
            f"the embedding with sha256 {str(note.get('sha256'))[:12]}",
            "that of another target, or of another revision",
            "Name the target and revision that the draft was trained for.",
        )
    return lent


def _refuse(where: str, expected: str, found: str, fix: str) -> NoReturn:
    raise CheckpointError(expected=expected, found=found, where=where, fix=fix)
