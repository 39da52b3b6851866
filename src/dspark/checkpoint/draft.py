"""Draft checkpoints: safetensors + config.json with a provenance block, loaded strictly.

Engines accept many wrong drafts without an error and then draft rubbish, so loading here refuses
whatever is not exactly a draft: the config by the rules of ``dspark.checkpoint.published``, the
files by those of ``dspark.checkpoint.tensorfile``, and here the tensors: missing, extra,
mis-shaped, of another dtype than the config implies (floats, or FP8 with a scale where
``dspark.checkpoint.quantization`` says so), non-finite, an embedding that is not the target's.

Drafts that other tools wrote are converted first (``dspark.checkpoint.foreign``).

A *slim* checkpoint has no embedding; its provenance says so and holds the hash of the one it needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from dspark.artifacts import atomic_json, sha256_file
from dspark.checkpoint.foreign import CONVERTED, HEAD, our_tensors
from dspark.checkpoint.layout import EMBEDDING, Shape, meta_draft
from dspark.checkpoint.published import CONFIG, PROVENANCE, read_config, read_raw
from dspark.checkpoint.quantization import (
    FP8,
    SCALE,
    expected_tensors,
    fp8_linears,
    ignore_patterns,
)
from dspark.checkpoint.shards import Weights, open_weights
from dspark.checkpoint.soundness import require_sound
from dspark.checkpoint.tensors import (
    FORMAT_NAMES,
    TORCH_DTYPES,
    WEIGHT_DTYPES,
    as_tensor,
    digest_of,
)
from dspark.checkpoint.writer import specs_of, tensor_pieces, write_weights
from dspark.config.architecture import DraftConfig
from dspark.errors import CheckpointError
from dspark.model.draft import DSparkDraft
from dspark.model.fp8 import CODES, Fp8Form, dequantize_rows, install_fp8

EMBEDDING_NOTE = "embedding"
"""Key of the provenance block: ``included``, ``dtype`` and ``sha256`` of the embedding's bytes."""

TARGET_NOTE = "target_embedding_sha256"
"""Key of the provenance block: hash of the target's embedding in the draft's dtype."""

FILES_NOTE = "files"
"""Key of the provenance block: weight file -> ``bytes`` and ``sha256``."""


