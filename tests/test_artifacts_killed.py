"""Real processes killed, interrupted or out of space while they write an artifact."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark import artifacts
from dspark.errors import MissingArtifactError, StorageError

SHARDS = 24

STAGE_SCRIPT = """
import sys
from pathlib import Path
from dspark import artifacts
folder, shards, hover = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
manifest = artifacts.new_manifest("states", {"shards": shards})
artifacts.begin(folder, manifest)
kept = 0
for i in range(shards):
    path = folder / f"shard-{i:02d}"
    if path.exists():
        kept += 1
        continue
    artifacts.atomic_write(path, bytes([i]) * (200_000 + i))
    print(i, flush=True)
    while i == hover:  # write on until somebody kills us
        artifacts.atomic_write(path, bytes([i]) * (200_000 + i))
artifacts.finish(folder, manifest.model_copy(update={"counts": {"kept": kept}}))
print("finished", flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        # A shell that runs the tests in the background has Ctrl-C ignored; the child must hear it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def read_lines(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline()


def whole_shards(folder: Path) -> int:
    shards = sorted(folder.glob("shard-*"))
    for path in shards:
        i = int(path.name.removeprefix("shard-"))
        assert path.read_bytes() == bytes([i]) * (200_000 + i)
    return len(shards)


@pytest.mark.parametrize("seed", range(4))
def test_after_kill_9_nothing_half_written_is_readable_and_the_stage_resumes(
    tmp_path: Path, seed: int
) -> None:
    folder, dice = tmp_path / "states", random.Random(seed)
    done = 0
    for _ in range(3):
        more = dice.randint(1, 7)
        process = start(STAGE_SCRIPT, folder, SHARDS, done + more - 1)
        read_lines(process, more)
        time.sleep(dice.uniform(0, 0.01))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        with pytest.raises(MissingArtifactError, match="interrupted"):
            artifacts.read_manifest(folder, "states")
        done += more
        assert whole_shards(folder) == done
    process = start(STAGE_SCRIPT, folder, SHARDS, -1)
    output, errors = process.communicate(timeout=60)
    assert output.endswith("finished\n"), errors
    manifest = artifacts.verify(folder, "states", deep=True)
    assert manifest.counts == {"kept": done}
    assert whole_shards(folder) == len(manifest.files) == SHARDS
    assert not list(folder.rglob("*.partial"))
    assert [p.name for p in tmp_path.iterdir()] == ["states"]


REWRITE_SCRIPT = """
import sys
from dspark import artifacts
n = 0
while True:
    artifacts.atomic_json(sys.argv[1], {"n": n, "body": [n] * 50_000})
    print(n, flush=True)
    n += 1
"""


def test_a_reader_beside_the_writer_only_ever_sees_whole_versions(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    process = start(REWRITE_SCRIPT, path)
    try:
        read_lines(process, 1)
        seen: set[int] = set()
        stop = time.monotonic() + 1.0
        while time.monotonic() < stop or len(seen) < 3:
            assert process.poll() is None
            value = json.loads(path.read_bytes())
            assert value["body"] == [value["n"]] * 50_000
            seen.add(value["n"])
    finally:
        process.kill()
        process.communicate()
    value = json.loads(path.read_bytes())
    assert value["body"] == [value["n"]] * 50_000


LARGE_SCRIPT = """
import sys
from dspark import artifacts
versions = [bytes([n]) * 16_000_000 for n in range(2)]
while True:
    for version in versions:
        artifacts.atomic_write(sys.argv[1], version)
        print(version[0], flush=True)
"""


@pytest.mark.parametrize("delay", [0.001, 0.003, 0.006])
def test_ctrl_c_keeps_the_old_content_and_leaves_no_temporary_file(
    tmp_path: Path, delay: float
) -> None:
    path = tmp_path / "large.bin"
    process = start(LARGE_SCRIPT, path)
    read_lines(process, 2)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    content = path.read_bytes()
    assert content == content[:1] * 16_000_000
    assert [p.name for p in tmp_path.iterdir()] == ["large.bin"]


NO_SPACE_SCRIPT = """
import os, resource, signal, sys
from pathlib import Path
from dspark import artifacts
from dspark.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
manifest = artifacts.new_manifest("states", {})
artifacts.begin(folder, manifest)
artifacts.atomic_write(folder / "a", b"old")
for i in range(100):
    artifacts.atomic_write(folder / f"small-{i:03d}", b"x")

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def refused(action):
    try:
        action()
    except StorageError as error:
        assert "Free some space" in error.fix, error.fix
        assert not [n for n in os.listdir(folder) if n.endswith(".partial")]
        return True
    return False

limit(4096)
assert refused(lambda: artifacts.atomic_write(folder / "a", b"n" * 100_000))
assert (folder / "a").read_bytes() == b"old"
# The manifest of 101 files is larger than the limit too: the stage stays unfinished.
assert refused(lambda: artifacts.finish(folder, manifest))
assert not (folder / artifacts.MANIFEST).exists()
limit(resource.RLIM_INFINITY)
artifacts.finish(folder, manifest)
print(len(artifacts.verify(folder, "states", deep=True).files))
"""


def test_a_file_that_cannot_grow_is_refused_and_the_stage_can_be_finished_later(
    tmp_path: Path,
) -> None:
    process = start(NO_SPACE_SCRIPT, tmp_path / "states")
    output, errors = process.communicate(timeout=60)
    assert output == "101\n", errors


def test_a_folder_that_is_not_there_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        artifacts.atomic_write(tmp_path / "none" / "a", b"x")
