"""``dspark quantize --check``: is this folder what its source becomes, to the last bit?

Nothing that the folder says is believed. The manifest's own text must be the one its hash seals;
then the layout, config.json and every tensor are made again from the source and compared byte by
byte, every code is held against the error that e4m3 allows, and at last the manifest against the
one that all this gives. A bit that differs anywhere is an error that names its place.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.artifacts.progress import OnDone, untold
from dspark.errors import CheckpointError
from dspark.model.fp8 import CODES
from dspark.quantize.convert import manifest_of
from dspark.quantize.manifest import MANIFEST, PtqManifest, damaged, read_ptq_manifest
from dspark.quantize.plan import Plan, make_plan, source_side
from dspark.quantize.rows import within_bounds
from dspark.quantize.stream import Bytes, background, pass_tensor


def plan_of(out: Path, source: Path) -> Plan:
    """The plan that made ``out``, made again; the folder's small files and headers are compared.

    Raises:
        DamagedArtifactError: a file of ``out`` is missing, too much or changed.
        CheckpointError: ``source`` is no sound draft, or not the one that was quantized.
    """
    manifest = read_ptq_manifest(out)
    recipe = manifest.recipe
    plan = make_plan(source, recipe.name, recipe.include, recipe.exclude)
    if source_side(plan) != manifest.source:
        raise CheckpointError(
            expected="the source of this folder, by the hashes in its manifest",
            found="another checkpoint",
            where=str(source),
            fix="Name the folder that was quantized, unchanged.",
        )
    expected = {MANIFEST, *plan.small_files, *plan.files}
    found = {path.name for path in out.iterdir()}
    if found != expected:
        extra, missing = sorted(found - expected), sorted(expected - found)
        raise damaged(out, f"the files {sorted(expected)}", f"missing {missing}, extra {extra}")
    for name, content in plan.small_files.items():
        if (out / name).read_bytes() != content:
            raise damaged(out / name, "what the source and the recipe give", "another content")
    for name, file in plan.files.items():
        size = (out / name).stat().st_size
        if size != file.size:
            raise damaged(out / name, f"{file.size} bytes", f"{size}")
        with open(out / name, "rb") as stream:
            if stream.read(len(file.header)) != file.header:
                raise damaged(out / name, "the header that these tensors have", "another")
    return plan


def check(out: Path, source: Path, on_bytes: OnDone = untold) -> PtqManifest:
    """Compare ``out`` with what ``source`` becomes; see the module docstring.

    Returns the manifest, now proved. ``on_bytes`` is told of the source's bytes.

    Raises:
        DamagedArtifactError: something differs; names the file, tensor and byte.
        CheckpointError: ``source`` is no sound draft, or not the one that was quantized.
    """
    manifest = read_ptq_manifest(out)
    plan = plan_of(out, source)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(open(out / name, "rb", buffering=0)) for name in plan.files
        }
        sink = _Comparison(plan, out, files)
        beside = stack.enter_context(background(sink))
        records = [pass_tensor(plan, name, sink, beside, on_bytes) for name in plan.order]
    again = manifest_of(plan, records).model_copy(
        update={"versions": manifest.versions, "sha256": manifest.sha256}
    )
    if again != manifest:
        wrong = next(k for k in PtqManifest.model_fields if _of(again, k) != _of(manifest, k))
        raise damaged(out / MANIFEST, f"{wrong} as computed again", "other values")
    return manifest


def _of(manifest: PtqManifest, key: str) -> Any:
    return getattr(manifest, key)


@dataclass
class _Comparison:
    """Compares instead of writing, and holds stored codes against the weights they stand for."""

    plan: Plan
    out: Path
    files: dict[str, FileIO]
    _rows: dict[str, int] = field(default_factory=dict)

    def put(self, name: str, at: int, data: Bytes) -> None:
        stored = self._read(name, at, len(data))
        if stored == data:
            return
        place = next(i for i, (a, b) in enumerate(zip(stored, data, strict=True)) if a != b)
        raise damaged(
            self.out / self.plan.home[name],
            f"byte {at + place} of {name} to be 0x{data[place]:02x}",
            f"0x{stored[place]:02x}",
        )

    def block(self, name: str, weights: Tensor, codes: Tensor, scale: Tensor) -> None:
        first = self._rows.get(name, 0)
        self._rows[name] = first + len(codes)
        kept = self._read(name, first * codes.shape[1], codes.numel())
        scales = self._read(f"{name}_scale", 4 * first, 4 * len(codes))
        if not within_bounds(
            weights,
            torch.frombuffer(kept, dtype=CODES).view_as(codes),
            torch.frombuffer(scales, dtype=torch.float32).view_as(scale),
        ):
            raise damaged(
                self.out / self.plan.home[name],
                f"codes of {name} within half a step of the weights",
                f"others in rows {first} to {first + len(codes) - 1}",
            )

    def _read(self, name: str, at: int, size: int) -> bytearray:
        home = self.plan.home[name]
        place = self.plan.files[home].offsets[name] + at
        # Two threads read: neither may move the other's place in the file.
        data = os.pread(self.files[home].fileno(), size, place)
        if len(data) != size:
            raise damaged(self.out / home, f"all bytes of {name}", "the end of the file")
        return bytearray(data)  # torch wants it writable
