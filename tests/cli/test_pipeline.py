"""The whole product on a tiny real target, through the real command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import dspark, dspark_each
from dspark.artifacts import verify
from dspark.checkpoint.draft import load_draft

STAGES = ("prompts", "answers", "states", "draft", "bench")


def test_one_command_runs_every_stage_and_reports(tiny_run: Path) -> None:
    summary = json.loads((tiny_run / "summary.json").read_text())
    rows = {(r["prompts"], r["temperature"]): r for r in summary["results"]}
    greedy = rows["workload", 0]
    assert greedy["identical_to_plain"] == [12, 12]
    assert greedy["acceptance_length"] > 2.0, "the draft learnt nothing"
    assert greedy["ci95"][0] <= greedy["acceptance_length"] <= greedy["ci95"][1]
    assert rows["workload", 1]["identical_to_plain"] is None
    made = {kind: verify(tiny_run / kind, kind).made for kind in STAGES}
    assert summary["stages"] == {k: m.model_dump(mode="json") for k, m in made.items() if m}
    for key in ("commit", "machine", "versions", "command"):
        assert summary[key] == summary["stages"]["bench"][key]
    assert summary["machine"]["cores"] >= 1
    assert "run" in summary["command"]
    parts = [m.seconds + m.loading for m in made.values() if m]
    assert summary["seconds_total"] == pytest.approx(sum(parts), abs=0.02)
    page = (tiny_run / "report.html").read_text()
    assert f"{greedy['acceptance_length']:.2f}" in page
    for kind in STAGES:
        verify(tiny_run / kind, kind, deep=True)


def test_checkpoint_names_its_target_and_copies_its_embedding_bit_exactly(
    tiny_run: Path, tiny_target: Path
) -> None:
    from safetensors.torch import load_file

    draft, provenance = load_draft(tiny_run / "draft")
    assert provenance["target"] == provenance["target_path"] == str(tiny_target)
    hashes = ("target_weights_hash", "target_config_hash", "tokenizer_hash", "template_hash")
    assert all(len(provenance[name]) == 64 for name in hashes)
    assert provenance["target_revision"] is None
    assert provenance["norm_state"] == "post"
    embedding = load_file(str(tiny_target / "model.safetensors"))["model.embed_tokens.weight"]
    assert draft.embed_tokens.weight.equal(embedding)
    assert provenance["embedding"]["sha256"] == provenance["target_embedding_sha256"]


def test_rerun_does_nothing_and_an_override_redoes_only_what_depends_on_it(
    tiny_recipe: Path,
) -> None:
    small = ["prompts.sources.0.train=24", "train.epochs=1", "bench.repeats=1"]
    first = dspark("run", str(tiny_recipe), *small)
    assert first.returncode == 0, first.stderr
    again = dspark("run", str(tiny_recipe), *small)
    assert again.stdout.count("finished before") == len(STAGES)
    changed = dspark("run", str(tiny_recipe), *small, "train.learning_rate=1e-3")
    assert changed.returncode == 0, changed.stderr
    assert changed.stdout.count("finished before") == 3  # prompts, answers, states
    root = tiny_recipe.parent / "run"
    assert (root / "draft.previous-1" / "model.safetensors").exists()
    verify(root / "draft", "draft", deep=True)
    told = "".join(changed.stdout.split())
    assert f"{root}/draft.previous-1(changed:train.learning_rate)" in told
    assert f"{root}/bench.previous-1(madeanewsince:draft)" in told


def test_a_verb_alone_names_the_stage_it_needs(tiny_recipe: Path) -> None:
    done = dspark("train", str(tiny_recipe))
    assert done.returncode == 1
    assert "dspark prompts" in done.stderr
    assert not (tiny_recipe.parent / "run" / "draft").exists()


def test_a_verb_refuses_parents_of_other_settings(tiny_run: Path) -> None:
    """Training on states of another recipe, or measuring another draft, would look fine."""
    recipe = str(tiny_run.parent / "tiny.yaml")
    *others, refused = dspark_each(
        ["train", recipe, "capture.dtype=bfloat16"],
        ["bench", recipe, "train.seed=5"],
        ["train", recipe, "draft.mask_token_id=2"],  # eos, with prompts long finished
    )
    for done in others:
        assert done.returncode == 1, done.stdout
        assert "other settings" in done.stderr
    assert refused.returncode == 2, refused.stderr
    assert "draft.mask_token_id" in refused.stderr
    assert (tiny_run / "draft" / "manifest.json").exists()


def test_plan_of_every_stage_runs_nothing(tiny_recipe: Path) -> None:
    verbs = ("run", "prompts", "regenerate", "capture", "train", "bench")
    for done in dspark_each(*([verb, str(tiny_recipe), "--plan"] for verb in verbs)):
        assert done.returncode == 0, done.stderr
        assert "nothing was run" in done.stdout
    assert not (tiny_recipe.parent / "run").exists()


def test_inspect_prints_manifest_parents_and_tensors(tiny_run: Path) -> None:
    draft = str(tiny_run / "draft")
    done, page = dspark_each(["inspect", draft, "--json", "--deep"], ["inspect", draft])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kind"] == "draft"
    assert found["tensors"] == 3 + 1 + 2 + 2 + 2 * 12
    assert [entry["kind"] for entry in found["lineage"]] == [
        "draft",
        "states",
        "answers",
        "prompts",
    ]
    assert found["row_width"] == 48
    assert page.returncode == 0
    assert "lineage" in page.stdout


def test_bench_of_a_checkpoint_finds_its_target(
    tiny_run: Path, tiny_target: Path, tmp_path: Path
) -> None:
    prompts = tiny_run.parent / "prompts.jsonl"
    out = tmp_path / "figures.json"
    done = dspark(
        "bench", str(tiny_run / "draft"), "--prompts", str(prompts), "--out", str(out),
        "bench.prompts_per_category=4", "bench.repeats=1", "bench.max_new_tokens=64",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["results"]
    assert rows[0]["identical_to_plain"] == [4, 4]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in prompts.read_text().splitlines()[:2]))
    # Another target is an explicit choice, and only for a draft folder.
    other = shutil.copytree(tiny_target, tmp_path / "other")
    config = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps({**config, "top_k": 3}))
    small = ("bench.repeats=1", "bench.temperatures=[0.0]", "bench.max_new_tokens=16")
    asked = ("bench", str(tiny_run / "draft"), "--prompts", str(few), *small)
    own, chosen, refused = dspark_each(
        asked,
        [*asked, "--target", str(other)],
        ["bench", str(tiny_run.parent / "tiny.yaml"), "--target", str(other)],
    )
    assert own.returncode == 0, own.stderr
    assert "2 of 2" in own.stdout
    assert chosen.returncode == 0, chosen.stderr
    assert "another config" in chosen.stdout
    assert refused.returncode == 2
    assert "--target" in refused.stderr
    assert rows[0]["acceptance_length"] > 1.5


def test_help_is_instant_and_imports_no_torch() -> None:
    took = []
    for _ in range(3):  # whatever else the machine does only adds
        started = time.monotonic()
        assert dspark("--help").returncode == 0
        took.append(time.monotonic() - started)
    assert min(took) < 1.0
    code = "import sys, dspark.cli.main; print('torch' in sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "False"


def test_a_verb_says_where_its_result_lies_and_what_was_left_out(tiny_recipe: Path) -> None:
    root = tiny_recipe.parent / ("a rather long folder name " * 4) / "[1] run"
    rows = [{"turns": [f"tom has {i} and gets 2 more", "and then?"]} for i in range(1, 4)]
    prompts = tiny_recipe.parent / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    count = len(prompts.read_text().splitlines())
    small = [f"output={root}", f"prompts.sources.0.train={count - 12}", "train.epochs=0.1",
             "bench.prompts_per_category=5", "bench.repeats=1", "bench.temperatures=[0.0]",
             "bench.max_new_tokens=8", "regenerate.max_new_tokens=4", "regenerate.turns=1"]  # fmt: skip
    made, done, again = dspark_each(
        *([verb, str(tiny_recipe), *small] for verb in ("prompts", "run", "train"))
    )
    assert made.returncode == 0, made.stderr
    assert f"{root}/prompts/shards\n" in made.stdout
    assert "later turns, which are not asked" in " ".join(made.stdout.split())
    later = verify(root / "prompts").notes["with_later_turns"]
    assert sum(later.values()) == 3
    assert done.returncode == 0, done.stderr
    assert "7 of sums left out: bench.prompts_per_category is 5" in " ".join(done.stdout.split())
    bench = verify(root / "bench")
    assert bench.counts == {"prompts": 5, "left_out": 7}
    assert bench.notes["left_out"] == {"sums": 7}
    assert f"{root}/report.html\n" in done.stdout
    for name in ("config.json", "model.safetensors", "training.json"):
        assert f"{root}/draft/{name}\n" in again.stdout
