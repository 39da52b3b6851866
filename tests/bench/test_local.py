"""The bench's arithmetic on decoders that answer by heart: pooled, trimmed, or with no steps."""

from __future__ import annotations

import pytest

from dspark.bench.local import BenchPrompt, LocalBench
from dspark.bench.results import BenchArm, SummaryResult
from dspark.config.recipe import BenchSection
from dspark.decoding.acceptance import AcceptanceCounter, StepCount
from dspark.decoding.request import Generation
from dspark.decoding.sampling import SamplingParams

END = 2
Counts = dict[int, list[int]]  # first prompt id -> accepted of each step


class Reciter:
    """Decodes a prompt to its first id and an end token; counts the steps it was told."""

    def __init__(self, steps: Counts | None) -> None:
        self.steps = steps

    def generate(self, prompt_ids: list[int], params: SamplingParams) -> Generation:
        counter = None
        if self.steps is not None:
            counter = AcceptanceCounter(3)
            for accepted in self.steps[prompt_ids[0]]:
                counter.add(StepCount(3, 3, accepted))
        return Generation([prompt_ids[0], END], ["bonus", "bonus"], True, counter)


def measured(
    steps: Counts, categories: dict[str, list[int]]
) -> tuple[list[BenchArm], list[SummaryResult]]:
    prompts = [
        BenchPrompt(f"{category}-{i}", category, "?", [i])
        for category, ids in categories.items()
        for i in ids
    ]
    section = BenchSection(temperatures=(0.0,), repeats=1, speed_prompts=8)
    bench = LocalBench(Reciter(None), Reciter(steps), section, 3, str, ["sums"])
    return bench.run(prompts)


def test_pooled_length_is_over_all_steps_and_has_an_interval() -> None:
    arms, rows = measured({5: [3, 1], 6: [0]}, {"sums": [5, 6]})
    assert arms[0].acceptance_length == rows[0].acceptance_length == 1 + 4 / 3
    assert arms[0].per_slot_acceptance == (2 / 3, 1 / 3, 1 / 3)
    assert arms[0].ci95 == rows[0].ci95
    assert arms[0].ci95 is not None
    assert arms[0].ci95[0] == 1.0
    assert arms[0].ci95[1] == 3.0
    assert rows[0].identical_to_plain == (2, 2)


def test_answers_that_end_at_once_give_a_row_without_a_length() -> None:
    arms, rows = measured({5: [], 6: []}, {"sums": [5, 6]})
    arm = arms[0]
    assert (arm.steps, arm.acceptance_length, arm.ci95) == (0, None, None)
    assert arm.per_slot_acceptance == (0.0, 0.0, 0.0)
    assert [p.acceptance_length for p in arm.prompts] == [None, None]
    assert arm.tokens == 4
    assert (rows[0].acceptance_length, rows[0].ci95) == (None, None)
    assert rows[0].speedup > 0


def test_a_group_counts_the_steps_of_those_that_took_any() -> None:
    arms, rows = measured({5: [], 6: [2], 7: [1, 1]}, {"sums": [5, 6, 7], "chat": [5]})
    assert arms[0].acceptance_length == 1 + 4 / 3
    general = next(r for r in rows if r.prompts == "general")
    assert general.acceptance_length is None
    workload = next(r for r in rows if r.prompts == "workload")
    assert workload.acceptance_length == arms[0].acceptance_length


@pytest.mark.parametrize("ids", [[5], [5, 6]])
def test_one_prompt_with_steps_says_nothing_of_others(ids: list[int]) -> None:
    arms, rows = measured({5: [2, 3], 6: []}, {"sums": ids})
    assert arms[0].acceptance_length == 1 + 5 / 2
    assert arms[0].ci95 is None
    assert rows[0].ci95 is None


def test_results_survive_their_files() -> None:
    arms, rows = measured({5: [], 6: [1]}, {"sums": [5], "chat": [6]})
    for made in (*arms, *rows):
        assert type(made).model_validate_json(made.model_dump_json()) == made
