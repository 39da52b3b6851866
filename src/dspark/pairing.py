"""From a draft to the target it was trained for, proved to be the same one.

A draft only makes sense with the target whose states it was trained on. Another one of the same
sizes runs without an error and merely accepts less, so figures would be wrong in silence. The
draft's provenance says where the target was and what it was; what is found is compared with it by
weights, configuration, tokenizer and chat template. Whoever names a target explicitly may run the
draft on other weights, and is told so; ids must mean the same tokens all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dspark.checkpoint.published import CONFIG, read_config
from dspark.checkpoint.target import LoadedTarget
from dspark.config.architecture import DraftConfig
from dspark.config.recipe import TargetSection
from dspark.data.chat import template_hash, tokenizer_hash
from dspark.errors import CheckpointError, TargetError

COMPARED = {
    "target_weights_hash": "weights",
    "target_config_hash": "config",
    "tokenizer_hash": "tokenizer",
    "template_hash": "chat template",
}
NAME_IT = "Name the target: --target SOURCE, or Engine(target, draft)"


def target_identity(target: LoadedTarget) -> dict[str, str | None]:
    """What a later command compares: the version and the content of the target that was loaded.

    ``target_config_hash`` is null for a GGUF, whose weights' hash covers its configuration.
    """
    hashes = target.hashes
    return {
        "target_revision": target.files.revision,
        "target_weights_hash": hashes.weights,
        "target_config_hash": hashes.config,
        "tokenizer_hash": tokenizer_hash(target.tokenizer),
        "template_hash": template_hash(target.tokenizer),
    }


def target_section(folder: Path, other: str | None) -> TargetSection:
    """What to load for the draft in ``folder``: its own target, or ``other``.

    Raises:
        CheckpointError, TargetError: the provenance names no target, or nonsense; or it is not
            where it was. Nothing is loaded here.
    """
    config, provenance = read_config(folder)
    source = other or _source(folder, provenance)
    # A path has no revision of its own: its content is compared.
    pinned = other is None and not Path(source).expanduser().exists()
    revision = provenance.get("target_revision") if pinned else None
    longest = config.max_position_embeddings
    return recorded_section(folder, provenance, source, revision=revision, longest=longest)


def recorded_section(
    folder: Path,
    provenance: Mapping[str, Any],
    source: str,
    *,
    revision: str | None = None,
    longest: int | None = None,
) -> TargetSection:
    """``source`` in the precision and context that the draft in ``folder`` was made with.

    ``longest``: the context where none is recorded; None for the usual one.

    Raises:
        CheckpointError: the provenance holds nonsense.
    """
    names = {"target_dtype": "dtype", "target_max_context": "max_context"}
    fields = {own: provenance[key] for key, own in names.items() if key in provenance}
    if longest is not None:
        fields.setdefault("max_context", longest)
    try:
        return TargetSection(source=source, revision=revision, **fields)
    except ValidationError as error:
        raise CheckpointError(
            expected="a provenance that describes a target",
            found=" ".join(str(error).split())[:200],
            where=str(folder / CONFIG),
            fix="Copy the checkpoint again; its config.json was edited.",
        ) from error


def _source(folder: Path, provenance: dict[str, Any]) -> str:
    """Where the target is now: its old absolute path, then the path as it was typed."""
    if not isinstance(provenance.get("target"), str):
        raise CheckpointError(
            expected="a provenance that names the target",
            found="none",
            where=str(folder / CONFIG),
            fix=NAME_IT,
        )
    typed, absolute = provenance["target"], provenance.get("target_path")
    if absolute is None:
        return str(typed)
    for place in (absolute, typed):
        if Path(place).expanduser().exists():
            return str(place)
    raise TargetError(
        expected="the target this draft was trained for",
        found=f"nothing at {absolute}, nor at {typed} from the current folder",
        where=str(folder / CONFIG),
        fix=NAME_IT,
    )


def check_pair(
    folder: Path, target: LoadedTarget, warn: Callable[[str], None], *, named: bool
) -> None:
    """Refuse a draft beside a target it was not made for.

    Args:
        folder: the draft.
        target: what is to run beside it.
        warn: told what a named target differs in, or that nothing is known.
        named: the target was chosen explicitly: other weights are then a warning.

    Raises:
        CheckpointError: nothing in the provenance proves the target, and it was not named.
        TargetError: other sizes, another tokenizer, or (not named) other content; says in what.
    """
    config, provenance = read_config(folder)
    _check_sizes(folder, config, target)
    _check_identity(folder, provenance, target, warn, named=named)


def _check_sizes(folder: Path, config: DraftConfig, target: LoadedTarget) -> None:
    shape = target.shape
    faults = [
        f"{name} {found} instead of {wanted}"
        for name, wanted, found in (
            ("hidden size", config.target_hidden_size, shape.hidden_size),
            ("vocabulary", config.vocab_size, shape.vocab_size),
            ("layers", config.target_num_hidden_layers, shape.num_hidden_layers),
        )
        if wanted != found
    ]
    if faults:
        raise TargetError(
            expected=f"a target of the sizes the draft in {folder} was made for",
            found=", ".join(faults),
            where=f"target {target.files.source}",
            fix=NAME_IT,
        )


def _check_identity(
    folder: Path,
    provenance: dict[str, Any],
    target: LoadedTarget,
    warn: Callable[[str], None],
    *,
    named: bool,
) -> None:
    found = target_identity(target)
    unknown = [name for key, name in COMPARED.items() if key not in provenance]
    differing = [
        name
        for key, name in COMPARED.items()
        if key in provenance and provenance[key] != found[key]
    ]
    if "tokenizer" in differing or (differing and not named):
        raise TargetError(
            expected=f"the target that the draft in {folder} was trained for",
            found=f"another {', '.join(differing)}",
            where=f"target {target.files.source}",
            fix="A draft needs a target with its own tokenizer: its ids mean other tokens here."
            if "tokenizer" in differing
            else "Restore that target, or run on this one knowingly: --target "
            + target.files.source,
        )
    if unknown and not named:
        raise CheckpointError(
            expected="a provenance with the hashes of the target",
            found=f"none of its {', '.join(unknown)}",
            where=str(folder / CONFIG),
            fix=f"Nothing proves that the target is the same one. If it is: --target "
            f"{target.files.source}",
        )
    for names, text in (
        (differing, "not the target the draft was trained for, another"),
        (unknown, "the draft does not say for which target it was trained, unknown"),
    ):
        if names:
            warn(f"{text} {', '.join(names)}")
