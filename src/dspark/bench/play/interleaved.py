"""Several answerers, one prompt at a time: the same-stack protocol of a fair comparison.

A machine's speed drifts, caches fill, other people log in. So two drafts are never measured one
after the other: every prompt is answered by all arms before the next one, in an order drawn from
the seed, one request at a time. Each arm gets the same seeds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from dspark.artifacts.progress import OnDone, untold
from dspark.bench.play.log import AnswerLog
from dspark.bench.play.play import Arm, ask_question
from dspark.bench.play.settings import SuiteSettings
from dspark.bench.play.turn import Player
from dspark.bench.tasks.questions import Question
from dspark.bench.tasks.task import Task
from dspark.errors import EndpointError


async def play_interleaved(
    players: Mapping[str, Player],
    logs: Mapping[str, AnswerLog],
    task: Task,
    questions: Sequence[Question],
    temperature: float,
    settings: SuiteSettings,
    on_answer: OnDone = untold,
) -> dict[str, Arm]:
    """One arm a player. An arm's seconds are those of its own answers.

    Raises:
        EndpointError: an answerer is gone; answers so far are in ``logs``.
    """
    arms = {name: Arm(task, temperature, len(questions)) for name in players}
    for name, player in players.items():
        arms[name].before = await player.counters()
    for question in questions:
        order = list(players)
        random.Random(f"{settings.seed}/{question.key}/{temperature:g}").shuffle(order)
        for name in order:
            player, arm = players[name], arms[name]
            start = time.monotonic()
            turns, kept = await ask_question(
                player, task, question, temperature, settings, logs[name], arm
            )
            arm.seconds += time.monotonic() - start
            arm.turns.extend(turns)
            on_answer(kept=kept)
            if player.gone is not None:
                raise EndpointError(
                    expected="engines that answer to the end",
                    found=player.gone,
                    where=f"{name}: {task.title} at T = {temperature:g}",
                    fix="Start it again and run the same command: answers so far are kept.",
                )
    for name, player in players.items():
        arms[name].after = await player.counters()
    return arms
