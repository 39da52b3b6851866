"""The run that ``test_trainer_killed`` starts, kills and resumes; ``python killed_run.py`` is it."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_draft, tiny_records, tiny_section, tiny_target

from dspark.training.trainer import Trainer

CHECKPOINT_EVERY = 3


def run(folder: Path, seed: int, on_step: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Train (or resume) in ``folder``: the hash of the weights and the history without times.

    ``seed`` sets torch's global generator, on which nothing may depend.
    """
    torch.set_num_threads(1)
    target = tiny_target()
    records = tiny_records(target, 8)
    torch.manual_seed(seed)
    draft = tiny_draft(target=target)
    section = tiny_section(epochs=8.0, accumulate=2, checkpoint_every=CHECKPOINT_EVERY)
    trainer = Trainer(draft, target.head_weight(), records, section, folder)
    history = trainer.run(lambda step, total, row: on_step(step))
    digest = hashlib.sha256()
    for name, value in sorted(draft.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    rows = {
        name: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
        for name, rows in history.items()
    }
    return {"weights": digest.hexdigest(), "history": json.loads(json.dumps(rows))}


def stand_still(at: int) -> Callable[[int], None]:
    """Say every step, and wait behind step ``at`` for the end."""

    def on_step(step: int) -> None:
        print(step, flush=True)
        while step == at:
            time.sleep(0.01)

    return on_step


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[3]), stand_still(int(sys.argv[2])))
