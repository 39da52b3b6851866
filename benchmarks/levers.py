"""Which training levers pay: same states, same seconds, one recipe key changed at a time.

    python benchmarks/levers.py recipes/quickstart.yaml --seconds 60 --out FILE.json

Needs a run folder whose states are finished (``dspark capture``). Every variant trains from scratch
for the same wall time on this machine and is judged by teacher-forced acceptance length on the same
held-out records. Differences of a few hundredths are noise of a single seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from dspark.checkpoint.target import load_target
from dspark.cli.origin import origin_of
from dspark.cli.stages import STATES
from dspark.config.load import load_recipe
from dspark.config.resolve import draft_config
from dspark.hidden.disk import DiskStore
from dspark.training.stage import TargetParts, train_draft

VARIANTS: dict[str, list[str]] = {
    "recipe": [],
    "no Markov warm start": ["train.warm_start.markov=false"],
    "no ridge start": ["train.warm_start.context=false"],
    "no warm start": ["train.warm_start.markov=false", "train.warm_start.context=false"],
    "no CE-first": ["train.loss.ce_first=0.0"],
    "full draft vocabulary": ["draft.vocabulary_size=null"],
    "one layer": ["draft.num_hidden_layers=1"],
    "three layers": ["draft.num_hidden_layers=3"],
    "latent rank 256": ["draft.kv_lora_rank=256"],
    "batches of 16": ["train.batch_size=16"],
    "learning rate 1e-3": ["train.learning_rate=1e-3"],
    "fp32 products": ["train.precision=float32"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", choices=[*VARIANTS], default=[*VARIANTS])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    base = load_recipe(options.recipe, [])
    target = load_target(base.target)
    store = DiskStore(Path(base.output) / "states" / STATES)
    records = [store.get(i) for i in store.ids()]
    rows: list[dict[str, Any]] = []
    for name in options.only:
        limits = [f"train.max_seconds={options.seconds}", "train.eval_every=100000"]
        recipe = load_recipe(options.recipe, [*VARIANTS[name], *limits])
        config = draft_config(recipe.draft, target.shape)
        model = target.build(config.target_layer_ids)
        parts = TargetParts(model.head_weight().float(), model.embedding_weight(), model.norm)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            trained = train_draft(
                config,
                parts,
                records,
                recipe.train,
                Path(folder),
                vocabulary_size=recipe.draft.vocabulary_size,
            )
        last = trained.history["evals"][-1]
        rows.append(
            {
                "variant": name,
                "overrides": VARIANTS[name],
                "tau": round(last["tau_all"], 3),
                "accept_rate": [round(a, 3) for a in last["accept_rate"]],
                "steps": last["step"],
                "seconds_with_warm_start": round(time.monotonic() - started, 1),
            }
        )
        print(f"{name:<24} tau {last['tau_all']:.3f} after {last['step']} steps", flush=True)
    result = {
        "what": "teacher-forced acceptance length after equal training time",
        "seconds": options.seconds,
        "records": len(records),
        **origin_of(
            f"python benchmarks/levers.py {options.recipe} --seconds {options.seconds:g}"
        ).model_dump(),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
