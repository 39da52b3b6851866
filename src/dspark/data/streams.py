"""Endless seeded streams cut into a training and a held-out part that share no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from dspark.data.prompt import Split
from dspark.errors import DataError

Item = TypeVar("Item")


def distinct(
    make: Callable[[int, Split], Item],
    text: Callable[[Item], str],
    train: int,
    held_out: int,
    *,
    taken: set[str],
    where: str,
) -> Iterator[tuple[Split, Item]]:
    """Exactly ``train`` and ``held_out`` items whose ``text`` differs, training items first.

    ``make(index, split)`` is the item of an endless stream. A text that was already given, in
    either split or in ``taken``, is skipped and the next index takes its place.

    Raises:
        DataError: more distinct items were asked for than the stream reasonably holds.
    """
    seen = set(taken)
    wanted: tuple[tuple[Split, int], ...] = (("train", train), ("held_out", held_out))
    for split, count in wanted:
        given = index = 0
        while given < count:
            if index > 1000 + 4 * count:
                raise DataError(
                    expected=f"{count} different {split} prompts",
                    found=f"{given} different ones among the first {index}",
                    where=where,
                    fix="Ask for fewer: the templates repeat themselves at this size.",
                )
            item = make(index, split)
            index += 1
            if text(item) not in seen:
                seen.add(text(item))
                given += 1
                yield split, item
