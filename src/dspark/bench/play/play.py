"""The loop: every question, every turn, so many at a time, with patience and without lies.

Turns of one question follow each other, with the model's own answers between them. A turn that
fails ends its question; both are counted. When the answerer is gone for good, the run stops with
what it has, which the next run takes up. Seeds depend on question, turn and temperature only, so a
resumed run and two compared drafts draw the same.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark.artifacts.progress import OnDone, untold
from dspark.bench.play.log import AnswerLog
from dspark.bench.play.settings import SuiteSettings
from dspark.bench.play.turn import Answer, Ask, Counters, Player, Turn
from dspark.bench.tasks.questions import Question
from dspark.bench.tasks.task import Task
from dspark.errors import DSparkError, EndpointError


@dataclass
class Arm:
    """One task at one temperature, as it was played.

    ``seconds`` is wall time over the turns of this process (``timed`` of them); ``before`` and
    ``after`` are the server's counters around them, ``resumed`` turns came from an earlier process.
    """

    task: Task
    temperature: float
    asked: int
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    resumed: int = 0
    before: Counters | None = None
    after: Counters | None = None


async def play_arm(
    player: Player,
    task: Task,
    questions: Sequence[Question],
    temperature: float,
    settings: SuiteSettings,
    log: AnswerLog,
    on_question: OnDone = untold,
) -> Arm:
    """Ask all ``questions`` at one temperature.

    Raises:
        EndpointError: the answerer is gone; answers so far are in ``log``.
    """
    arm = Arm(task, temperature, len(questions))
    places = asyncio.Semaphore(settings.concurrency)
    order: dict[str, list[Turn]] = {q.id: [] for q in questions}

    async def one(question: Question) -> None:
        async with places:
            if player.gone is None:
                order[question.id], kept = await ask_question(
                    player, task, question, temperature, settings, log, arm
                )
                on_question(kept=kept)

    arm.before = await player.counters()
    start = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for question in questions:
                group.create_task(one(question))
    except* DSparkError as failed:  # not of one answer: the disk is full, say
        raise failed.exceptions[0] from None
    arm.seconds = time.monotonic() - start
    if player.gone is not None:
        raise EndpointError(
            expected="an engine that answers to the end",
            found=player.gone,
            where=f"{task.title} at T = {temperature:g}",
            fix="Start it again and run the same command: answers so far are kept.",
        )
    arm.after = await player.counters()
    arm.turns = [turn for turns in order.values() for turn in turns]
    return arm


async def ask_question(
    player: Player,
    task: Task,
    question: Question,
    temperature: float,
    settings: SuiteSettings,
    log: AnswerLog,
    arm: Arm,
) -> tuple[list[Turn], bool]:
    """All turns of one question, up to the first that fails, and whether ``log`` held them all;
    ``arm`` counts those it held."""
    turns: list[Turn] = []
    kept = True
    messages = [*question.opening]
    if question.system and not any(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "system", "content": question.system})
    for number, text in enumerate(question.turns):
        messages.append({"role": "user", "content": text})
        turn = log.get(question.id, temperature, number)
        if turn is not None:
            arm.resumed += 1
        else:
            kept = False
            ask = ask_for(task, question, number, tuple(messages), temperature, settings)
            turn = await _turn(player, ask, question, number, settings.timeout)
            log.add(turn)
        turns.append(turn)
        if turn.answer is None:
            break
        messages.append({"role": "assistant", "content": turn.answer.text})
    return turns, kept


def ask_for(
    task: Task,
    question: Question,
    turn: int,
    messages: tuple[dict[str, str], ...],
    temperature: float,
    settings: SuiteSettings,
) -> Ask:
    """The request for one turn."""
    return Ask(
        messages=messages,
        temperature=temperature,
        top_p=settings.top_p if temperature > 0 else 1.0,
        max_tokens=settings.max_tokens or task.max_tokens,
        # A seed of its own, or draws would be the same for every prompt.
        seed=zlib.crc32(f"{settings.seed}/{question.key}/{turn}/{temperature:g}".encode()),
        thinking=settings.thinking or task.thinking,
    )


async def _turn(player: Player, ask: Ask, question: Question, number: int, timeout: float) -> Turn:
    answer: Answer | None = None
    error: str | None = None
    timed_out = False
    try:
        async with asyncio.timeout(timeout):
            answer = await player.answer(ask)
    except TimeoutError:
        error, timed_out = f"no whole answer within {timeout:g} s", True
    except DSparkError as fault:
        error = f"{fault.where}: {fault.found}"
    return Turn(
        task=question.task,
        question=question.id,
        key=question.key,
        category=question.category,
        turn=number,
        temperature=ask.temperature,
        answer=answer,
        error=error,
        timed_out=timed_out,
    )


async def warm_up(
    player: Player, task: Task, questions: Sequence[Question], settings: SuiteSettings
) -> Answer | None:
    """Answers that are not counted; the last one, which shows what this answerer tells.

    Raises:
        EndpointError: the very first requests fail; nothing was measured.
    """
    answer = None
    for number in range(settings.warm_up):
        question = questions[number % len(questions)]
        messages = ({"role": "user", "content": question.turns[0]},)
        ask = ask_for(task, question, 0, messages, settings.temperatures[0], settings)
        short = ask.model_copy(update={"max_tokens": min(ask.max_tokens, 16)})
        try:
            async with asyncio.timeout(settings.timeout):
                answer = await player.answer(short)
        except TimeoutError as error:
            raise EndpointError(
                expected=f"a short answer within {settings.timeout:g} s",
                found="none",
                where="warm-up",
                fix="Check the engine, or allow more: timeout=SECONDS",
            ) from error
    return answer