def save_draft(
    folder: Path, draft: DSparkDraft, provenance: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write the weights (in ``dtype``) and ``config.json``, each file whole or not at all."""
    state = draft.state_dict()
    written = write_weights(
        folder,
        specs_of({name: tuple(t.shape) for name, t in state.items()}, dtype),
        lambda spec: tensor_pieces(state[spec.name], dtype),
        hashed=frozenset({EMBEDDING}),
    )
    digest = written.digests[EMBEDDING]
    write_config(folder, draft.config, dtype, provenance, digest, files=written.files)


def write_config(
    folder: Path,
    config: DraftConfig,
    dtype: torch.dtype,
    provenance: dict[str, Any],
    embedding_sha256: str,
    *,
    files: dict[str, dict[str, Any]],
    slim: bool = False,
) -> None:
    """``config.json`` beside finished weights.

    ``embedding_sha256`` is of the embedding's bytes in ``dtype``, whether or not it is included;
    ``files`` maps the weight files to size and hash.
    """
    fields = {**config.to_json(), "torch_dtype": str(dtype).removeprefix("torch.")}
    note = {"included": not slim, "dtype": FORMAT_NAMES[dtype], "sha256": embedding_sha256}
    told = {**provenance, EMBEDDING_NOTE: note, FILES_NOTE: files}
    atomic_json(folder / CONFIG, {**fields, PROVENANCE: told})


def load_draft(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    head: Tensor | None = None,
    embedding: Tensor | None = None,
    fp8: Fp8Form = "dequantized",
) -> tuple[DSparkDraft, dict[str, Any]]:
    """The draft and its provenance.

    Args:
        folder: holds config.json and weights.
        dtype: of the loaded parameters, whatever the file holds.
        device: where they go.
        head: the target's lm_head [V, H]: a stored one (foreign formats) must be the same.
        embedding: the target's [V, H]. A slim checkpoint needs it; another one must hold the same.
        fp8: how FP8 weights are run; other checkpoints have none. Training needs "dequantized".

    Raises:
        CheckpointError: see the module docstring; names the tensor.
    """
    config, provenance = read_config(folder)
    weights = open_weights(folder)
    draft = meta_draft(config)
    shapes = {name: tuple(t.shape) for name, t in draft.state_dict().items()}
    quantized = quantized_linears(folder, draft)
    if CONVERTED in provenance or (config.flavour == "qwen3" and HEAD in weights.entries):
        tensors = {n: as_tensor(e, weights.read(n)) for n, e in weights.entries.items()}
        tensors = our_tensors(read_raw(folder), config, tensors, weights.where, head)
        _check({n: (FORMAT_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()},
               shapes, frozenset(), provenance, weights.where)  # fmt: skip
        read = iter(tensors.items())
    else:
        check_tensors(weights, shapes, quantized, provenance)
        read = ((n, as_tensor(e, weights.read(n))) for n, e in weights.entries.items())
        if fp8 == "dequantized":
            read = _dequantized(weights, quantized)
        else:
            install_fp8(draft, quantized, fp8)
    state: dict[str, Tensor] = {}
    for name, tensor in read:
        require_sound(weights.where, name, tensor)
        if name == EMBEDDING and embedding is not None:
            _require_same_embedding(weights.where, tensor, embedding)
        kept = tensor.dtype == CODES or name.endswith(SCALE)
        state[name] = tensor.to(device, tensor.dtype if kept else dtype)
    if EMBEDDING not in state:
        lent = _lent_embedding(weights.where, embedding, shapes[EMBEDDING], provenance)
        state[EMBEDDING] = lent.to(device, dtype)
    draft.load_state_dict(state, assign=True)
    draft.embed_tokens.weight.requires_grad_(False)
    return draft.eval(), provenance


def quantized_linears(folder: Path, draft: DSparkDraft) -> frozenset[str]:
    """Linears of ``draft`` that the folder's config.json says are FP8.

    Raises:
        CheckpointError: unreadable, or a scheme that is not ours.
    """
    return fp8_linears(draft, ignore_patterns(read_raw(folder), str(folder / CONFIG)))


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


def _dequantized(weights: Weights, quantized: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """All tensors by name, FP8 weights already multiplied by their scales."""
    for name, entry in weights.entries.items():
        module = name.removesuffix(".weight").removesuffix(f".weight{SCALE}")
        tensor = as_tensor(entry, weights.read(name))
        if module not in quantized:
            yield name, tensor
        elif not name.endswith(SCALE):
            scale = weights.entries[name + SCALE]
            scales = as_tensor(scale, weights.read(scale.name))
            require_sound(weights.where, scale.name, scales)
            yield name, dequantize_rows(tensor, scales)


def check_tensors(
    weights: Weights,
    shapes: Mapping[str, Shape],
    quantized: frozenset[str],
    provenance: dict[str, Any],
) -> None:
    """Names, shapes and dtypes from the headers alone; linears ``quantized`` must be FP8.

    Raises:
        CheckpointError: names the first three faults and counts the rest.
    """
    found = {name: (entry.dtype, entry.shape) for name, entry in weights.entries.items()}
    _check(found, shapes, quantized, provenance, weights.where)


def _check(
    tensors: Mapping[str, tuple[str, Shape]],
    shapes: Mapping[str, Shape],
    quantized: frozenset[str],
    provenance: dict[str, Any],
    where: str,
) -> None:
    """``tensors``: name -> (dtype as the format spells it, shape)."""
    slim = is_slim(provenance)
    needed = {n: s for n, s in shapes.items() if not (slim and n == EMBEDDING)}
    expected = expected_tensors(needed, quantized)
    faults = [f"missing {name}" for name in expected if name not in tensors]
    faults += [f"unexpected {name}" for name in tensors if name not in expected]
    for name in (n for n in expected if n in tensors):
        (dtype, shape), (implied, dtypes) = tensors[name], expected[name]
        if shape != implied:
            faults.append(f"{name} has shape {shape}, config implies {implied}")
        elif dtype not in dtypes:
            faults.append(f"{name} has dtype {dtype}, config implies {' or '.join(dtypes)}")
    if faults:
        more = f" and {len(faults) - 3} more" if faults[3:] else ""
        _refuse(
            where,
            f"exactly the {len(expected)} tensors of this config",
            "; ".join(faults[:3]) + more,
            "Config and weights do not belong together, or the file is of another format.",
        )


def is_slim(provenance: dict[str, Any]) -> bool:
    """Whether the checkpoint says that it was written without the embedding."""
    note = provenance.get(EMBEDDING_NOTE)
    return isinstance(note, dict) and note.get("included") is False


def check_notes(provenance: dict[str, Any], where: str) -> None:
    """What the provenance says of the embedding must not contradict itself.

    Raises:
        CheckpointError: the embedding is not the target's though both hashes are of one dtype.
    """
    note, target = provenance.get(EMBEDDING_NOTE), provenance.get(TARGET_NOTE)
    if isinstance(note, dict) and target is not None and note.get("sha256") != target:
        _refuse(
            where,
            f"the target's embedding, sha256 {str(target)[:12]}",
            f"{EMBEDDING} with {str(note.get('sha256'))[:12]}",
            "It was exported without the target's embedding; export it again.",
        )


def verify_weights(
    weights: Weights, provenance: dict[str, Any], on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Read every byte in pieces: all numbers finite, files and embedding as recorded.

    Peak memory is a few pieces, whatever the size of a tensor. Provenance without hashes (of other
    tools) has nothing to compare with.

    Raises:
        CheckpointError: names the tensor that holds NaN or infinity, or the file of another hash.
    """
    note = provenance.get(EMBEDDING_NOTE)
    for name, entry in weights.entries.items():
        digest = hashlib.sha256()
        for piece in weights.pieces(name):
            if entry.dtype in (*WEIGHT_DTYPES, FP8):
                numbers = torch.frombuffer(piece, dtype=TORCH_DTYPES[entry.dtype])
                require_sound(weights.where, name, numbers)
            if name == EMBEDDING:
                digest.update(piece)
            on_bytes(len(piece))
        if name == EMBEDDING and isinstance(note, dict):
            _require_hash(weights.where, name, note.get("sha256"), digest.hexdigest())
    recorded = provenance.get(FILES_NOTE)
    if isinstance(recorded, dict):
        for file in weights.files:
            known = recorded.get(file.path.name)
            said = known.get("sha256") if isinstance(known, dict) else None
            _require_hash(str(file.path), file.path.name, said, sha256_file(file.path)[1])


def _require_hash(where: str, what: str, recorded: Any, found: str) -> None:
    if recorded != found:
        fix = "Copy the checkpoint again; if that does not help, it was changed after it was made."
        _refuse(where, f"{what} with sha256 {str(recorded)[:12]}", found[:12], fix)


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
