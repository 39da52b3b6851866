"""Draft checkpoints: safetensors + config.json with a provenance block, loaded strictly.

Engines accept many wrong drafts without an error and then draft rubbish, so loading here refuses
whatever is not exactly a draft: missing, extra, mis-shaped or non-finite tensors, a config whose
aliases disagree, an undeclared block layout. Drafts that other tools wrote are converted first
(``dspark.checkpoint.foreign``). ``dspark_provenance`` names the target, its tokenizer and template,
and the side of the norm the draft was trained on.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from dspark.artifacts import atomic_json, atomic_write, sha256_file
from dspark.checkpoint.foreign import CONVERTED, HEAD, our_fields, our_tensors
from dspark.config.architecture import DraftConfig
from dspark.config.load import parse_draft_config
from dspark.errors import CheckpointError, ConfigError
from dspark.model.draft import DSparkDraft

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
PROVENANCE = "dspark_provenance"


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
    atomic_json(folder / CONFIG, {**config, PROVENANCE: provenance})


def read_config(folder: Path) -> tuple[DraftConfig, dict[str, Any]]:
    """The draft's config and provenance.

    Raises:
        CheckpointError: absent, unreadable, or contradicting itself.
    """
    path = folder / CONFIG
    try:
        raw = our_fields(json.loads(path.read_text(encoding="utf-8")), str(path))
        return parse_draft_config(raw, str(path)), dict(raw.get(PROVENANCE, {}))
    except ConfigError as error:
        raise CheckpointError(
            expected=error.expected, found=error.found, where=error.where, fix=error.fix
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            expected="the config.json of a DSpark draft",
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            where=str(path),
            fix="Point at the `draft` folder of a finished run.",
        ) from error


def load_draft(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    head: torch.Tensor | None = None,
) -> tuple[DSparkDraft, dict[str, Any]]:
    """The draft and its provenance; formats of ``dspark.checkpoint.foreign`` are converted.

    ``head`` is the target's lm_head [V, H]: a stored one must be the same.

    Raises:
        CheckpointError: see the module docstring; names the tensor.
    """
    config, provenance = read_config(folder)
    path = folder / WEIGHTS
    try:
        tensors = load_file(str(path), device=str(device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            expected="readable safetensors",
            found=f"{type(error).__name__}: {error}",
            where=str(path),
            fix="Copy the checkpoint again; the file is absent or truncated.",
        ) from error
    if CONVERTED in provenance or (config.flavour == "qwen3" and HEAD in tensors):
        raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = our_tensors(raw, config, tensors, str(path), head)
    with torch.device("meta"):
        draft = DSparkDraft(config)
    _check_tensors(path, draft, tensors)
    draft.load_state_dict({n: t.to(dtype) for n, t in tensors.items()}, assign=True)
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


def _check_tensors(path: Path, draft: DSparkDraft, tensors: dict[str, torch.Tensor]) -> None:
    expected = {name: tuple(t.shape) for name, t in draft.state_dict().items()}
    faults = [f"missing {name}" for name in expected if name not in tensors]
    faults += [f"unexpected {name}" for name in tensors if name not in expected]
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            faults.append(f"{name} has shape {tuple(tensors[name].shape)}, config implies {shape}")
        elif name in tensors and not tensors[name].dtype.is_floating_point:
            faults.append(f"{name} has dtype {tensors[name].dtype}")
        elif name in tensors and not bool(torch.isfinite(tensors[name].float()).all()):
            faults.append(f"{name} holds NaN or infinity")
    if faults:
        raise CheckpointError(
            expected=f"exactly the {len(expected)} tensors of this config",
            found="; ".join(faults[:3]) + (f" and {len(faults) - 3} more" if faults[3:] else ""),
            where=str(path),
            fix="Config and weights do not belong together, or the file is of another format.",
        )
