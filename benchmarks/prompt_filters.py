"""How fast the prompt filters are, how much memory they need, and whether they find what is there.

    python benchmarks/prompt_filters.py --rows 1000000 --out FILE.json

Three measurements on seeded synthetic prompts (words drawn from a Zipf distribution, 56 words a
prompt on average, so n-grams repeat about as seldom as in real text):

- the 13-gram filter alone, in one process and one thread, against 10,000 evaluation items, from
  text to hits (goal: a million prompts a minute);
- MinHash signatures, beside `datasketch` where that is installed;
- the whole of `dspark prompts` on a JSON Lines file of all rows, in a process of its own whose peak
  resident memory is measured. The file holds known numbers of each fault, and the report must find
  them: a fast filter that finds nothing would look good here.

"Prompts a minute" are per minute of processor time of the one thread, since that is what a core can
do; wall time stands beside it, and `load` says how busy the machine was.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dspark.artifacts import atomic_json
from dspark.cli.origin import origin_of
from dspark.data.filters.minhash import signatures
from dspark.data.filters.ngrams import NgramIndex
from dspark.data.filters.units import word_units
from dspark.data.filters.wrappers import unwrapped

CHUNK = 4096
ITEMS = 10_000
# One row in so many has the fault; a row that several fall on has the first.
FAULTS = {
    "roles": 503,
    "empty": 499,
    "contamination": 199,
    "image": 101,
    "near_duplicate": 29,
    "duplicate": 23,
}


def vocabulary() -> list[str]:
    """30,000 pronounceable words, short ones first, as in a language."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    one = [a + c for a in syllables for c in ("", "n", "s")]
    two = ["".join(pair) for pair in itertools.product(syllables, syllables)]
    three = [a + b for a, b in itertools.product(two[::7], syllables)]
    return (one + two + three)[:30_000]


def texts(seed: int, count: int) -> Iterator[list[str]]:
    """Chunks of texts, ``count`` in all."""
    words = np.array(vocabulary(), dtype=object)
    weights = 1.0 / np.arange(3, len(words) + 3)
    edges = np.cumsum(weights / weights.sum())
    draw = np.random.default_rng(seed)
    for start in range(0, count, CHUNK):
        rows = min(CHUNK, count - start)
        lengths = np.clip(draw.lognormal(3.8, 0.7, rows), 12, 400).astype(int)
        flat = words[np.searchsorted(edges, draw.random(int(lengths.sum())))]
        ends = np.cumsum(lengths)
        yield [" ".join(flat[e - n : e]) for e, n in zip(ends, lengths, strict=True)]


def faulty_rows(count: int, items: list[str]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """(fault or None, row): every fault as often as :data:`FAULTS` says."""
    recent: list[str] = []
    number = 0
    for chunk in texts(1, count):
        for text in chunk:
            number += 1
            fault = next((name for name, every in FAULTS.items() if number % every == 0), None)
            if fault == "duplicate" and recent:
                yield fault, {"prompt": recent[number % len(recent)].upper() + " "}
            elif fault == "near_duplicate" and recent:
                words = recent[number % len(recent)].split()
                words[len(words) // 2] = "changed"
                yield fault, {"instruction": " ".join(words), "output": "an answer"}
            elif fault == "contamination":
                item = items[number % len(items)].split()
                content = f"<|im_start|>user\n{text}, {' '.join(item[:13]).title()}!<|im_end|>"
                yield fault, {"messages": [{"role": "user", "content": content}]}
            elif fault == "image":
                parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {}}]
                yield fault, {"messages": [{"role": "user", "content": parts}]}
            elif fault == "empty":
                yield fault, {"conversations": [{"from": "human", "value": " "}]}
            elif fault == "roles":
                yield fault, {"messages": [{"role": "assistant", "content": text}]}
            else:
                yield None, {"messages": [{"role": "user", "content": text}]}
                if len(text.split()) >= 40:  # one changed word leaves 0.85 of its shingles or more
                    recent = [*recent[-200:], text]


