"""``dspark inspect --rows N``: random prompts and answers as a person reads them.

An answer is shown as the tokens the target saw and wrote, the loss mask as colour: what is trained
on stands out, what is only context is dim. Ids are decoded run by run, so a character cut between
two tokens may show as a replacement mark; the ids are right all the same. Without a tokenizer the
numbers are shown.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from dspark.artifacts import Manifest, verify
from dspark.cli.places import require_there
from dspark.data.prompt import Prompt
from dspark.data.shards import stream_prompts
from dspark.errors import DSparkError, MissingArtifactError
from dspark.hidden.answers import Answer, stream_answers

Row = TypeVar("Row")
Decode = Callable[[list[int]], str]
CONTEXT, TRAINED, ROLE = "dim", "bold green", "bold cyan"


def inspect_rows(path: Path, count: int, seed: int, tokenizer: str | None) -> None:
    """``dspark inspect PATH --rows COUNT``: rows of a finished artifact, ids as text.

    Raises:
        ConfigError: nothing is there.
        ArtifactError: not finished, damaged, or of another kind.
        TargetError: the tokenizer named on the command line cannot be loaded.
    """
    require_there(path, "the folder of prompts or answers", "Check the path: RUN/answers, say.")
    manifest = verify(path)
    console = Console(soft_wrap=True)
    show_rows(path, manifest.kind, count, seed, console, _decoder(manifest, tokenizer, console))


def _decoder(manifest: Manifest, named: str | None, console: Console) -> Decode | None:
    """Text of ids by the named tokenizer, or by that of the artifact's target; None without one."""
    config = manifest.config
    target = config.get("target") or config.get("tokenizer") or {}
    source = named or (target.get("source") if isinstance(target, dict) else None)
    if source is None:
        return None
    from dspark.checkpoint.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(source, None if named else target.get("revision"))
    except DSparkError as error:
        if named:
            raise
        note = f"ids are shown as numbers: {error.found} ({error.where}); name a --tokenizer"
        console.print(Text(note, style="yellow"))
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def show_rows(
    folder: Path, kind: str, count: int, seed: int, console: Console, decode: Decode | None = None
) -> None:
    """Print ``count`` random rows of a prompts or answers folder.

    Args:
        folder: a finished artifact.
        kind: its manifest's kind.
        count: rows to show; fewer where there are fewer.
        seed: the same seed shows the same rows.
        console: where to.
        decode: text of ids, for rows that hold ids.

    Raises:
        MissingArtifactError: an artifact of another kind, which holds no rows to read.
        DataError: a row is malformed.
    """
    if kind == "prompts":
        prompts = itertools.chain(
            stream_prompts(folder, "train"), stream_prompts(folder, "held_out")
        )
        for prompt in _sample(prompts, count, seed):
            console.print(_prompt(prompt, decode))
    elif kind == "answers":
        for answer in _sample(stream_answers(folder), count, seed):
            console.print(_answer(answer, decode))
    else:
        raise MissingArtifactError(
            expected="prompts or answers",
            found=kind,
            where=str(folder),
            fix="Inspect the prompts or answers folder of the run.",
        )


def masked_text(ids: Sequence[int], mask: Sequence[int], decode: Decode | None) -> Text:
    """Tokens as text, those with mask 1 in the colour of what is trained on."""
    text = Text()
    place = 0
    for trained, run in itertools.groupby(mask):
        size = len(list(run))
        piece = list(ids[place : place + size])
        place += size
        shown = decode(piece) if decode else " ".join(map(str, piece)) + " "
        text.append(shown, style=TRAINED if trained else CONTEXT)
    return text


def _sample(rows: Iterator[Row], count: int, seed: int) -> list[Row]:
    """A uniform sample of a stream in one pass (reservoir), in the order of the stream."""
    draw = random.Random(f"dspark inspect/{seed}")
    kept: list[tuple[int, Row]] = []
    for number, row in enumerate(rows):
        if len(kept) < count:
            kept.append((number, row))
        elif (place := draw.randrange(number + 1)) < count:
            kept[place] = (number, row)
    return [row for _, row in sorted(kept, key=lambda pair: pair[0])]


def _prompt(prompt: Prompt, decode: Decode | None) -> Panel:
    parts: list[Text] = []
    if prompt.input_ids is not None and prompt.loss_mask is not None:
        parts.append(masked_text(prompt.input_ids, prompt.loss_mask, decode))
    for message in prompt.messages:
        parts.append(Text.assemble((f"{message['role']}: ", ROLE), message["content"]))
    parts += [Text.assemble(("later user turn: ", ROLE), turn) for turn in prompt.later_turns]
    if prompt.tools:
        names = [str(tool.get("function", tool).get("name", "?")) for tool in prompt.tools]
        parts.append(Text.assemble(("tools: ", ROLE), ", ".join(names)))
    about = f"{prompt.split}, {prompt.category}, {prompt.language}, {prompt.source}"
    return Panel(Group(*parts), title=Text(prompt.id), subtitle=Text(about), title_align="left")


def _answer(answer: Answer, decode: Decode | None) -> Panel:
    trained = answer.trained
    about = (
        f"{answer.category}, T={answer.temperature:g}, {answer.finish_reason}, "
        f"{len(answer.ids) - trained} + {trained} tokens"
    )
    if answer.generation is not None:
        about += f", {answer.generation.model} at {answer.generation.server}"
    return Panel(
        masked_text(answer.ids, answer.loss_mask, decode),
        title=Text(answer.id),
        subtitle=Text(about),
        title_align="left",
    )
