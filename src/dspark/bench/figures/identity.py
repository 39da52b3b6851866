"""Are two arms' greedy answers the same, and if not, from where on?"""

from __future__ import annotations

from collections.abc import Iterable

from dspark.bench.figures.comparison import MOST_DIVERGENCES, Divergence, Identity
from dspark.bench.play.turn import Answer, Turn


def identity_of(
    first: Iterable[Turn], second: Iterable[Turn], names: tuple[str, str]
) -> Identity | None:
    """Greedy answers of two arms, turn by turn; None where there are none in common.

    Only the first turn that differs counts against a question: later ones are asked differently.
    """
    others = {(t.key, t.turn): t.answer for t in second if t.temperature == 0}
    same, total, apart, ended = 0, 0, [], set()
    for turn in sorted((t for t in first if t.temperature == 0), key=lambda t: t.turn):
        other = others.get((turn.key, turn.turn))
        if turn.answer is None or other is None or turn.key in ended:
            continue
        total += 1
        found = _divergence(turn, turn.answer, other)
        if found is None:
            same += 1
        else:
            apart.append(found)
            ended.add(turn.key)
    if not total:
        return None
    return Identity(
        first=names[0],
        second=names[1],
        same=same,
        of=total,
        divergences=tuple(apart[:MOST_DIVERGENCES]),
    )


def _divergence(turn: Turn, one: Answer, other: Answer) -> Divergence | None:
    if one.ids is not None and other.ids is not None:
        place = _first_difference(one.ids, other.ids)
        if place is None:
            return None
        return Divergence(question=turn.question, turn=turn.turn, token=place)
    place = _first_difference(one.reasoning + one.text, other.reasoning + other.text)
    if place is None:
        return None
    return Divergence(question=turn.question, turn=turn.turn, character=place)


def _first_difference(one: str | tuple[int, ...], other: str | tuple[int, ...]) -> int | None:
    if one == other:
        return None
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
