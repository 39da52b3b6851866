"""What a killed bench may keep, and what it must measure again."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.bench.journal import Journal, Key, Pair
from dspark.bench.local import BenchPrompt, LocalBench
from dspark.config.recipe import BenchSection
from dspark.decoding.acceptance import AcceptanceCounter, StepCount
from dspark.decoding.request import Generation
from dspark.decoding.sampling import SamplingParams
from told import Told

HERE = {"device": "here", "cores": 2}


class Arm:
    """A decoder that answers the prompt's own ids and counts its calls; stops at ``last``."""

    def __init__(self, drafts: bool, last: int | None = None) -> None:
        self.drafts, self.last, self.calls = drafts, last, 0

    def generate(self, prompt_ids: list[int], params: SamplingParams) -> Generation:
        if self.calls == self.last:
            raise KeyboardInterrupt
        self.calls += 1
        counter = None
        if self.drafts:
            counter = AcceptanceCounter(4)
            counter.add(StepCount(4, 4, len(prompt_ids) % 4))
        return Generation(list(prompt_ids), ["accepted"] * len(prompt_ids), True, counter)


PROMPTS = [
    BenchPrompt(f"{category}-{i}", category, "text", list(range(1, 4 + i)))
    for category in ("sums", "code", "chat")
    for i in range(3)
]
SECTION = BenchSection(
    temperatures=(0.0, 1.0), max_new_tokens=8, speed_prompts=2, repeats=2, seed=1
)


def bench(path: Path | None, last: int | None = None) -> tuple[LocalBench, Arm]:
    plain = Arm(False, last)
    journal = None if path is None else Journal(path, HERE)
    text = lambda ids: "x" * len(ids)  # noqa: E731
    return (
        LocalBench(plain, Arm(True), SECTION, 4, text, ["sums"], journal=journal),
        plain,
    )


def figures(found: LocalBench) -> list[object]:
    arms, rows = found.run(PROMPTS)
    timeless = [a.model_copy(update={"tokens_per_second": None}) for a in arms]
    return [*timeless, *(r.acceptance_length for r in rows)]


# One temperature: sums 3 + 2 again, code 3 + 1 again, chat 3 + 1 again = 13 decodings.
@pytest.mark.parametrize(
    ("cut", "again"),
    [
        (0, 26),
        (2, 26),  # both timed sums are in, but not their repeats: nothing may be kept
        (4, 25),  # the third sum is not timed: kept
        (5, 21),  # sums at T=0 are whole
        (9, 19),  # sums, and two of code; code is timed with chat, so its first is redone
        (13, 13),
        (26, 0),
    ],
)
def test_a_cut_bench_keeps_texts_and_times_cut_groups_again(
    tmp_path: Path, cut: int, again: int
) -> None:
    whole, plain = bench(None)
    want = figures(whole)
    assert plain.calls == whole.decodings(PROMPTS) == 26
    path = tmp_path / "unfinished.jsonl"
    found, _ = bench(path, last=cut if cut < 26 else None)
    if cut < 26:
        with pytest.raises(KeyboardInterrupt):
            found.run(PROMPTS)
    else:
        found.run(PROMPTS)
    resumed, plain = bench(path)
    resumed.on_pair = told = Told()
    assert figures(resumed) == want
    assert plain.calls == told.made == again
    assert told.kept == 26 - again
    third, plain = bench(path)
    assert figures(third) == want
    assert plain.calls == 0


def test_a_torn_line_is_measured_again_and_never_continued(tmp_path: Path) -> None:
    path = tmp_path / "unfinished.jsonl"
    found, _ = bench(path)
    found.run(PROMPTS)
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    resumed, plain = bench(path)
    resumed.run(PROMPTS)
    # The last line is a timed repeat, so the group "general" at T=1 (4 decodings) goes with it.
    assert plain.calls == 4
    assert len(path.read_text().splitlines()) == 27
    assert Journal(path, HERE).found == 26


def test_another_machines_lines_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "unfinished.jsonl"
    pair = Pair(Generation([1]), Generation([1], ["bonus"]), 0.5, 0.25)
    journal = Journal(path, HERE)
    journal.keep_whole([])
    journal.add(Key("a", 0.0, 0), pair)
    assert Journal(path, HERE).get(Key("a", 0.0, 0)) == pair
    elsewhere = Journal(path, {**HERE, "cores": 64})
    assert elsewhere.from_elsewhere
    assert elsewhere.found == 0
