"""A disk that is full for real: the stage says so, and nothing half written can be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from captured_targets import (
    make_answers,
    make_target,
    one_thread,  # noqa: F401 (autouse)
)

from dspark.capture.embedded import capture
from dspark.hidden.disk import DiskStore

SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from captured_targets import make_answers, make_target
from dspark.capture.embedded import capture
from dspark.errors import StorageError
from dspark.hidden.disk import DiskStore

torch.set_num_threads(1)
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
store = DiskStore(Path(sys.argv[1]))
try:
    capture(make_target(), make_answers(9, shared=20), store, batch_tokens=60, dtype=torch.float32)
except StorageError as error:
    print(error.where, error.fix, sep="\\n")
    sys.exit(7)
"""


def test_a_full_disk_is_a_storage_error_and_the_next_run_completes(tmp_path: Path) -> None:
    folder, sound = tmp_path / "states", tmp_path / "sound"
    folder.mkdir()
    sound.mkdir()
    answers = make_answers(9, shared=20)
    target, whole = make_target(), DiskStore(sound)
    capture(target, answers, whole, batch_tokens=60, dtype=torch.float32)
    sizes = sorted(p.stat().st_size for p in sound.iterdir())
    limit = sizes[4]  # the shorter half of the records fits, a longer one does not
    assert sizes[0] < limit < sizes[-1]

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(limit)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 7, done.stderr
    assert str(folder) in done.stdout
    assert "Free some space" in done.stdout

    store = DiskStore(folder)
    kept = store.ids()
    assert 0 < len(kept) < len(answers)
    assert sorted(p.name for p in folder.iterdir()) == [f"{i}.safetensors" for i in kept]
    before = {i: store.get(i) for i in kept}  # get() checks each of them
    added = capture(target, answers, store, batch_tokens=60, dtype=torch.float32)
    assert added == len(answers) - len(kept)
    for name in whole.ids():
        assert torch.allclose(store.get(name).final, whole.get(name).final, atol=1e-5)
    assert all(torch.equal(store.get(i).taps, r.taps) for i, r in before.items())
