"""``dspark init``: the untrained draft of a recipe, as a checkpoint that engines load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.text import Text

from dspark import __version__
from dspark.artifacts import require_free
from dspark.cli.context import RunContext
from dspark.cli.figures import shown_bytes
from dspark.config.load import load_recipe
from dspark.config.resolve import draft_config

if TYPE_CHECKING:
    from dspark.checkpoint.embedding import TargetEmbedding

Embedding = Literal["auto", "target", "random"]


def init_draft(
    recipe: Path,
    out: Path,
    overrides: Sequence[str],
    *,
    seed: int,
    dtype: str,
    embedding: Embedding,
    plan: bool,
) -> None:
    """Write the draft that ``recipe`` describes into the new folder ``out``.

    ``embedding`` "auto" takes the target's if its files are here, and never downloads them.

    Raises:
        ConfigError: the recipe's fault, or sizes that are not the target's.
        StorageError: not enough room, or not writable.
        ForeignArtifactError: ``out`` holds something.
        TargetError: ``embedding`` "target", and it cannot be had.
    """
    if not plan:
        require_free(out)  # before anything slow
    import torch

    from dspark.checkpoint.layout import parameters, tensor_shapes
    from dspark.checkpoint.start import write_start

    run = RunContext(load_recipe(recipe, overrides), "")
    config = draft_config(run.recipe.draft, run.shape)
    shapes, kind = tensor_shapes(config), getattr(torch, dtype)
    total = parameters(shapes) * kind.itemsize
    screen = run.screen
    sizes = (
        f"{len(shapes)} tensors, {parameters(shapes):,} parameters, {shown_bytes(total)} in {dtype}"
    )
    screen.stage("draft", sizes)
    if plan:
        screen.console.print(Text(f"would write {out}; nothing was written"))
        return
    provenance: dict[str, Any] = {
        "tool": f"dspark {__version__}",
        "target": run.recipe.target.source,
        "target_revision": run.recipe.target.revision,
        "target_dtype": run.recipe.target.dtype,
        "target_max_context": run.recipe.target.max_context,
    }
    source = _embedding(run, embedding, provenance)
    with screen.byte_bar("writing", total) as on_bytes:
        write_start(
            out,
            config,
            provenance,
            dtype=kind,
            seed=seed,
            embedding=source,
            on_bytes=on_bytes,
        )
    screen.stage("written", str(out))


def _embedding(
    run: RunContext, wanted: Embedding, provenance: dict[str, Any]
) -> TargetEmbedding | None:
    """The target's embedding or None; says which on the screen, and adds the found revision."""
    from dspark.checkpoint.embedding import target_embedding
    from dspark.checkpoint.sizes import check_told
    from dspark.errors import MissingDependencyError, TargetError

    if wanted == "random":
        run.screen.stage("embedding", "random, as asked for")
        return None
    try:
        files = run.target_files if wanted == "auto" else run.fetched_files
    except (TargetError, MissingDependencyError):
        if wanted == "target":
            raise
        files = None
    if files is None or files.hub:
        run.screen.stage(
            "embedding", "random: the target's files are not here (--embedding target fetches them)"
        )
        return None
    check_told(run.recipe.target, files)
    provenance["target_revision"] = files.revision
    run.screen.stage("embedding", "the target's")
    return target_embedding(run.recipe.target, files)
