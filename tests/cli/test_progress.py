"""What a slow part shows: time left counts this process alone, and files get plain lines."""

import io
import re

import pytest
from rich.console import Console

from dspark.cli.console import Screen
from dspark.cli.progress import DrawnBar, Meter, WrittenBar


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_an_earlier_process_did_is_no_speed():
    clock = Clock()
    meter = Meter(1000, clock)
    meter.advance(900, kept=True)
    clock.now += 10
    meter.advance(10, kept=False)
    assert meter.rate == pytest.approx(1.0)
    assert meter.left == pytest.approx(90.0)


def test_a_resumed_trainer_is_timed_from_its_first_step_here():
    clock = Clock()
    meter = Meter(None, clock)
    clock.now += 60  # making optimiser and batches ready
    meter.set(401, 500)
    assert meter.left is None
    clock.now += 4
    meter.set(403, 500)
    assert meter.rate == pytest.approx(0.5)
    assert meter.left == pytest.approx(194.0)


def test_the_drawn_bar_shows_the_time_left_of_its_meter():
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    meter = Meter(1000, clock)
    bar = DrawnBar(console, "answers", meter)
    bar.start()
    bar.advance(900, kept=True)
    clock.now += 10
    bar.advance(10)
    bar.end()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue()).split("\r")[-1]
    assert "910/1,000" in last
    assert "1.5 min left" in last


def written(total: float | None) -> tuple[WrittenBar, Clock, io.StringIO]:
    clock, file = Clock(), io.StringIO()
    console = Console(file=file)
    return WrittenBar(console, "target answers", Meter(total, clock), clock), clock, file


def test_a_file_gets_a_line_for_every_tenth_and_no_more():
    bar, clock, file = written(1000)
    bar.start()
    for _ in range(1000):
        clock.now += 0.1
        bar.advance()
    bar.end()
    lines = file.getvalue().splitlines()
    assert lines[0].strip() == "target answers..."
    assert [line.split()[2] for line in lines[1:-1]] == [
        f"{n}/1,000" for n in range(100, 1000, 100)
    ]
    assert lines[2].strip() == "target answers  200/1,000 (20%), 10.0/s, 1.3 min left"
    assert lines[-1].strip() == "target answers  1,000/1,000 in 1.7 min"


def test_slow_work_gets_a_line_every_half_minute_and_quick_work_none_in_between():
    bar, clock, file = written(1_000)
    for _ in range(10):
        clock.now += 10
        bar.set(bar.meter.done + 1, 1_000, "ce 2.10")
    assert len(file.getvalue().splitlines()) == 3
    assert file.getvalue().splitlines()[-1].strip() == (
        "target answers  9/1,000 (1%), 6.0/min, 2.8 h left, ce 2.10"
    )
    bar, clock, file = written(10)
    for _ in range(10):
        clock.now += 0.4
        bar.advance()
    assert file.getvalue() == ""


def test_lines_in_a_file_are_plain_and_stay_whole():
    screen = Screen(Console(file=io.StringIO(), width=40))
    with screen.bar("loading " + "a/very/long/path/" * 6 + "[bold]x", None):
        pass
    with screen.byte_bar("writing", 2_700_000) as on_bytes:
        on_bytes(2_700_000)
    text = screen.console.file.getvalue()
    lines = text.splitlines()
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 3
    assert "[bold]x..." in lines[0]
    assert lines[2].strip().startswith("writing (MB)  3/3 in ")
