"""Two commands on one output folder are kept apart, and a killed one keeps nobody out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import dspark, environment
from dspark.artifacts import artifact_lock, run_lock, writer_of
from dspark.artifacts.lock import LOCK
from dspark.cli.context import RunContext
from dspark.cli.pipeline import run_stages
from dspark.config.load import load_recipe
from dspark.errors import BusyError

DATA = """\
name: data
output: {output}
prompts:
  workload: [x]
  sources: [{{kind: file, path: {path}, category: x, train: all}}]
"""
HOLD = "import sys; from dspark.artifacts import run_lock\nwith run_lock(sys.argv[1]): print(1, flush=True); sys.stdin.read()"


def until(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline, f"never came: {path}"
        time.sleep(0.02)


def test_a_second_command_is_refused_by_name_and_kill_9_frees_the_folder(tmp_path: Path) -> None:
    prompts, root = tmp_path / "prompts.jsonl", tmp_path / "out"
    recipe = tmp_path / "data.yaml"
    recipe.write_text(DATA.format(output=root, path=prompts))
    os.mkfifo(prompts)  # the first command stands still where it reads its prompts
    command = [sys.executable, "-m", "dspark", "prompts", str(recipe)]
    first = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    try:
        until(root / LOCK)
        second = dspark("prompts", str(recipe))
        told = " ".join(second.stderr.split())
        assert f"process {first.pid} on " in str(writer_of(root))
        assert second.returncode == 1
        assert f"process {first.pid} on " in told
        assert "Wait until it has finished" in told
        assert dspark("prompts", str(recipe), "--help").returncode == 0
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert writer_of(root) is None
    assert (root / LOCK).exists(), "it stays and binds nobody"
    prompts.unlink()
    prompts.write_text('{"prompt": "What is a lock?"}\n')
    third = dspark("prompts", str(recipe))
    assert third.returncode == 0, third.stderr
    assert not (root / LOCK).exists()
    assert (root / "prompts" / "manifest.json").exists()


def test_run_stages_takes_the_lock_before_it_loads_anything(tiny_recipe: Path) -> None:
    run = RunContext(load_recipe(tiny_recipe), "")
    command = [sys.executable, "-c", HOLD, str(run.root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline()
        with pytest.raises(BusyError, match=f"process {holder.pid} on"):
            run_stages(run, None, only=False)
        holder.communicate()
    assert "target" not in run.__dict__
    assert not run.root.exists(), "the holder wrote nothing and left nothing"


def test_locks_leave_nothing_behind_and_do_not_bind_other_folders(tmp_path: Path) -> None:
    with run_lock(tmp_path / "a"), run_lock(tmp_path / "b"), artifact_lock(tmp_path / "c"):
        assert (tmp_path / "a" / LOCK).exists()
        assert not (tmp_path / "c").exists()
    assert list(tmp_path.iterdir()) == []
