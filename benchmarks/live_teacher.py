"""How much of the slower side's own rate a live stream keeps.

    python benchmarks/live_teacher.py --out benchmarks/results/live_teacher.json

Three measurements of the same rows, one after another: the teacher alone (its states are taken and
thrown away), the trainer alone (states in memory), and both together over the real stream, teacher
and trainer being processes with a thread each. Utilisation is the rate of both together over the
lower of the two solo rates. The target has random weights: only its work counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dspark.capture.embedded import replay_group
from dspark.capture.teacher import EmbeddedMaker, teach
from dspark.cli.origin import origin_of
from dspark.config.architecture import K3DraftConfig, RopeParameters
from dspark.config.recipe import TrainSection
from dspark.config.stream import StreamSection
from dspark.config.target import TargetConfig
from dspark.hidden.answers import Answer
from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Row
from dspark.hidden.writer import TeacherLink
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise
from dspark.model.target import DecoderTarget
from dspark.training.batches import BatchPlan
from dspark.training.parallel import Solo
from dspark.training.streamed import Sizes, StreamPlan
from dspark.training.trainer import Trainer

VOCABULARY, HIDDEN, LAYERS, TAPS = 8192, 256, 8, (1, 3, 5)
ROWS, PROMPT, LENGTH = 120, 48, 192


def target_of(layers: int) -> DecoderTarget:
    torch.manual_seed(0)
    config = TargetConfig(
        attention="gqa",
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope_parameters=RopeParameters(),
    )
    return DecoderTarget(config, TAPS).eval().requires_grad_(False)


def draft_of(target: DecoderTarget) -> DSparkDraft:
    config = K3DraftConfig(
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        target_layer_ids=TAPS,
        target_num_hidden_layers=LAYERS,
        target_hidden_size=HIDDEN,
        mask_token_id=5,
        markov_rank=32,
        block_size=7,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    )
    return initialise(DSparkDraft(config), target.embedding_weight(), 0)


def rows() -> list[Row]:
    g = torch.Generator().manual_seed(1)
    return [
        Row(
            f"row-{i:04d}",
            "made",
            0.0,
            tuple(torch.randint(0, VOCABULARY, (LENGTH,), generator=g).tolist()),
            PROMPT,
        )
        for i in range(ROWS)
    ]


def section(anchors: int) -> TrainSection:
    stream = StreamSection(transport="shm", pool_gb=0.5, held_rows=4, warm_rows=4)
    return TrainSection(
        mode="replay",
        order="shuffled",
        precision="float32",
        batch_size=2,
        accumulate=2,
        num_anchors=anchors,
        epochs=1.0,
        eval_every=10_000,
        checkpoint_every=10_000,
        stream=stream,
    )


def serve(endpoint: str, layers: int) -> None:
    torch.set_num_threads(1)
    maker = EmbeddedMaker(target_of(layers), "made", batch_tokens=4096, dtype=torch.bfloat16)
    link = TeacherLink([endpoint], maker.teaching, name="teacher")
    teach(link, maker)
    link.close()


class Timed:
    """Seconds per optimiser step behind the first ones."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, step: int, total: int, row: dict[str, Any]) -> None:
        self.times.append(time.perf_counter())

    def rate(self, per_step: int) -> float:
        """Rows per second, the first five steps and the last (which evaluates) left out."""
        spans = self.times[5:-1]
        return per_step * (len(spans) - 1) / (spans[-1] - spans[0])


def plan_of(own: TrainSection, target: DecoderTarget, folder: Path) -> StreamPlan:
    plan = StreamPlan(rows(), own, 7, Sizes(len(TAPS), HIDDEN, 2), Solo())
    made = EmbeddedMaker(target, "made", batch_tokens=4096, dtype=torch.bfloat16)
    plan.open(plan.settings(f"ipc://{folder}/s", f"bench{os.getpid()}", folder), made.teaching)
    return plan


def teacher_alone(own: TrainSection, target: DecoderTarget, folder: Path) -> float:
    plan, timed = plan_of(own, target, folder), Timed()
    plan.take_held()
    plan.take_warm()
    plan.begin(0, plan.per_epoch)
    for number in range(plan.per_epoch):
        plan.reader.get(number)
        plan.release(number)
        timed(number, 0, {})
    plan.finish()
    return timed.rate(own.batch_size)


def trainer_alone(
    own: TrainSection, target: DecoderTarget, records: list[HiddenRecord], folder: Path
) -> float:
    timed = Timed()
    plan = BatchPlan(
        records[4:],
        batch_size=own.batch_size,
        num_anchors=own.num_anchors,
        block_size=7,
        seed=own.seed,
        by_length=False,
    )
    offline = own.model_copy(update={"mode": "offline"})
    head = target.head_weight()
    Trainer(draft_of(target), head, records[:4], offline, folder, plan=plan).run(timed)
    return timed.rate(own.batch_size * own.accumulate)


def together(own: TrainSection, target: DecoderTarget, folder: Path) -> float:
    plan, timed = plan_of(own, target, folder), Timed()
    held = plan.take_held()
    plan.take_warm()
    trainer = Trainer(draft_of(target), target.head_weight(), held, own, folder, plan=plan)
    trainer.run(timed)
    plan.finish()
    return timed.rate(own.batch_size * own.accumulate)


def measured(anchors: int, layers: int) -> dict[str, float]:
    own, target = section(anchors), target_of(layers)
    answers = [
        Answer(
            id=r.id,
            category="made",
            temperature=0.0,
            prompt_length=PROMPT,
            finish_reason="length",
            ids=r.ids,
        )
        for r in rows()
    ]
    records = replay_group(target, answers[:60], batch_tokens=4096, dtype=torch.bfloat16)
    records = [vars_clone(r) for r in records]
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for what in ("teacher", "trainer", "together"):
            folder = Path(name) / what
            folder.mkdir()
            if what == "trainer":
                rates[what] = trainer_alone(own, target, records, folder)
                continue
            command = [sys.executable, __file__, "--serve", f"ipc://{folder}/s", str(layers)]
            with subprocess.Popen(command) as process:
                run = teacher_alone if what == "teacher" else together
                rates[what] = run(own, target, folder)
                process.wait(30)
    return {**rates, "utilisation": rates["together"] / min(rates["teacher"], rates["trainer"])}


def vars_clone(record: HiddenRecord) -> HiddenRecord:
    """Out of inference mode."""
    fields = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in vars(record).items()}
    return HiddenRecord(**fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("ENDPOINT", "LAYERS"))
    given = parser.parse_args()
    if given.serve:
        serve(given.serve[0], int(given.serve[1]))
        return
    torch.set_num_threads(1)
    cases = {"teacher is slower": measured(16, 16), "trainer is slower": measured(96, 8)}
    result = {
        "what": "rows per second, each side alone and both over the stream",
        "rows": ROWS,
        "tokens_a_row": LENGTH,
        "transport": "shm",
        **origin_of("python benchmarks/live_teacher.py").model_dump(),
        "cases": cases,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
