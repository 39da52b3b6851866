"""A draft of the qwen3 flavour for SmolLM2-135M, trained here by the quickstart's own recipe.

``DSPARK_SMOLLM2_RUN`` names the folder of a longer run with such a draft; without it a short one is
made once and kept: fewer prompts, and a minute and a half of training.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from filelock import FileLock

from conftest import dspark

VARIABLE = "DSPARK_SMOLLM2_RUN"
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
FLAVOUR = (
    "draft.flavour=qwen3",
    "draft.qk_nope_head_dim=64",  # the usual size again: it is not of this flavour
    "train.warm_start.context=false",  # needs latent rows
)
SHORT = (
    "prompts.sources=[{kind: order_tickets, category: extraction, train: 96, held_out: 4}]",
    "train.max_seconds=90",
)


def trained_smollm2(cache: Path) -> Path:
    """The run's folder, with a finished ``draft`` in it."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    key = hashlib.sha256(Path(__file__).read_bytes() + RECIPE.read_bytes()).hexdigest()[:12]
    run = cache / f"smollm2-{key}"
    with FileLock(f"{run}.lock"):
        if not (run / "done").exists():
            shutil.rmtree(run, ignore_errors=True)
            for verb in ("prompts", "regenerate", "capture", "train"):
                done = dspark(verb, str(RECIPE), f"output={run}", *FLAVOUR, *SHORT)
                assert done.returncode == 0, done.stdout + done.stderr
            (run / "done").touch()
    return run
