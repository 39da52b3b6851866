"""A teacher: a target that makes the hidden states a trainer asks for, while it trains.

Two kinds of rows. An answer that is cached already is *replayed* by prefill, several times faster
than it was written (off-policy prefill distillation). A prompt is *answered* first and then
replayed, so that the text is the target's own of this moment. What comes out is the same record.

Anything with :class:`GroupMaker`'s two members is a teacher: this file's embedded target, vLLM
(``dspark.vllm_plugin.teach``), or an engine on other machines behind an object that asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from dspark.capture.embedded import replay_group
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import AnswerEngine, GenerationRequest, GenerationResult
from dspark.errors import DSparkError, StreamError
from dspark.hidden.answers import Answer
from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Row, Teaching
from dspark.hidden.writer import TeacherLink
from dspark.model.target import Target


class GroupMaker(Protocol):
    """Makes the records of a group, in the order of its rows; a function of the rows alone."""

    @property
    def teaching(self) -> Teaching: ...

    def make(self, rows: Sequence[Row]) -> Iterator[HiddenRecord]: ...


class Player(Protocol):
    """Plays conversations (rows that were ``asked``): the sequence of each, or None."""

    def play(self, rows: Sequence[Row]) -> list[Answer | None]: ...


Replay = Callable[[Sequence[Answer]], Iterable[HiddenRecord]]
"""Records of answers, in their order; a function of the answers alone."""


class RowMaker:
    """Makes records of rows with whatever ``replay`` replays them.

    ``engine`` answers prompts and ``player`` plays conversations (None: replay only). An answer
    that was cut at its last token is not trained on unless ``keep_truncated``: its record comes
    with an empty loss mask, so that every row that was asked for is delivered.
    """

    def __init__(
        self,
        replay: Replay,
        teaching: Teaching,
        *,
        engine: AnswerEngine | None = None,
        player: Player | None = None,
        keep_truncated: bool = True,
    ) -> None:
        self.replay, self.teaching = replay, teaching
        self.engine, self.player = engine, player
        self.keep_truncated = keep_truncated

    def make(self, rows: Sequence[Row]) -> Iterator[HiddenRecord]:
        """Raises StreamError: a prompt for a teacher that only replays."""
        asked = [row for row in rows if row.new_tokens and not row.asked]
        cut: set[str] = set()
        answers = {row.id: _answer(row) for row in rows if not row.new_tokens}
        if asked:
            for row, result in zip(asked, self._answered(asked), strict=True):
                answers[row.id] = _answer(row, result)
                if result.finish_reason == "length" and not self.keep_truncated:
                    cut.add(row.id)
        played = [row for row in rows if row.asked]
        for row, found in zip(played, self._played(played), strict=True):
            answers[row.id] = found or _nothing(row)
            if found is None:
                cut.add(row.id)
        for record in self.replay([answers[row.id] for row in rows]):
            if record.id in cut:
                record = replace(record, loss_mask=torch.zeros_like(record.loss_mask))
            yield record

    def _played(self, rows: Sequence[Row]) -> list[Answer | None]:
        if not rows:
            return []
        if self.player is None:
            raise _only_replays()
        return self.player.play(rows)

    def _answered(self, rows: Sequence[Row]) -> list[GenerationResult]:
        if self.engine is None:
            raise _only_replays()
        done: dict[str, GenerationResult] = {}
        requests = [
            GenerationRequest(
                row.id,
                row.ids,
                SamplingParams(
                    temperature=row.temperature,
                    top_p=row.top_p,
                    seed=row.seed,
                    max_new_tokens=row.new_tokens,
                ),
            )
            for row in rows
        ]
        self.engine.run(requests, lambda result: done.update({result.id: result}), lambda _: None)
        return [done[row.id] for row in rows]


class EmbeddedMaker(RowMaker):
    """Our own target; ``target_hash`` names it. The rest as in :class:`RowMaker`."""

    def __init__(
        self,
        target: Target,
        target_hash: str,
        *,
        batch_tokens: int,
        dtype: torch.dtype,
        engine: AnswerEngine | None = None,
        player: Player | None = None,
        keep_truncated: bool = True,
    ) -> None:
        teaching = Teaching(
            layer_ids=target.layer_ids,
            stream="residual",
            norm_state="post",
            hidden=target.head_weight().shape[1],
            vocabulary=target.vocab_size,
            target=target_hash,
        )
        super().__init__(
            partial(replay_group, target, batch_tokens=batch_tokens, dtype=dtype),
            teaching,
            engine=engine,
            player=player,
            keep_truncated=keep_truncated,
        )


def _only_replays() -> StreamError:
    return StreamError(
        expected="cached answers",
        found="prompts",
        where="stage: teacher",
        fix="Start the teacher with train.mode online.",
    )


def _nothing(row: Row) -> Answer:
    """Stands in where a conversation gave nothing to train on; its record's mask is cleared."""
    return Answer(
        id=row.id,
        category=row.category,
        temperature=row.temperature,
        prompt_length=len(row.ids),
        finish_reason="length",
        ids=(*row.ids, row.ids[-1]),
        loss_mask=tuple(0 if i < len(row.ids) else 1 for i in range(len(row.ids) + 1)),
    )


def _answer(row: Row, result: GenerationResult | None = None) -> Answer:
    new = () if result is None else result.ids
    mask = (*row.mask, *(1,) * len(new))
    return Answer(
        id=row.id,
        category=row.category,
        temperature=row.temperature,
        prompt_length=row.prompt_length,
        finish_reason="stop" if result is None else result.finish_reason,
        ids=row.ids + new,
        loss_mask=tuple(1 if m else 0 for m in mask),
    )


def teach(
    link: TeacherLink, maker: GroupMaker, on_rows: Callable[[int], None] = lambda _: None
) -> int:
    """Serve until every trainer has finished; return the number of records sent.

    A group that cannot be made is refused to its trainer, which asks another teacher.

    Raises:
        StreamError: refused, or no trainer is alive any more.
    """
    while (work := link.next()) is not None:
        try:
            for index, record in enumerate(maker.make(work.rows)):
                if not link.wanted(work):
                    break  # its trainer has restarted and will ask again
                link.put(work, index, record)
                on_rows(1)
        except DSparkError as error:
            link.refuse(work, str(error))
    return link.records
