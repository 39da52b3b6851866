"""Graders know right from wrong, and a model's code cannot do harm or claim success."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.bench.grade.grade import (
    code_of,
    right_asserts,
    right_formula,
    right_human_eval,
    right_number,
)
from dspark.bench.grade.sandbox import Verdict, run_python
from dspark.bench.tasks.questions import Question


def asked(**check: object) -> Question:
    return Question("t", "t/1", "c", ("q",), check=dict(check))


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("He has 3. #### 1,234", r"so \boxed{1234} in all", True),
        ("#### 18", "She makes $18.", True),
        ("#### 18", "It is 18.00 dollars", True),
        ("#### 18", "first 18, then 19", False),
        ("#### -2", r"\boxed{-2}", True),
        ("18", "no number here", None),
    ],
)
def test_numbers_are_read_from_the_box_or_the_end(
    answer: str, text: str, right: bool | None
) -> None:
    assert right_number(asked(answer=answer), text) is right


def test_formulas_are_equal_when_they_mean_the_same() -> None:
    pytest.importorskip("math_verify")
    half = asked(answer=r"\frac{1}{2}")
    assert right_formula(half, r"Thus \boxed{0.5}.") is True
    assert right_formula(half, r"Thus \boxed{\frac{2}{3}}.") is False
    assert right_formula(half, "I do not know") is None


EVAL = {
    "prompt": 'from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    """Sum."""\n',
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    "entry_point": "add",
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("```python\ndef add(a, b):\n    return a + b\n```", True),
        ("```python\n    return a + b\n```", True),
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("```python\ndef add(a, b) return\n```", False),
        ("I cannot.", None),
    ],
)
def test_functions_are_judged_by_their_tests(text: str, right: bool | None) -> None:
    assert right_human_eval(asked(**EVAL), text) is right


def test_asserts_are_run_with_their_imports() -> None:
    question = asked(test_list=["assert math.isclose(f(), 1)"], test_imports=["import math"])
    assert right_asserts(question, "```python\ndef f():\n    return 1\n```") is True
    assert right_asserts(question, "```python\ndef f():\n    return 2\n```") is False


def test_the_longest_block_of_an_answer_is_its_code() -> None:
    text = "```python\na = 1\n```\nor\n```python\ndef f():\n    return 1\n```"
    assert code_of(text) == "def f():\n    return 1\n"
    assert code_of("only prose.") is None


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.fork()",
        "open('/etc/passwd').read()",
        "open('../outside', 'w')",
        "x = bytearray(4 << 30)",
        "open('big', 'wb').write(b'x' * (2 << 20))",
        "import os; os.listdir('/home')",
    ],
)
def test_code_that_leaves_early_or_reaches_out_has_not_passed(code: str) -> None:
    assert run_python(code, seconds=5) is Verdict.failed


def test_code_that_never_ends_is_stopped_and_nothing_is_left(tmp_path: Path) -> None:
    assert run_python("while True: pass", seconds=1) is Verdict.timeout


def test_ordinary_code_passes_and_may_print_and_write_in_its_folder() -> None:
    code = "import math, collections\nprint('hello')\nopen('own.txt', 'w').write('x')\n"
    assert run_python(code) is Verdict.passed
