"""What a trainer asks a teacher for: rows, in groups that are computed together.

A group is one micro-batch of the training plan. It is asked for, computed and delivered as a whole,
by one teacher, so that its states are the same bits whichever teacher makes them and whenever: the
shapes of a forward decide its rounding. That is what makes a resumed stream equal to an
uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark.hidden.record import layer_hash


@dataclass(frozen=True)
class Row:
    """One sequence. With ``new_tokens`` 0, ``ids`` are prompt and answer, to be replayed; otherwise
    ``ids`` are a prompt that the teacher answers first (at ``temperature``, from ``seed``).
    ``loss_mask`` is as long as ``ids``, or empty: then it is 1 from ``prompt_length`` on.

    A conversation is ``asked``: the whole prompt as JSON, of which ``ids`` are the first turn and
    ``most`` bounds the tokens of all."""

    id: str
    category: str
    temperature: float
    ids: tuple[int, ...]
    prompt_length: int
    new_tokens: int = 0
    seed: int = 0
    top_p: float = 1.0
    loss_mask: tuple[int, ...] = ()
    asked: str = ""
    most: int = 0

    @property
    def mask(self) -> tuple[int, ...]:
        """1 on tokens of ``ids`` that are trained on."""
        behind = len(self.ids) - self.prompt_length
        return self.loss_mask or (0,) * self.prompt_length + (1,) * behind

    @property
    def longest(self) -> int:
        """Upper bound of the record's tokens."""
        return self.most or len(self.ids) + self.new_tokens

    @property
    def answer(self) -> int:
        """Upper bound of the supervised tokens."""
        return self.longest - self.prompt_length


@dataclass(frozen=True)
class Group:
    """Rows of one micro-batch. ``bound`` is an upper bound of its records' bytes."""

    number: int
    rows: tuple[Row, ...]
    bound: int


@dataclass(frozen=True)
class Teaching:
    """What both ends must agree on before a single row is asked for.

    ``target`` is the hash of the target's weights and config, ``vocabulary`` its size.
    """

    layer_ids: tuple[int, ...]
    stream: str
    norm_state: str
    hidden: int
    vocabulary: int
    target: str

    def told(self) -> dict[str, Any]:
        """As JSON says it, with the layers' hash."""
        return {
            "layer_ids": list(self.layer_ids),
            "layer_hash": layer_hash(self.layer_ids, self.stream),
            "stream": self.stream,
            "norm_state": self.norm_state,
            "hidden": self.hidden,
            "vocabulary": self.vocabulary,
            "target": self.target,
        }

    def faults(self, told: dict[str, Any]) -> list[str]:
        """How the other end differs; a trainer can apply the norm, so that may be either."""
        want = self.told()
        wrong = [k for k in want if k != "norm_state" and told.get(k) != want[k]]
        if told.get("norm_state") not in ("pre", "post"):
            wrong.append("norm_state")
        return [f"{k} {told.get(k)} instead of {want[k]}" for k in wrong]
