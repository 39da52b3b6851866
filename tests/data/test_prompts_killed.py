"""`kill -9` anywhere: the finished prompt set is that of an undisturbed run, byte for byte."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark.config.prompts import PromptsSection
from dspark.data.chunks import Chunks
from dspark.data.sieve import Sieve
from dspark.data.sources import candidates_of

SCRIPT = """
import sys
from pathlib import Path
from dspark.cli.console import Screen
from dspark.cli.prompts import make_data
from dspark.config.load import load_prompts_recipe
from dspark.data import chunks, prompts, shards
chunks.CHUNK_ROWS = prompts.CHUNK_ROWS = 250
shards.SHARD_ROWS = 400
make_data(load_prompts_recipe(sys.argv[1]), Path(sys.argv[2]), Screen(), quiet=True)
"""
RECIPE = """\
name: killed
output: unused
prompts:
  workload: [chat]
  sources:
    - {{kind: file, path: {prompts}, category: chat, train: all, held_out: 50}}
    - {{kind: word_problems, category: maths, train: 300}}
  shares: [{{category: chat, weight: 4}}, {{category: maths, weight: 1}}]
  filters:
    near_duplicate: {{}}
    contamination: {{against: [{against}], benchmarks: []}}
"""


def write_inputs(folder: Path) -> Path:
    rng = random.Random(5)
    texts = [" ".join(f"w{rng.randrange(900)}" for _ in range(25)) for _ in range(4000)]
    texts += [text.upper() for text in texts[:300]]
    texts += [text.replace("w1", "v1", 1) for text in texts[300:600]]
    rng.shuffle(texts)
    prompts, against = folder / "prompts.jsonl", folder / "against.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    against.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts[::100]))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(prompts=prompts, against=against))
    return recipe


def start(recipe: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, str(recipe), str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def finish(recipe: Path, out: Path) -> float:
    started = time.monotonic()
    process = start(recipe, out)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors.decode()
    return time.monotonic() - started


@pytest.mark.parametrize(
    "kills", [4, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_killed_at_random_points_and_run_again_gives_the_same_files(
    tmp_path: Path, kills: int
) -> None:
    recipe = write_inputs(tmp_path)
    undisturbed = tmp_path / "undisturbed"
    seconds = finish(recipe, undisturbed)
    rng = random.Random(kills)
    out = tmp_path / "killed"
    killed = 0
    for _ in range(kills):
        process = start(recipe, out)
        time.sleep(seconds * rng.uniform(0.3, 1.0))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.communicate()
        if (out / "manifest.json").exists():
            assert contents(out) == contents(undisturbed)
            out = tmp_path / f"killed-{killed}"
    assert killed
    finish(recipe, out)
    assert contents(out) == contents(undisturbed)
    assert json.loads((out / "report.json").read_text())["rows_out"] > 1000


def test_a_chunk_is_done_only_with_its_account_which_is_written_last(tmp_path: Path) -> None:
    source = {"kind": "word_problems", "category": "maths", "train": 3}
    section = PromptsSection(sources=(source,), workload=("maths",))
    sieved = Sieve(section, None, False).chunk((0, c) for c in candidates_of(section.sources[0]))
    chunks = Chunks(tmp_path)
    assert not chunks.done(0)
    chunks.put(0, sieved)
    assert chunks.done(0)
    assert len(chunks.rows(1)) == len(list(chunks.lines(1))) == 3
    (account,) = tmp_path.glob("work-*/*.json")
    newest = max(tmp_path.glob("work-*/*"), key=lambda path: path.stat().st_mtime_ns)
    assert newest == account
    account.unlink()
    assert not chunks.done(0)
    chunks.put(0, sieved)
    chunks.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_was_done_before_the_kill_is_not_done_again(tmp_path: Path) -> None:
    recipe = write_inputs(tmp_path)
    out = tmp_path / "out"
    process = start(recipe, out)
    deadline = time.monotonic() + 120
    while len(done := sorted(out.glob("work-*/*.json"))) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path: path.stat().st_mtime_ns for path in done}
    again = start(recipe, out)
    while len(sorted(out.glob("work-*/*.json"))) < len(done) + 3 and again.poll() is None:
        time.sleep(0.005)
    assert all(p.stat().st_mtime_ns == t for p, t in before.items() if p.exists())
    again.communicate(timeout=280)
    assert again.returncode == 0
