"""A listener to progress that keeps apart what was made now and what lay there."""

from __future__ import annotations


class Told:
    def __init__(self) -> None:
        self.made = self.kept = 0.0

    def __call__(self, amount: float = 1, *, kept: bool = False) -> None:
        if kept:
            self.kept += amount
        else:
            self.made += amount