def measure_ngrams(rows: int, items: list[str]) -> dict[str, Any]:
    started = time.process_time()
    index = NgramIndex(word_units([item] for item in items), 13, 20)
    building = time.process_time() - started
    spent, wall, found, characters = 0.0, 0.0, 0, 0
    for number, chunk in enumerate(texts(1, rows)):
        chunk[0] = f"[INST] {chunk[0]} {items[number % len(items)].upper()} [/INST]"
        characters += sum(map(len, chunk))
        started, wall_started = time.process_time(), time.perf_counter()
        hits = index.hits(word_units([unwrapped(text)] for text in chunk))
        spent += time.process_time() - started
        wall += time.perf_counter() - wall_started
        found += hits[0].row == 0 and len({hit.row for hit in hits}) == 1
    chunks = -(-rows // CHUNK)
    return {
        "prompts": rows,
        "evaluation_items": len(items),
        "building_seconds": round(building, 2),
        "processor_seconds": round(spent, 2),
        "wall_seconds": round(wall, 2),
        "prompts_per_minute": round(rows / spent * 60),
        "mean_characters": round(characters / rows),
        "planted_hits": chunks,
        "chunks_with_exactly_the_planted_hit": found,
    }


def measure_minhash(rows: int) -> dict[str, Any]:
    chunks = list(texts(2, rows))
    started = time.process_time()
    for chunk in chunks:
        signatures(word_units([text] for text in chunk), len(chunk), 3)
    spent = time.process_time() - started
    result: dict[str, Any] = {"prompts": rows, "prompts_per_minute": round(rows / spent * 60)}
    try:
        library: Any = importlib.import_module("datasketch")
    except ImportError:
        return {**result, "datasketch_prompts_per_minute": None}
    few = chunks[0][:1000]
    started = time.process_time()
    for text in few:
        words = text.split()
        made = library.MinHash(num_perm=128)
        made.update_batch([" ".join(words[i : i + 3]).encode() for i in range(len(words) - 2)])
    spent = time.process_time() - started
    return {**result, "datasketch_prompts_per_minute": round(len(few) / spent * 60)}


def measure_whole(rows: int, items: list[str], folder: Path) -> dict[str, Any]:
    made: dict[str, int] = dict.fromkeys(FAULTS, 0)
    prompts, against = folder / "prompts.jsonl", folder / "against.jsonl"
    with prompts.open("w", encoding="utf-8") as file:
        for fault, row in faulty_rows(rows, items):
            if fault is not None:
                made[fault] += 1
            file.write(json.dumps(row) + "\n")
    lines = [json.dumps({"id": n, "question": item}) for n, item in enumerate(items)]
    against.write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = folder / "out"
    command = ["prompts", "--input", prompts, "--against", against, "--out", out, "--json"]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "dspark", *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wall = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stderr)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    found = {step["step"]: step["dropped"] for step in report["funnel"]}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = used.ru_utime + used.ru_stime
    return {
        "prompts": rows,
        "bytes_read": prompts.stat().st_size,
        "processor_seconds": round(spent, 1),
        "wall_seconds": round(wall, 1),
        "prompts_per_minute": round(rows / spent * 60),
        "peak_resident_mb": round(used.ru_maxrss / 1e3),
        "rows_out": report["rows_out"],
        "planted": made,
        "dropped": {name: found[name] for name in FAULTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", default="", help="for example: measured on a busy machine")
    options = parser.parse_args()
    items = [text for chunk in texts(99, ITEMS) for text in chunk]
    ngrams = measure_ngrams(options.rows, items)
    print(f"13-gram filter: {ngrams['prompts_per_minute']:,} prompts a minute", flush=True)
    minhash = measure_minhash(min(options.rows, 50_000))
    print(f"MinHash signatures: {minhash['prompts_per_minute']:,} prompts a minute", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        whole = measure_whole(options.rows, items, Path(folder))
    print(f"all of dspark prompts: {whole['prompts_per_minute']:,} prompts a minute", flush=True)
    result = {
        "what": "speed, memory and findings of the prompt filters, one process, one thread",
        "ngram_filter": ngrams,
        "minhash": minhash,
        "dspark_prompts": whole,
        "note": options.note,
        "load": os.getloadavg(),
        **origin_of(" ".join(["python", *sys.argv])).model_dump(),
    }
    atomic_json(options.out, result)


if __name__ == "__main__":
    main()
