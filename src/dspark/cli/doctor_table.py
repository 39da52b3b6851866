"""How an examination looks on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.doctor.findings import Check, Examination

COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def show(exam: Examination, console: Console) -> None:
    """One row a check, then cause and mend of whatever is not well."""
    layers = Table(title="tapped layers, as each engine counts them", title_justify="left")
    for name in ("where", "key", "ids"):
        layers.add_column(name, overflow="fold")
    for where, row in exam.layer_ids.items():
        layers.add_row(where, row["key"], str(row["ids"]))
    if exam.layer_ids:
        console.print(layers)
    table = Table(title=f"doctor {exam.path}", title_justify="left")
    for name in ("", "check", "found"):
        table.add_column(name, overflow="fold")
    for check in exam.checks:
        table.add_row(
            Text(check.status, COLOURS[check.status]), check.id, Text(check.found, overflow="fold")
        )
    console.print(table)
    for check in exam.checks:
        if check.status in {"fail", "warn"}:
            console.print(_told(check))
    counts = exam.as_json()["counts"]
    verdict = "sound" if exam.sound else f"{counts['fail']} failed"
    console.print(f"{verdict}: {counts['pass']} passed, {counts['warn']} warnings, "
                  f"{counts['skip']} not asked", highlight=False)  # fmt: skip


def _told(check: Check) -> Text:
    text = Text(f"\n{check.status:>8}  {check.id}\n", COLOURS[check.status])
    rows = [("asked", check.asked), ("found", check.found), ("cause", check.cause)]
    rows += [("mend", check.mend), ("source", check.source)]
    for label, said in rows:
        if said:
            text.append(f"{label:>8}  ", "bold")
            text.append(f"{said}\n", "default")
    return text
