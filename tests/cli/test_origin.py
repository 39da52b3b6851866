"""What a record says of the code that made something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dspark

SCRIPT = """
import sys
from pathlib import Path
from dspark.cli.origin import marked_commit
here = Path(sys.argv[1])
print(marked_commit())
(here / "notes.txt").write_text("not ours")
print(marked_commit())
with (here / "dspark" / "errors.py").open("a") as file:
    file.write("# changed")
print(marked_commit())
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_changed_checkout_is_marked_dirty_and_files_beside_it_are_not(tmp_path: Path) -> None:
    package = Path(dspark.__file__).parent
    shutil.copytree(package, tmp_path / "dspark", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    head = subprocess.run(
        ["git", "-C", str(tmp_path), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert done.stdout.split() == [head, head, f"{head}+dirty"]
