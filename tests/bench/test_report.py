"""The report says what the JSON says, loads nothing, runs nothing, and keeps hostile text inert."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from made_run import made_bench, made_pieces, made_run
from parsed_page import Page

from dspark.bench.curves import Training
from dspark.bench.report import (
    duration,
    find_contradictions,
    largest_gap,
    render_report,
    write_report,
)
from dspark.bench.results import Bench, Lineage, Summary
from dspark.errors import ArtifactError, MissingArtifactError, MissingDependencyError
from dspark.page import TOKEN_KINDS
from dspark.server.playground import playground

pytest.importorskip("matplotlib")
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
    "</p></title></style></svg></details>\x00\u202e"
)


def rendered(
    summary: dict[str, Any],
    bench: dict[str, Any],
    training: dict[str, Any] | None,
    lineage: dict[str, Any] | None,
) -> str:
    return render_report(
        Summary.model_validate(summary),
        Bench.model_validate(bench),
        Training.model_validate(training) if training else None,
        Lineage.model_validate(lineage) if lineage else None,
    )


@pytest.fixture(scope="module")
def page_text() -> str:
    return rendered(*made_run())


def test_page_parses_with_balanced_tags_and_unique_ids(page_text: str) -> None:
    page = Page(page_text)
    assert page.stack == []
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    known = set(ids)
    for reference in re.findall(r"url\(#([^)]+)\)", page_text):
        assert reference in known
    for _, attributes in page.elements:
        assert set((attributes.get("aria-labelledby") or "").split()) <= known


def test_result_rows_carry_exactly_the_numbers_of_summary_json(page_text: str) -> None:
    summary = made_run()[0]
    expected = []
    for row in summary["results"]:
        speed = row["tokens_per_second"]
        numbers = [row["temperature"], row["acceptance_length"], *row["ci95"]]
        numbers += [speed["plain"], speed["draft"], row["speedup"]]
        expected.append(numbers + (row["identical_to_plain"] or []))
    assert Page(page_text).data_of_row["result"] == expected


def test_arm_and_slot_rows_carry_exactly_the_numbers_of_bench_json(page_text: str) -> None:
    arms = made_bench()["arms"]
    page = Page(page_text)
    expected = [
        [a["acceptance_length"], *a["ci95"], 31.2, 44.4, *(a["identical"] or [])] for a in arms
    ]
    assert page.data_of_row["arm"] == expected
    workload = [a["per_slot_acceptance"] for a in arms if a["group"] == "workload"]
    for shown, written in zip(page.data_of_row["slots"], workload, strict=True):
        assert shown == pytest.approx(written, abs=1e-12)


def test_the_eye_sees_the_rounded_headline_and_a_slow_draft_is_called_slower(
    page_text: str,
) -> None:
    text = re.sub(r"\s+", " ", Page(page_text).text)
    assert "1.62× the speed of plain decoding" in text
    assert "0.94× the speed of plain decoding: slower" in text
    assert text.index("Workload prompts") < text.index("General prompts") < text.index("Results")
    assert "Maths word problems from our own seeded generator" in text


def test_general_prompts_not_measured_still_have_their_card() -> None:
    summary, bench, training, lineage = made_run()
    summary["results"] = [r for r in summary["results"] if r["prompts"] == "workload"]
    text = Page(rendered(summary, bench, training, lineage)).text
    assert "General prompts" in text
    assert "Not measured in this run." in text


def test_page_loads_nothing_and_runs_nothing(page_text: str) -> None:
    assert "http://" not in page_text
    assert "https://" not in page_text
    assert "@import" not in page_text
    for tag, attributes in Page(page_text).elements:
        assert tag not in {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "xlink:href", "data", "srcset"}:
                assert (value or "").startswith("#")
    for target in re.findall(r"url\(([^)]*)\)", page_text):
        assert target.strip("'\"").startswith("#")


def test_hostile_text_is_inert_everywhere() -> None:
    summary, bench, training, lineage = made_run()
    for key in ("name", "target", "workload_description", "command", "commit", "dtype"):
        summary[key] = HOSTILE
    summary["verification"] = summary["draft_sample_method"] = HOSTILE
    summary["versions"] = summary["machine"] = {HOSTILE: HOSTILE}
    summary["stage_seconds"] = {HOSTILE: 5.0}
    arm = bench["arms"][0]
    arm["sample"] = {
        "prompt": HOSTILE,
        "pieces": [{"text": HOSTILE, "kind": k} for k in ("prompt", "accepted", "bonus")],
    }
    arm["prompts"][0]["id"] = HOSTILE
    entry = {"artifact": HOSTILE, "kind": HOSTILE, "fingerprint": HOSTILE}
    lineage["artifacts"] += [entry | {"parents": {HOSTILE: "stale"}}]
    text = rendered(summary, bench, training, lineage)
    page = Page(text)
    assert page.stack == []
    tags = [tag for tag, _ in page.elements]
    clean = [tag for tag, _ in Page(rendered(*made_run())).elements]
    assert set(tags) == set(clean)
    assert not any(name.startswith("on") for _, a in page.elements for name in a)
    assert "<script" not in text
    assert "\x00" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_sample_keeps_every_token_and_marks_it_by_more_than_colour(page_text: str) -> None:
    page = Page(page_text)
    spans = [a for t, a in page.elements if t == "span" and "title" in a]
    kinds = [(a["class"] or "").removeprefix("piece ") for a in spans]
    arms = made_bench()["arms"]
    expected = [p["kind"] for a in arms for p in a["sample"]["pieces"]]
    assert sorted(kinds) == sorted(expected)
    assert "".join(p["text"] for p in made_pieces()) in page.text
    for style in ("solid", "double", "wavy"):
        assert f"text-decoration-style: {style}" in page_text


def test_the_gap_of_estimate_and_decoding_is_that_of_the_pages_own_figures(page_text: str) -> None:
    slots = [(0.0, [0.9, 0.5], [0.8, 0.75]), (1.0, [0.7, 0.4], None)]
    assert largest_gap(slots) == (0.25, 0.0, 2)
    assert largest_gap(slots[1:]) is None
    value = r'<data value="([0-9.]+)">'
    gap = re.search(
        rf"at most {value}[0-9.]+</data> apart \(T&nbsp;=&nbsp;([0-9.]+), slot ([0-9]+)\)",
        page_text,
    )
    assert gap is not None
    shown: dict[str, dict[str, list[float]]] = {}
    for temperature, which, cells in re.findall(
        r'<th scope="row">T&nbsp;=&nbsp;([0-9.]+), (real|training).*?</th>(.*?)</tr>', page_text
    ):
        numbers = [float(x) for x in re.findall(value, cells)]
        shown.setdefault(temperature, {})[which] = numbers
    own, slot = shown[gap[2]], int(gap[3]) - 1
    assert abs(own["real"][slot] - own["training"][slot]) == pytest.approx(float(gap[1]))


def test_plots_are_named_for_those_who_cannot_see_them_and_follow_the_theme(page_text: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page_text, flags=re.DOTALL)
    assert len(drawings) == 3 + 2 + 2 + 2 + 3
    for drawing in drawings:
        assert 'role="img"' in drawing
        assert re.search(r"<title[^>]*>[^<]+</title><desc[^>]*>[^<]*\d", drawing)
        assert "var(--muted)" in drawing
        colours = set(re.findall(r"#[0-9a-f]{6}\b", drawing))
        assert not colours, f"colours that dark mode cannot change: {colours}"


def test_page_is_the_same_every_time(page_text: str) -> None:
    assert rendered(*made_run()) == page_text


def test_labels_outside_the_draft_vocabulary_are_told_beside_the_cross_entropy() -> None:
    summary, bench, training, lineage = made_run()
    assert "Labels outside the draft vocabulary" in (told := Page(rendered(*made_run())).text)
    assert "3.7 %" in told
    training["evals"][-1]["outside"] = 0.0
    assert "Labels outside" not in Page(rendered(summary, bench, training, lineage)).text


def test_training_and_lineage_may_be_absent_and_the_page_says_so() -> None:
    summary, bench, _, _ = made_run()
    text = Page(rendered(summary, bench, None, None)).text
    assert "trained elsewhere" in text
    assert "training's estimate" not in text
    assert "Not recorded." in text


def test_long_runs_do_not_make_long_pages() -> None:
    summary, bench, training, lineage = made_run()
    short = len(rendered(summary, bench, training, lineage))
    first = training["steps"]
    training["steps"] = [{**first[i % 600], "step": i} for i in range(30_000)]
    assert len(rendered(summary, bench, training, lineage)) < 2 * short


def test_contradictions_between_files_are_told_before_the_headline() -> None:
    summary, bench, training, lineage = made_run()
    whole = find_contradictions(
        Summary.model_validate(summary), Bench.model_validate(bench), Lineage(**lineage)
    )
    assert whole == []
    summary["results"][0]["speedup"] = 2.5
    summary["results"][1]["acceptance_length"] += 0.4
    summary["results"][2]["identical_to_plain"] = [14, 16]
    lineage["artifacts"][2]["parents"] = {"answers": "another"}
    found = find_contradictions(
        Summary.model_validate(summary), Bench.model_validate(bench), Lineage(**lineage)
    )
    assert len(found) == 4
    text = rendered(summary, bench, training, lineage)
    assert "2 of 16 greedy answers" in text
    assert text.index("Read this before the numbers") < text.index("Workload prompts")


def test_an_arm_without_steps_and_one_prompt_without_interval_are_told_as_such() -> None:
    summary, bench, training, lineage = made_run()
    arm, row = bench["arms"][0], summary["results"][0]
    assert (arm["group"], arm["temperature"]) == (row["prompts"], row["temperature"])
    nothing = {"acceptance_length": None, "ci95": None, "steps": 0, "accepted": 0, "admitted": 0}
    arm.update(nothing, drafted=0, per_slot_acceptance=[0.0] * len(arm["per_slot_acceptance"]))
    for prompt in arm["prompts"]:
        prompt.update(acceptance_length=None, steps=0)
    for other in bench["arms"][1:]:
        if (other["group"], other["temperature"]) == (arm["group"], arm["temperature"]):
            other["group"] = "general"
    row.update(acceptance_length=None, ci95=None)
    bench["arms"][1]["ci95"] = None
    page = Page(rendered(summary, bench, training, lineage))
    assert "every answer ended with its first token" in page.text
    assert "no verify step over 16 prompts" in page.text
    assert "(no interval)" in page.text


def test_results_of_different_drafts_are_refused() -> None:
    summary, bench, training, lineage = made_run()
    summary["block_size"] = 5
    with pytest.raises(ArtifactError, match=r"summary\.json: 5"):
        rendered(summary, bench, training, lineage)


def test_write_report_finds_the_files_of_a_run_folder(tmp_path: Path) -> None:
    names = ("summary.json", "bench/bench.json", "draft/training.json", "lineage.json")
    for name, content in zip(names, made_run(), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == rendered(*made_run())
    assert not list(tmp_path.glob("*.partial"))
    # Work that a changed recipe moved aside is not this run.
    (tmp_path / "bench").rename(tmp_path / "bench.previous-1")
    with pytest.raises(MissingArtifactError, match=r"bench/bench\.json"):
        write_report(tmp_path)


def test_a_folder_without_results_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifactError, match=r"summary\.json"):
        write_report(tmp_path)


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError) as caught:
        rendered(*made_run())
    assert "pip install 'dspark[report]'" in caught.value.fix


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(8.44, "8.4 s"), (59.97, "1 min 00 s"), (192, "3 min 12 s"), (3599.7, "1 h 00 min")],
)
def test_durations_read_like_a_person_says_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_stages_made_by_other_code_or_in_several_attempts_are_named() -> None:
    summary, bench, training, lineage = made_run()
    page = Page(rendered(summary, bench, training, lineage)).text
    told = " ".join(page.split())
    assert "train: made by dspark run recipes/word-problems.yaml output=runs/a" in told
    assert "at commit 3d1fa11+dirty, in 3 attempts" in told
    assert "bench: made by" not in told


def test_tokens_of_a_sample_add_up_and_mean_the_same_on_every_page() -> None:
    summary, bench, training, lineage = made_run()
    kinds = ["bonus", "corrected", "accepted", "accepted", "bonus", "accepted"]
    pieces = [{"text": f"w{i}", "kind": kind} for i, kind in enumerate(kinds)]
    bench["arms"][0]["sample"] = {"prompt": "p", "pieces": pieces}
    text = re.sub(r"\s+", " ", Page(rendered(summary, bench, training, lineage)).text)
    assert "Tokens: 6, of which 3 accepted, 1 corrected, 2 bonus." in text
    assert "Forwards of the target: 4, that of the prompt included." in text
    facts = {
        "version": "0",
        "model": "m",
        "draft": "d",
        "block_size": 4,
        "examples": [],
        "locked": False,
    }
    talk = re.sub(r"\s+", " ", Page(playground(facts)).text)
    for kind, meaning in TOKEN_KINDS.items():
        assert f"{kind} {meaning}" in text
        assert f"{kind} {meaning}" in talk
