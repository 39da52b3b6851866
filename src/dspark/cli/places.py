"""What a path on the command line is, asked before anything heavy is imported.

Every verb that takes a draft also takes the folder of a run, whose draft it then means.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark.artifacts import MANIFEST, STAGE, Kind
from dspark.errors import CheckpointError, ConfigError

STAGES: tuple[Kind, ...] = ("prompts", "answers", "states", "draft", "bench")
CONFIG = "config.json"
RECIPES = {".yaml", ".yml"}


def is_run(folder: Path) -> bool:
    """Whether a folder holds stages of a run, finished or not."""
    return any((folder / kind / name).is_file() for kind in STAGES for name in (MANIFEST, STAGE))


def require_there(path: Path, expected: str, fix: str) -> None:
    """Refuse a path of nothing, for every verb alike: it is a mistake of the command line.

    Raises:
        ConfigError: nothing is there.
    """
    if not path.exists():
        raise ConfigError(
            expected=expected, found="no such file or folder", where=str(path), fix=fix
        )


def draft_folder(source: Path) -> Path:
    """The draft's folder, whether a run or the draft itself was named.

    Raises:
        ConfigError: nothing is there.
        CheckpointError: neither.
    """
    require_there(
        source,
        "a run with a finished draft, or a draft folder",
        "Check the path: a run's folder after training, or the folder that holds config.json.",
    )
    for folder in (source, source / "draft"):
        if (folder / CONFIG).is_file():
            return folder
    raise CheckpointError(
        expected="a run with a finished draft, or a draft folder",
        found=_found(source),
        where=str(source),
        fix="Run `dspark train` with the run's recipe first: what was interrupted is resumed."
        if is_run(source)
        else "Name the output folder of this recipe, once it is trained."
        if source.suffix in RECIPES and source.is_file()
        else "Name a run's folder after training, or the folder that holds config.json.",
    )


def folder_to_examine(source: Path) -> Path:
    """As :func:`draft_folder`, but any other folder is taken too: what it lacks is to be told.

    Raises:
        ConfigError: nothing is there.
        CheckpointError: no folder, or a run without a draft.
    """
    return source if source.is_dir() and not is_run(source) else draft_folder(source)


def recipe_or_draft(source: Path, verb: str) -> Path:
    """A recipe's file as it is, or the draft's folder of what else was named.

    Raises:
        ConfigError: nothing is there.
        CheckpointError: a folder without a draft.
    """
    require_there(
        source,
        "a recipe (.yaml), a draft folder, or a run's folder",
        f"Check the path: dspark {verb} RECIPE.yaml, or dspark {verb} RUN/draft.",
    )
    return draft_folder(source) if source.is_dir() else source


def drafts_in(arguments: Sequence[str], verb: str, count: int, *, results: bool) -> list[str]:
    """``arguments`` with the draft's folder for a run's; settings and urls stay as they are.

    Another number of things than ``count``, or urls among several, is the verb's own to refuse:
    nothing is looked at then. ``results``: files of figures (.json) stay, and recipes are none.

    Raises:
        ConfigError, CheckpointError: as :func:`recipe_or_draft`.
    """
    things = [a for a in arguments if "=" not in a or "://" in a or Path(a).exists()]
    if len(things) != count or any("://" in a for a in things):
        return list(arguments)
    made = {}
    for text in things:
        path = Path(text)
        if results and path.suffix == ".json":
            continue
        made[text] = str(draft_folder(path) if results else recipe_or_draft(path, verb))
    return [made.get(text, text) for text in arguments]


def _found(source: Path) -> str:
    if not source.is_dir():
        return "a recipe" if source.suffix in RECIPES else "a file"
    if is_run(source):
        begun = (source / "draft" / STAGE).is_file()
        return f"a run whose draft is {'unfinished' if begun else 'not trained yet'}"
    return "no config.json"
