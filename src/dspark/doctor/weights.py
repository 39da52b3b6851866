"""The tensors: exactly those of the config, in a sound dtype, finite, and no codes without scales.

Header questions (names, shapes, dtypes) are asked of the safetensors header; values are read one
tensor at a time, so that a checkpoint of any size needs the memory of its largest tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.artifacts import sha256_file
from dspark.checkpoint.draft import FILES_NOTE, is_slim
from dspark.checkpoint.layout import EMBEDDING
from dspark.checkpoint.shards import Weights, open_weights
from dspark.checkpoint.tensorfile import TensorEntry
from dspark.checkpoint.tensors import WEIGHT_DTYPES, as_tensor
from dspark.doctor.findings import Check, failed, passed, skipped
from dspark.doctor.predicates import provenance_of
from dspark.errors import CheckpointError

NAMES = "tensors are exactly those of the config"
SHAPES = "every tensor has the shape the config implies"
DTYPES = "every tensor is bf16, fp16 or fp32 (FP8 only where it has a scale)"
FINITE = "every value is finite"
QUANT = "quantized weights have scales in a format that engines know"
FREQUENCIES = "no rotary frequencies are stored, or they are exact"
PLAIN = {"F32", "F16", "BF16"}
CODES = {"F8_E4M3", "F8_E5M2", "I8", "U8", "I4", "F4"}
SCALE = "_scale"
KNOWN_FORMATS = {("compressed-tensors", "float-quantized")}
PHASE_POSITION = 100_000


def open_checked(folder: Path) -> tuple[Weights | None, Check]:
    """The weights (None when unreadable) and the check about them."""
    asked = "weights are whole safetensors files"
    try:
        weights = open_weights(folder)
    except CheckpointError as error:
        return None, failed(
            "files.weights",
            asked,
            error.found,
            f"{error.where}: expected {error.expected}",
            error.fix,
        )
    return weights, passed("files.weights", asked, f"{len(weights.entries)} tensors")


def check_tensors(
    header: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    raw: Mapping[str, Any],
) -> list[Check]:
    """Names, shapes, dtypes and quantization. ``expected`` shapes by name, from the config."""
    if is_slim(dict(provenance_of(raw))):
        expected = {n: shape for n, shape in expected.items() if n != EMBEDDING}
    scales = {n for n in header if n.endswith(SCALE) and n.removesuffix(SCALE) in expected}
    frequencies = {n for n in header if "inv_freq" in n or "rotary" in n}
    extra = [n for n in header if n not in expected and n not in scales | frequencies]
    missing = [n for n in expected if n not in header]
    wrong = [
        f"{n} is {list(header[n].shape)}, expected {list(shape)}"
        for n, shape in expected.items()
        if n in header and header[n].shape != shape
    ]
    faults = [f"missing {n}" for n in missing] + [f"unexpected {n}" for n in extra]
    return [
        _listed(
            "weights.names", NAMES, faults, f"{len(expected)} tensors",
            "config and weights do not belong together, or the file has another tool's names",
            "Export again, or restore the config.json that came with the weights.",
        ),
        _listed(
            "weights.shapes", SHAPES, wrong, "all of them",
            "a size in config.json was edited, or the weights are another draft's",
            "Restore the config.json that came with the weights.",
        ),
        _dtypes(header, scales),
        _quantization(header, expected, scales, raw),
    ]  # fmt: skip


def _dtypes(header: Mapping[str, TensorEntry], scales: Iterable[str]) -> Check:
    known = PLAIN | CODES
    odd = [f"{n} is {e.dtype}" for n, e in header.items() if e.dtype not in known]
    odd += [f"{n} is {header[n].dtype}" for n in scales if header[n].dtype not in PLAIN]
    found = ", ".join(sorted({e.dtype for e in header.values()}))
    return _listed(
        "weights.dtypes", DTYPES, odd, found,
        "the tool that wrote the file converted tensors that must stay as they were trained",
        "Export in bf16 or fp32.",
    )  # fmt: skip


def _quantization(
    header: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    scales: set[str],
    raw: Mapping[str, Any],
) -> Check:
    coded = [n for n in header if n in expected and header[n].dtype in CODES]
    declared = raw.get("quantization_config")
    if not coded and not declared and not scales:
        return passed("weights.quantization", QUANT, "not quantized")
    faults = [
        f"{n} is {header[n].dtype} without {n}{SCALE}" for n in coded if n + SCALE not in scales
    ]
    for name in sorted(scales):
        weight = name.removesuffix(SCALE)
        rows = [header[weight].shape[0], 1] if weight in header else []
        if weight not in coded:
            faults.append(f"{name} beside a weight that is not quantized")
        elif list(header[name].shape) != rows or header[name].dtype != "F32":
            faults.append(
                f"{name} is {header[name].dtype} {list(header[name].shape)}, not F32 {rows}"
            )
    if not isinstance(declared, dict):
        faults.append("no quantization_config says how to read the codes")
    elif (declared.get("quant_method"), declared.get("format")) not in KNOWN_FORMATS:
        faults.append(
            f"quant_method {declared.get('quant_method')!r}, format {declared.get('format')!r}"
        )
    elif not coded:
        faults.append("quantization_config, but no quantized weight")
    return _listed(
        "weights.quantization", QUANT, faults, f"{len(coded)} quantized weights with scales",
        "engines load codes without scales as if they were weights and draft with an acceptance "
        "near 0 and no error", "Quantize again from the bf16 checkpoint with a tool that writes "
        "weight_scale tensors and a compressed-tensors config.",
        "sgl-project/sglang #39087, vllm-project/vllm #53122, ml-explore/mlx-lm #1865",
    )  # fmt: skip


def check_values(weights: Weights, expected: Iterable[str]) -> Check:
    """Every tensor holds numbers. Reads everything, a few MiB at a time."""
    faults = []
    for name in expected:
        entry = weights.entries.get(name)
        if entry is None or entry.dtype not in WEIGHT_DTYPES:
            continue
        for piece in weights.pieces(name):
            numbers = torch.frombuffer(piece, dtype=WEIGHT_DTYPES[entry.dtype])
            if not bool(torch.isfinite(torch.stack(numbers.aminmax())).all()):
                faults.append(f"{name} holds NaN or infinity")
                break
    return _listed(
        "weights.finite", FINITE, faults, "all of them",
        "training diverged, or a conversion overflowed", "Go back to an earlier training state.",
    )  # fmt: skip


def check_files(weights: Weights, raw: Mapping[str, Any]) -> Check:
    """Weight files against the hashes that the writer left in provenance."""
    asked = "weight files are those that were written with this config.json"
    recorded = provenance_of(raw).get(FILES_NOTE)
    if not isinstance(recorded, dict):
        return skipped("files.recorded", asked, "no hashes in provenance")
    faults = []
    for file in weights.files:
        note = recorded.get(file.path.name)
        said = note.get("sha256") if isinstance(note, dict) else None
        if said != sha256_file(file.path)[1]:
            faults.append(f"{file.path.name} has another hash than recorded")
    return _listed(
        "files.recorded", asked, faults, f"{len(weights.files)} files, every hash",
        "the weights were changed or exchanged after they were written, or the copy is damaged",
        "Copy the checkpoint again; after a meant change, export it anew.",
    )  # fmt: skip


def stored(weights: Weights, name: str) -> Tensor:
    """One tensor of the checkpoint."""
    return as_tensor(weights.entries[name], weights.read(name))


def check_frequencies(weights: Weights, exact: list[float]) -> Check:
    """Stored rotary buffers against ``exact`` inverse frequencies (float64), as a phase error.

    A bf16 cast rounds a frequency by up to 0.4 %, which is hundreds of radians at position 100,000
    (Automodel #2859).
    """
    names = [n for n in weights.entries if "inv_freq" in n or "rotary" in n]
    if not names:
        return passed("weights.rope_frequencies", FREQUENCIES, "none stored; computed in float64")
    worst, where = 0.0, names[0]
    for name in names:
        kept = stored(weights, name).double().flatten()
        if len(kept) != len(exact):
            worst, where = math.inf, name
            break
        off = float((kept - torch.tensor(exact, dtype=torch.float64)).abs().max())
        if off * PHASE_POSITION >= worst:
            worst, where = off * PHASE_POSITION, name
    if worst < 0.05:
        return passed("weights.rope_frequencies", FREQUENCIES, f"phase error {worst:.4f} rad")
    return failed(
        "weights.rope_frequencies", FREQUENCIES,
        f"{where} ({weights.entries[where].dtype}): {worst:.3g} rad off at position "
        f"{PHASE_POSITION:,}",
        "the buffer went through a bf16 cast, or belongs to other rope_parameters; the draft "
        "loses long contexts", "Delete the buffers from the file: engines compute them from "
        "rope_parameters. If training used rounded ones, train again.", "Automodel #2859",
    )  # fmt: skip


def check_embedding(held: Tensor | None, target: Tensor) -> Check:
    """The draft's embedding is the target's own, bit for bit in the draft's dtype."""
    asked = "embed_tokens equals the target's embedding bit for bit"
    if held is None:
        return skipped("live.embedding", asked, "the checkpoint holds no embed_tokens")
    if held.shape != target.shape:
        found = f"shape {list(held.shape)}, the target's is {list(target.shape)}"
    else:
        same = target.to("cpu", held.dtype) == held
        if bool(same.all()):
            return passed("live.embedding", asked, f"{held.shape[0]} rows")
        rows = int((~same.all(-1)).sum())
        found = f"{rows} of {held.shape[0]} rows differ"
    return failed(
        "live.embedding", asked, found,
        "the export wrote an embedding that was never loaded, or the target is another one",
        "Export again with the target's embedding.", "TorchSpec #38",
    )  # fmt: skip


def _listed(
    id: str, asked: str, faults: list[str], good: str, cause: str, mend: str, source: str = ""
) -> Check:
    if not faults:
        return passed(id, asked, good, source)
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return failed(id, asked, "; ".join(faults[:3]) + more, cause, mend, source)
