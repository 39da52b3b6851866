"""``dspark quantize``: an FP8 draft from a float one, and the proof that it is one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.artifacts import require_free
from dspark.artifacts.progress import OnDone, untold
from dspark.cli.console import Screen
from dspark.cli.figures import shown_bytes
from dspark.cli.places import draft_folder, require_there
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from dspark.quantize.manifest import PtqManifest
    from dspark.quantize.plan import Plan


def quantize_checkpoint(
    source: Path,
    out: Path,
    *,
    recipe: str,
    include: Sequence[str],
    exclude: Sequence[str],
    plan: bool,
    as_json: bool,
) -> None:
    """Write the FP8 checkpoint of ``source`` into the new folder ``out``; ``plan`` only says it.

    Raises:
        DSparkError: see :func:`dspark.quantize.plan.make_plan`, :func:`dspark.quantize.convert`.
    """
    source = draft_folder(source)
    if not plan:
        require_free(out)  # before anything slow
    from dspark.quantize.convert import quantize
    from dspark.quantize.plan import make_plan

    made = make_plan(source, recipe, include, exclude)
    screen = None if as_json else Screen()
    planned = _planned(made, out)
    if screen is not None:
        sizes = (
            f"{planned['quantized_tensors']} of {planned['source_tensors']} tensors become FP8 in "
            f"{planned['quantized_modules']} modules; "
            f"{shown_bytes(planned['source_bytes'])} become {shown_bytes(planned['bytes'])}"
        )
        screen.stage(recipe, sizes)
    if plan:
        _tell(screen, planned, "plan", f"would write {out}; nothing was written")
        return
    with _bar(screen, "quantizing", made.source_bytes) as on_bytes:
        manifest = quantize(made, out, on_bytes)
    _tell(screen, _result(manifest, out), "written", f"{out}: {_quality(manifest)}")


def check_checkpoint(out: Path, source: Path, *, as_json: bool) -> None:
    """Prove that ``out`` is what ``source`` becomes, to the last bit.

    Raises:
        DamagedArtifactError: it is not; names the place.
        DSparkError: ``source`` is no draft, or another one.
    """
    require_there(out, "an FP8 draft's folder, then the draft it was made of", "Check the path.")
    source = draft_folder(source)
    from dspark.quantize.check import check, plan_of

    screen = None if as_json else Screen()
    total = plan_of(out, source).source_bytes
    with _bar(screen, "checking", total) as on_bytes:
        manifest = check(out, source, on_bytes)
    _tell(screen, _result(manifest, out), "proved", f"{out}: {_quality(manifest)}")


def refuse_with_check(options: dict[str, bool]) -> None:
    """``--check`` reads the recipe from the manifest.

    Raises:
        ConfigError: an option that belongs to converting.
    """
    for name, given in options.items():
        if given:
            raise ConfigError(
                expected="--check OUT SOURCE and nothing else but --json",
                found=name,
                where="dspark quantize",
                fix=f"Leave {name} out: the manifest says what was asked for.",
            )


def _planned(made: Plan, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "recipe": made.recipe.model_dump(mode="json"),
        "source_tensors": len(made.order),
        "tensors": sum(len(file.specs) for file in made.files.values()),
        "quantized_tensors": len(made.choice.linears),
        "quantized_modules": len(made.choice.modules),
        "source_bytes": made.source_bytes,
        "bytes": sum(spec.bytes for file in made.files.values() for spec in file.specs),
        "modules": {name: list(own) for name, own in made.choice.modules.items()},
        "ignore": list(made.choice.ignore),
    }


def _result(manifest: PtqManifest, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "recipe": manifest.recipe.model_dump(mode="json"),
        "totals": manifest.totals.model_dump(mode="json"),
        "max_relative_error": _worst(manifest),
        "min_sqnr_db": _lowest(manifest),
        "manifest_sha256": manifest.sha256,
    }


def _worst(manifest: PtqManifest) -> float:
    return max(t.max_relative_error or 0.0 for t in manifest.tensors)


def _lowest(manifest: PtqManifest) -> float | None:
    return min((t.sqnr_db for t in manifest.tensors if t.sqnr_db is not None), default=None)


def _quality(manifest: PtqManifest) -> str:
    totals, lowest = manifest.totals, _lowest(manifest)
    ratio = "exact" if lowest is None else f"lowest SQNR {lowest:.1f} dB"
    return (
        f"{totals.tensors} tensors, {totals.bytes:,} bytes; {ratio}, "
        f"largest error {_worst(manifest):.4f} of a row's maximum"
    )


def _tell(screen: Screen | None, found: dict[str, Any], name: str, text: str) -> None:
    if screen is None:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        screen.stage(name, text)


@contextmanager
def _bar(screen: Screen | None, title: str, total: int) -> Iterator[OnDone]:
    if screen is None:
        yield untold
        return
    with screen.byte_bar(title, total) as on_bytes:
        yield on_bytes
