"""What a plan promises holds: no stage needs more, and a plan runs and downloads nothing."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from conftest import dspark
from dspark.artifacts import Kind, read_manifest
from dspark.artifacts.record import StageRecord, write_record
from dspark.checkpoint.published import read_config
from dspark.checkpoint.sizes import read_sizes
from dspark.checkpoint.source import find_target
from dspark.checkpoint.target import load_target
from dspark.cli.bounds import REPORT, BenchLoad, Need, draft_sizes
from dspark.cli.console import Screen
from dspark.cli.context import RunContext
from dspark.cli.figures import shown_bytes, shown_time
from dspark.cli.plan import plan_of, plan_table, print_plan
from dspark.cli.plan_state import standings
from dspark.config.load import load_recipe
from dspark.config.recipe import BenchSection, TargetSection
from dspark.errors import ConfigError, DSparkError, TargetError

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def planned(recipe: Path, *overrides: str) -> RunContext:
    return RunContext(load_recipe(recipe, overrides), "", Screen(Console(quiet=True)))


def test_no_stage_of_a_real_run_is_larger_than_planned(tiny_run: Path) -> None:
    needs = plan_of(planned(tiny_run.parent / "tiny.yaml"))
    for kind, need in needs.items():
        files = {p: p.stat().st_size for p in (tiny_run / kind).rglob("*") if p.is_file()}
        assert sum(files.values()) <= need.disk, kind
    # A bound that is true because it is huge would be of no use. Answers are capped at 64 tokens
    # and prompts at 64, of which they use a third.
    states = sum(p.stat().st_size for p in (tiny_run / "states").rglob("*") if p.is_file())
    assert needs["states"].disk < 4 * states
    prompts = sum(p.stat().st_size for p in (tiny_run / "prompts" / "shards").iterdir())
    assert prompts <= needs["prompts"].working < 1.5 * prompts + REPORT


def test_prompts_are_measured_not_guessed() -> None:
    """Order tickets carry three worked examples: over a thousand bytes each."""
    need = plan_of(planned(QUICKSTART))["prompts"]
    assert need.working > 529 * 1000


def test_memory_names_caches_records_and_weights(tiny_run: Path) -> None:
    recipe = tiny_run.parent / "tiny.yaml"
    base = plan_of(planned(recipe))
    assert all(need.memory > 0 for need in base.values())
    wider = plan_of(planned(recipe, "regenerate.batch_size=160"))
    row = 4 * (32 + 16) * 4  # layers, latent row, fp32
    more = wider["answers"].memory - base["answers"].memory
    assert more >= 2 * 128 * 128 * row, "the cache of 128 more sequences of 128 tokens, twice"
    more_records = plan_of(planned(recipe, "capture.dtype=bfloat16"))
    assert base["draft"].memory > more_records["draft"].memory


def test_sizes_from_the_config_are_those_of_the_loaded_target(tiny_target: Path) -> None:
    section = TargetSection(source=str(tiny_target), max_context=256)
    sizes = read_sizes(section, find_target(section.source))
    target = load_target(section)
    assert sizes.shape == target.shape
    built = target.build(())
    cache = built.new_cache(1, 5)
    held = sum(part.numel() * part.element_size() for parts in cache.layers for part in parts)
    assert sizes.row_bytes * 5 == held
    assert sizes.own_decoder


def test_parameters_of_an_adapter_target_are_counted_without_weights(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    section = TargetSection(source=str(tmp_path), max_context=64)
    sizes = read_sizes(section, find_target(section.source))
    assert not sizes.own_decoder
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.row_bytes == 2 * 2 * 32 * 4


def test_draft_sizes_are_those_of_the_checkpoint(tiny_run: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(str(tiny_run / "draft" / "model.safetensors"))
    sizes = draft_sizes(read_config(tiny_run / "draft")[0])
    assert sizes.tensors == len(tensors)
    assert sizes.parameters == sum(t.numel() for t in tensors.values())
    assert sizes.trainable == sizes.parameters - tensors["embed_tokens.weight"].numel()


def test_an_unknown_target_or_no_network_is_one_of_our_errors(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = tiny_run.parent / "tiny.yaml"
    done = dspark("run", str(recipe), "--plan", "target.source=nobody/nothing")
    assert done.returncode == 1
    assert "offline mode is on" in done.stderr
    assert "local folder" in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(TargetError, match="no-such-family"):
        plan_of(planned(recipe, f"target.source={tmp_path}"))
    with pytest.raises(DSparkError, match=r"max_context"):
        plan_of(planned(recipe, "target.max_context=4096"))


def test_the_revision_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[tuple[str, str, list[str]]] = []

    def snapshot_download(name: str, *, revision: str, allow_patterns: list[str], **_: object):
        asked.append((name, revision, allow_patterns))
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    section = TargetSection(source="some/model", revision="abc123")
    with pytest.raises(TargetError, match="no network"):
        read_sizes(section, find_target(section.source, section.revision))
    assert asked == [("some/model", "abc123", ["config.json"])]


def test_a_bench_of_a_draft_plans_its_decodings(tiny_run: Path) -> None:
    prompts = tiny_run.parent / "prompts.jsonl"
    count = len(prompts.read_text().splitlines())
    done = dspark(
        "bench", str(tiny_run / "draft"), "--prompts", str(prompts), "--plan",
        "bench.prompts_per_category=5", "bench.repeats=3", "bench.speed_prompts=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing was run" in " ".join(done.stdout.split())  # the folder's name wraps the title
    cells = [cell.strip() for line in done.stdout.splitlines() for cell in line.split("│")]
    assert {"5", str(count - 5), "18"} <= set(cells)  # 2 temperatures x (5 + 2 x 2)


def test_decodings_count_what_a_bench_does() -> None:
    section = BenchSection(temperatures=(0.0, 1.0), speed_prompts=4, repeats=5)
    load = BenchLoad(prompts=10, categories=3, groups=2, tokens=10, fixed=0)
    assert load.decodings(section) == 2 * (10 + 4 * 8)
    few = BenchLoad(prompts=3, categories=2, groups=2, tokens=10, fixed=0)
    assert few.decodings(section) == 2 * (3 + 4 * 3)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (2e15, "2.0 PB"),
        (2e21, "2000.0 EB"),
        (3e9, "3.0 GB"),
    ],
)
def test_bytes_are_shown_with_a_unit(value: float, shown: str) -> None:
    assert shown_bytes(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 s"), (90, "1.5 min"), (7200, "2.0 h"), (86400 * 9, "9.0 days"),
     (28527539 * 60, "54.2 years"), (1e15, "31,688,087.8 years")],
)  # fmt: skip
def test_times_are_shown_with_a_unit(seconds: float, shown: str) -> None:
    assert shown_time(seconds) == shown


@pytest.mark.parametrize("columns", [80, 50])
def test_a_plan_never_cuts_a_number(columns: int) -> None:
    """Prompts and times of a large run, at the width of a terminal and far below it."""
    need = Need(14_336_000, 987 * 10**15, 1234 * 10**12, 25 * 10**13, 28527539 * 60)
    kinds: tuple[Kind, ...] = ("prompts", "answers", "states", "draft", "bench")
    table = plan_table("large", dict.fromkeys(kinds, need), dict.fromkeys(kinds, "resume"))
    text = io.StringIO()
    Console(file=text, width=columns).print(table)
    page = text.getvalue()
    assert "…" not in page
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in page.splitlines()]
    cells = [
        "".join(column) for column in zip(*[row for row in rows if len(row) == 7], strict=True)
    ]
    assert cells[1].count("14,336,000") == 5
    assert cells[5].replace(" ", "").count("54.2years") == 5
    if columns == 80:
        assert page.count("14,336,000") == page.count("54.2 years") == 5


def marked(run: RunContext) -> dict[Kind, str]:
    return {kind: stand.state for kind, stand in standings(run).items()}


def test_a_plan_says_what_is_finished_resumed_or_made_anew(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, copy = tiny_run.parent / "tiny.yaml", tmp_path / "run"
    assert set(marked(planned(recipe)).values()) == {"done"}
    shutil.copytree(tiny_run, copy)
    here = f"output={copy}"
    before = sorted(path for path in copy.rglob("*"))
    changed = planned(recipe, here, "train.learning_rate=1e-3")
    found = standings(changed)
    assert marked(changed) == {
        "prompts": "done", "answers": "done", "states": "done", "draft": "anew", "bench": "anew",
    }  # fmt: skip
    assert found["draft"].why.startswith("changed: train.learning_rate; ")
    assert "draft.previous-N" in found["draft"].why
    assert found["bench"].why.startswith("draft first; ")
    (copy / "draft" / "manifest.json").unlink()
    manifest = read_manifest(tiny_run / "draft")
    record = StageRecord(fingerprint=manifest.fingerprint, config=manifest.config)
    write_record(copy / "draft", record)
    shutil.rmtree(copy / "bench")
    states = marked(planned(recipe, here))
    assert (states["draft"], states["bench"]) == ("resume", "new")
    print_plan(RunContext(load_recipe(recipe, [here]), ""), None)
    page = " ".join(capsys.readouterr().out.split())
    assert "draft interrupted, goes on where it was" in page
    assert "states finished, skipped" in page
    assert f"Writes {copy}/prompts" in page
    (copy / "draft" / "stage.json").unlink()
    shutil.copytree(tiny_run / "bench", copy / "bench")
    (copy / "draft" / "manifest.json").write_text((tiny_run / "draft/manifest.json").read_text())
    assert sorted(path for path in copy.rglob("*")) == before, "a plan changes nothing"


def test_a_plan_without_the_target_at_hand_says_that_it_cannot_compare(tiny_run: Path) -> None:
    found = standings(planned(tiny_run.parent / "tiny.yaml", "target.source=nobody/nothing"))
    assert {stand.state for stand in found.values()} == {"?"}
    assert "target" in found["prompts"].why


@pytest.mark.parametrize(("mask", "found"), [(20, "an ordinary token"), (2, "the target's eos")])
def test_a_plan_refuses_the_mask_token_that_the_run_would(
    tiny_recipe: Path, mask: int, found: str
) -> None:
    with pytest.raises(ConfigError, match=found) as refused:
        plan_of(planned(tiny_recipe, f"draft.mask_token_id={mask}"))
    assert refused.value.where == "draft.mask_token_id"


def test_a_plan_without_the_tokenizer_says_that_it_assumes_the_mask_token(
    tiny_recipe: Path, tiny_target: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_target, bare, ignore=shutil.ignore_patterns("*token*", "*vocab*"))
    run = planned(tiny_recipe, f"target.source={bare}", "draft.mask_token_id=20")
    run.screen.console = Console(file=io.StringIO())
    assert plan_of(run)
    assert "draft.mask_token_id is a reserved id" in run.screen.console.file.getvalue()
