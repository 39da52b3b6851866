"""What a run would do with the work that lies in its folder already; part of ``--plan``.

Nothing is written and nothing downloaded: where the target is not on this machine, what lies there
cannot be compared with the recipe, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from dspark.artifacts import Kind, new_manifest, outlook
from dspark.cli.context import LEFT_OUT, RunContext
from dspark.cli.places import is_run
from dspark.errors import DSparkError

State = Literal["done", "resume", "anew", "new", "?"]


@dataclass(frozen=True)
class Standing:
    """One stage: ``done`` is skipped, ``resume`` goes on, ``anew`` moves old work aside first."""

    state: State
    why: str = ""


def standings(run: RunContext) -> dict[Kind, Standing]:
    """Of every stage that the recipe's mode has, in their order."""
    from dspark.cli.pipeline import ORDER

    kinds = [kind for kind in ORDER if kind not in LEFT_OUT[run.recipe.train.mode]]
    if not is_run(run.root):
        return dict.fromkeys(kinds, Standing("new"))
    if unknown := _incomparable(run):
        return dict.fromkeys(kinds, Standing("?", unknown))
    found: dict[Kind, Standing] = {}
    for kind in kinds:
        try:
            found[kind] = _standing(run, kind, found)
        except (DSparkError, OSError) as error:
            why = f"{error.where}: {error.found}" if isinstance(error, DSparkError) else str(error)
            found[kind] = Standing("?", f"cannot be compared: {why}")
    return found


def _incomparable(run: RunContext) -> str:
    wanted = run.recipe.prompts.filters.contamination
    if wanted is not None and wanted.tasks and wanted.data is None:
        return "cannot be compared before its benchmarks are read"
    if run.target_files.hub or not Path(run.target_files.location).exists():
        return "cannot be compared before the target is on this machine"
    return ""


def _standing(run: RunContext, kind: Kind, above: dict[Kind, Standing]) -> Standing:
    from dspark.cli.pipeline import config_of, parent_kinds, parents_of

    folder = run.folder(kind)
    begun = folder.is_dir() and any(folder.iterdir())
    open_parents = [p for p in parent_kinds(run, kind) if above[p].state != "done"]
    if any(above[p].state == "?" for p in open_parents):
        return Standing("?" if begun else "new", "depends on what cannot be compared")
    if open_parents:
        why = f"{' and '.join(open_parents)} first"
        return Standing("anew", f"{why}; {_moved(folder)}") if begun else Standing("new")
    wanted = new_manifest(kind, config_of(run, kind), parents_of(run, kind))
    state, why = outlook(folder, wanted)
    if state == "anew":
        return Standing("anew", f"{why}; {_moved(folder)}")
    states: dict[str, State] = {"finished": "done", "resumed": "resume", "new": "new"}
    return Standing(states[state])


def _moved(folder: Path) -> str:
    return f"the old one moves to {folder.name}.previous-N"


def print_standings(found: dict[Kind, Standing], console: Console) -> None:
    """One line for each stage of which there is something to say."""
    told = {"done": "finished, skipped", "resume": "interrupted, goes on where it was"}
    heads = {"anew": "made anew", "?": "unknown"}
    for kind, standing in found.items():
        if standing.state == "new":
            continue
        text = told.get(standing.state) or f"{heads[standing.state]}: {standing.why}"
        line = Text.assemble((f"{kind:>10}", "bold"), f"  {text}")
        console.print(line, soft_wrap=True, highlight=False)
