"""The test tree itself: what pytest can only collect on some machines."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent


def test_no_two_test_files_share_a_name_because_pytest_imports_them_under_it() -> None:
    """Two of one name collect alone and fail together, and only where both folders are asked for."""
    folders = defaultdict(list)
    for path in HERE.rglob("*.py"):
        if "__pycache__" not in path.parts:
            folders[path.name].append(path.parent.relative_to(HERE).as_posix())
    assert {name: found for name, found in folders.items() if len(found) > 1} == {}
