"""Prompts that the target writes itself, for workloads without any.

An instruction-tuned model that is given its chat template up to where a user speaks writes what a
user would say (the idea of Magpie, arXiv 2406.08464). Text i depends on the source's seed and i
alone; texts that were written before, apart from case and white space, are written again under the
next number. What is finished is kept in a working file, so a killed stage goes on with the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.artifacts import storage_guard
from dspark.artifacts.progress import OnDone, untold
from dspark.config.prompts import PromptSource, SelfInstructSource
from dspark.data.chat import Tokenizer
from dspark.data.filters.language import language_of
from dspark.data.prompt import Prompt, make_prompt
from dspark.decoding.params import SamplingParams
from dspark.decoding.request import GenerationRequest, GenerationResult
from dspark.errors import DataError, TargetError

_PLACE = "user7f3a"
TRIES = 4
"""Texts that are written for one that is wanted, at most."""

OnResult = Callable[[GenerationResult], None]
Write = Callable[[list[GenerationRequest], Collection[int], OnResult], None]
"""Generates requests until one of the ids, calling back as each is done."""


@dataclass(frozen=True)
class Opening:
    """The ids up to where the user speaks, and those that end what the user says."""

    ids: tuple[int, ...]
    stop_ids: frozenset[int]


def opening_of(tokenizer: Tokenizer, system: str | None, end_ids: Collection[int] = ()) -> Opening:
    """Where a user begins to speak in the target's chat template.

    Raises:
        TargetError: no template, one that changes what users say, or no special token that ends a
            user's turn.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": _PLACE})
    if not tokenizer.chat_template:
        raise _unfit("no chat template")
    options = {"tokenize": False, "add_generation_prompt": True}
    text = str(tokenizer.apply_chat_template(messages, **options))
    before, found, after = text.rpartition(_PLACE)
    added = tokenizer.added_tokens_decoder
    closing = tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1]
    stops = {int(i) for i in closing if i in added and added[i].special}
    if not found or not stops:
        raise _unfit("one whose user turns have no end that can be told")
    ids = tokenizer.encode(before, add_special_tokens=False)
    return Opening(tuple(int(i) for i in ids), frozenset(stops) | frozenset(end_ids))


def _unfit(found: str) -> TargetError:
    return TargetError(
        expected="a chat template with a special token behind each user turn",
        found=found,
        where="prompts.sources (self_instruct)",
        fix="Use the instruction-tuned target with its own template, or other sources of prompts.",
    )


def file_name(number: int) -> str:
    """Working file of source ``number`` in the prompts folder."""
    return f"self-instruct-{number}.jsonl"


def working_files(sources: Sequence[PromptSource]) -> tuple[str, ...]:
    """Files that only serve to resume; the sealed artifact goes without them."""
    return tuple(
        file_name(number)
        for number, source in enumerate(sources)
        if isinstance(source, SelfInstructSource)
    )


def write_turns(
    source: SelfInstructSource,
    path: Path,
    tokenizer: Tokenizer,
    end_ids: Collection[int],
    write: Write,
    on_text: OnDone = untold,
) -> None:
    """Have the target write the user turns of ``source`` into ``path``, on top of what is there.

    Raises:
        DataError: the target repeats itself: too few different texts.
        TargetError: see :func:`opening_of`.
    """
    systems = source.systems or (None,)
    openings = [opening_of(tokenizer, system, end_ids) for system in systems]
    stop_ids = frozenset[int]().union(*(opening.stop_ids for opening in openings))
    texts = _read(path)
    on_text(len(texts), kept=True)
    wanted = source.train + source.held_out
    end = 0
    with storage_guard(path), path.open("a", encoding="utf-8") as log:

        def keep(result: GenerationResult) -> None:
            text = _text(tokenizer, result, stop_ids)
            texts[int(result.id)] = text
            log.write(json.dumps({"index": int(result.id), "text": text}) + "\n")
            log.flush()
            on_text()

        while (found := len(_distinct(texts, end))) < wanted:
            if end >= TRIES * wanted + 64:
                raise DataError(
                    expected=f"{wanted} different user turns",
                    found=f"{found} among {end} that the target wrote",
                    where="prompts.sources (self_instruct)",
                    fix="Raise its temperature or max_tokens, give it several systems, or ask for "
                    "fewer prompts.",
                )
            # As many as are missing, and a few more: most targets repeat some.
            start, end = end, end + max(wanted - found, 8)
            requests = [
                _request(source, index, openings[index % len(openings)])
                for index in range(start, end)
                if index not in texts
            ]
            if requests:
                write(requests, stop_ids, keep)


def write_all_turns(
    sources: Sequence[PromptSource],
    folder: Path,
    tokenizer: Tokenizer,
    end_ids: Collection[int],
    write: Write,
    on_text: OnDone = untold,
) -> None:
    """:func:`write_turns` for every source of that kind, into ``folder``."""
    for number, source in enumerate(sources):
        if isinstance(source, SelfInstructSource):
            path = folder / file_name(number)
            write_turns(source, path, tokenizer, end_ids, write, on_text)


def _request(source: SelfInstructSource, index: int, opening: Opening) -> GenerationRequest:
    name = f"dspark self_instruct/{source.seed}/{index}".encode()
    params = SamplingParams(
        temperature=source.temperature,
        top_p=source.top_p,
        seed=int.from_bytes(hashlib.sha256(name).digest()[:4], "big"),
        max_new_tokens=source.max_tokens,
    )
    return GenerationRequest(str(index), opening.ids, params)


def _text(tokenizer: Tokenizer, result: GenerationResult, stop_ids: Collection[int]) -> str | None:
    """What the user says; None when it was cut, is empty or holds marks of the template."""
    if not result.ids or result.ids[-1] not in stop_ids:
        return None
    ids = list(result.ids[:-1])
    added = tokenizer.added_tokens_decoder
    if any(i in added and added[i].special for i in ids):
        return None
    return str(tokenizer.decode(ids)).strip() or None


def _distinct(texts: dict[int, str | None], end: int) -> list[tuple[int, str]]:
    """(index, text) of the first of each text, by number, below ``end``."""
    seen: set[str] = set()
    found = []
    for index in range(end):
        text = texts.get(index)
        normal = " ".join((text or "").casefold().split())
        if text is not None and normal not in seen:
            seen.add(normal)
            found.append((index, text))
    return found


def _read(path: Path) -> dict[int, str | None]:
    """Whole lines of an earlier attempt; a torn last line is cut off."""
    texts: dict[int, str | None] = {}
    with storage_guard(path):
        path.touch()
        content = path.read_bytes()
        whole = content.rpartition(b"\n")
        if whole[2]:
            os.truncate(path, len(content) - len(whole[2]))
    for line in whole[0].splitlines():
        row: dict[str, Any] = json.loads(line)
        texts[row["index"]] = row["text"]
    return texts


def written_prompts(source: SelfInstructSource, path: Path) -> Iterator[Prompt]:
    """The prompts in ``path``: the first ``train`` ones, then the held-out ones."""
    texts = _read(path)
    found = _distinct(texts, max(texts, default=-1) + 1)
    systems = source.systems or (None,)
    for place, (index, text) in enumerate(found[: source.train + source.held_out]):
        yield make_prompt(
            "train" if place < source.train else "held_out",
            source.category,
            [text],
            systems[index % len(systems)],
            language=language_of([text], source.language),
            source=f"self_instruct {index}",
        )
