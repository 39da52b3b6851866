"""What the running command is: its words, its code, its libraries and its machine.

Every stage records this when it runs, because the report may be written days later, by another
version, on another machine.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from dspark.artifacts import Origin
from dspark.cli.provenance import commit, machine, versions


def origin_of(command: str) -> Origin:
    """The origin of everything that ``command`` makes in this process."""
    return Origin(command=command, commit=marked_commit(), versions=versions(), machine=machine())


def marked_commit(folder: Path = Path(__file__).parent) -> str | None:
    """Short commit of the checkout this runs from, with ``+dirty`` when tracked files differ.

    None when it is no checkout, or git is not there to ask.
    """
    found = commit()
    if found is None:
        return None
    # Files git does not know are left out: notes and data lying around do not change the code.
    asked = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]
    try:
        out = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{found}+dirty" if out.stdout.strip() else found
