"""What smaller states on the wire do to a draft: fp32, bf16, and bf16 with fp8 taps.

    python benchmarks/transport_taps.py recipes/quickstart.yaml \
        --out benchmarks/results/transport_taps.json

Needs the recipe's run folder with finished answers. The target replays them once, keeping fp32
states. Every arm trains the recipe's draft on the same rows in the same order for the same number
of steps, from states as that arm would have received them; held-out rows keep their fp32 states,
because that is what a served draft reads. ``--seeds 2`` shows how large chance is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.capture.embedded import replay_group
from dspark.checkpoint.target import load_target
from dspark.cli.origin import origin_of
from dspark.config.load import load_recipe
from dspark.config.resolve import draft_config
from dspark.hidden.answers import answer_files, stream_answers
from dspark.hidden.codec import decode, encode
from dspark.hidden.record import HiddenRecord
from dspark.training.batches import split_validation
from dspark.training.stage import TargetParts, train_draft


def as_bf16(record: HiddenRecord) -> HiddenRecord:
    return replace(record, taps=record.taps.bfloat16(), final=record.final.bfloat16())


def as_fp8(record: HiddenRecord) -> HiddenRecord:
    """Through the real wire format, there and back."""
    return decode([bytes(part) for part in encode(as_bf16(record), "fp8")], record.id)


ARMS: dict[str, Callable[[HiddenRecord], HiddenRecord]] = {
    "float32": lambda record: record,
    "bfloat16": as_bf16,
    "bfloat16, taps fp8": as_fp8,
}


def captured(answers: Path, count: int, target: Any, layers: tuple[int, ...]) -> list[HiddenRecord]:
    """fp32 states of the first ``count`` answers."""
    files = answer_files(answers) or [answers / "answers.jsonl"]
    found = [answer for file in files for answer in stream_answers(file)][:count]
    model = target.build(layers, "bfloat16")
    records = []
    for start in range(0, len(found), 32):
        part = found[start : start + 32]
        records += replay_group(model, part, batch_tokens=4096, dtype=torch.float32)
    names = ("ids", "loss_mask", "taps", "final", "greedy", "log_z")
    return [replace(r, **{n: getattr(r, n).clone() for n in names}) for r in records]


def moved(fitted: list[HiddenRecord], arm: Callable[[HiddenRecord], HiddenRecord]) -> float:
    """Relative change of the taps, by norm."""
    change = norm = 0.0
    for record in fitted[:16]:
        change += float((arm(record).taps.float() - record.taps).square().sum())
        norm += float(record.taps.square().sum())
    return float((change / norm) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--answers", type=int, default=96)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--run", type=Path, help="run folder, when not the recipe's")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    # Without the ridge start, so that the states act through training alone.
    limits = [f"train.epochs={given.epochs}", "train.max_seconds=null", "train.eval_every=100000"]
    limits += ["train.warm_start.context=false"]
    recipe = load_recipe(given.recipe, limits)
    target = load_target(recipe.target)
    config = draft_config(recipe.draft, target.shape)
    run = given.run or Path(recipe.output)
    records = captured(run / "answers", given.answers, target, config.target_layer_ids)
    fitted, judged = split_validation(records)
    model = target.build(config.target_layer_ids)
    parts = TargetParts(model.head_weight().float(), model.embedding_weight(), model.norm)
    rows: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        for name, arm in ARMS.items():
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                trained = train_draft(
                    config,
                    parts,
                    [*map(arm, fitted), *judged],
                    recipe.train.model_copy(update={"seed": seed}),
                    Path(folder),
                    vocabulary_size=recipe.draft.vocabulary_size,
                )
            last = trained.history["evals"][-1]
            row = {"states": name, "seed": seed, "steps": last["step"]}
            row |= {key: round(last[key], 4) for key in ("ce", "l1", "tau_all")}
            row |= {"taps_moved": round(moved(fitted, arm), 5)}
            rows.append(row | {"seconds": round(time.monotonic() - began, 1)})
            print(row, flush=True)
    result = {
        "what": "held-out losses and acceptance length after the same steps",
        "answers": len(records),
        "tokens": sum(len(r) for r in records),
        **origin_of(f"python benchmarks/transport_taps.py {given.recipe}").model_dump(),
        "rows": rows,
    }
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
