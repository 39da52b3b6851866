"""Session fixtures: a tiny trained target, and one whole run of the product on it.

Making both takes about a minute; they are cached under pytest's cache folder by the content of the
files that decide them, so a second run of the suite starts at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: no test downloads

import pytest
import torch
from filelock import FileLock

import tiny_model

if TYPE_CHECKING:
    from engine.pairs import Pair
    from server.serving import Served

HERE = Path(__file__).parent
# Tensors are tiny here: a second thread costs more than it brings, and far more on a busy machine.
torch.set_num_threads(1)
RECIPE = """\
name: tiny
output: {output}
target: {{source: {target}, max_context: 256}}
prompts:
  workload: [sums]
  max_prompt_tokens: 64
  sources: [{{kind: file, path: {prompts}, category: sums, train: 160, held_out: 12}}]
regenerate: {{max_new_tokens: 64, batch_size: 32}}
capture: {{batch_tokens: 1024, dtype: float32}}
draft:
  num_hidden_layers: 2
  intermediate_size: 192
  q_lora_rank: 48
  kv_lora_rank: 32
  qk_nope_head_dim: 16
  qk_rope_head_dim: 16
  v_head_dim: 16
  mask_token_id: 4
  markov_rank: 24
  target_layer_ids: [0, 1, 2]
train:
  epochs: 12
  batch_size: 4
  num_anchors: 24
  learning_rate: 4e-3
  precision: float32
  loss: {{ce_first: 0.3}}
  warm_start: {{markov: true}}
  eval_every: 100
  checkpoint_every: 20
bench: {{max_new_tokens: 64, speed_prompts: 2, repeats: 2}}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test has half an hour unless it says otherwise; the 300 s of all others end it on a
    machine that does something else."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))


def environment() -> dict[str, str]:
    """Subprocesses use one thread: two on a busy machine are many times slower."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def dspark(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "dspark", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(),
        **options,
    )


EACH = """
import contextlib, io, json, sys, traceback
from dspark.cli.main import entry
told = []
for words in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            entry(words)
        except SystemExit as left:
            code = left.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    told.append([words, code, out.getvalue(), err.getvalue()])
print(json.dumps([told, [name for name in ("torch", "transformers") if name in sys.modules]]))
"""


def dspark_each(
    *commands: Sequence[str], light: bool = False
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands one after the other in a single process: heavy imports, most of what a refusal
    takes, are paid once. With ``light``, none of the commands may import them."""
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(commands)],
        capture_output=True, text=True, timeout=280, env=environment(), check=True,
    )  # fmt: skip
    told, heavy = json.loads(done.stdout)
    assert len(told) == len(commands)
    assert not (light and heavy), "a refusal should not wait for imports"
    return [subprocess.CompletedProcess(*each) for each in told]


def write_prompts(path: Path, count: int = 400) -> Path:
    """Distinct sums as a prompt file."""
    rng = random.Random(7)
    seen = dict.fromkeys(tiny_model.question(rng)[0] for _ in range(20 * count))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in list(seen)[:count]))
    return path


def write_recipe(folder: Path, target: Path) -> Path:
    """A recipe of a run on the tiny target in ``folder``, with its prompts."""
    prompts = write_prompts(folder / "prompts.jsonl")
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE.format(output=folder / "run", target=target, prompts=prompts))
    return recipe


@pytest.fixture(scope="session")
def tiny_target(request: pytest.FixtureRequest) -> Path:
    """Folder of the tiny target (transformers format)."""
    key = hashlib.sha256((HERE / "tiny_model.py").read_bytes()).hexdigest()[:12]
    folder = Path(request.config.cache.mkdir("tiny")) / f"target-{key}"
    # Several test processes share the cache: one makes the target, the others wait for it.
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run(
                [sys.executable, str(HERE / "tiny_model.py"), str(folder)],
                check=True,
                capture_output=True,
                timeout=280,
                env=environment(),
            )
            (folder / "done").touch()
    return folder


@pytest.fixture
def tiny_recipe(tiny_target: Path, tmp_path: Path) -> Path:
    """A recipe file on the tiny target that writes below ``tmp_path``."""
    return write_recipe(tmp_path, tiny_target)


@pytest.fixture(scope="session")
def tiny_run(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run of every stage: prompts, answers, states, draft, bench, report."""
    root = tmp_path_factory.mktemp("tiny")
    recipe = write_recipe(root, tiny_target)
    done = dspark("run", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "run"


@pytest.fixture(scope="session")
def pair(tiny_run: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The tiny target with its draft, as engines of every kind."""
    from engine.pairs import Pair

    return Pair.of(tiny_run, tiny_target, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def made_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and a draft that need no training (see ``server.made_pair``)."""
    from server.made_pair import make

    return make(tmp_path_factory.mktemp("made-pair"))


@pytest.fixture(scope="session")
def served(made_pair: tuple[Path, Path]) -> Iterator[Served]:
    """One server around the made pair, for all tests that leave it as they find it."""
    from server.serving import make_engine, serving

    with serving(make_engine(made_pair)) as running:
        yield running
