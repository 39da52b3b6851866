"""The memory model against the peak of real processes, at three sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dspark.config.architecture import K3DraftConfig
from dspark.config.recipe import LossSection, TrainSection
from dspark.training.memory import Load, activation_bytes, rank_memory, total

SIZES = {
    "wide vocabulary": {
        "vocab": 49_152,
        "hidden": 256,
        "mlp": 512,
        "layers": 1,
        "batch": 2,
        "length": 256,
        "anchors": 32,
        "chunk": 256,
    },
    "deep": {
        "vocab": 2048,
        "hidden": 512,
        "mlp": 2048,
        "layers": 6,
        "batch": 2,
        "length": 256,
        "anchors": 64,
        "chunk": 512,
    },
    "long": {
        "vocab": 4096,
        "hidden": 384,
        "mlp": 768,
        "layers": 2,
        "batch": 1,
        "length": 2048,
        "anchors": 96,
        "chunk": 256,
    },
}

PROGRAM = """
import json, sys
import torch
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise
from dspark.training.anchors import build_blocks, sample_anchors
from dspark.training.optim import build_optimizer
from dspark.training.step import Vocabulary
from dspark.training.stepmodule import StepModule
from test_memory_model import config_of, section_of, made_records
torch.set_num_threads(1)
size = json.loads(sys.argv[1])
config, section = config_of(size), section_of(size)
# Everything a first step brings besides its tensors (code, workspaces) is there before measuring.
warm = {**size, "vocab": 64, "hidden": 32, "mlp": 32, "length": 16, "anchors": 2, "layers": 1}
def run(size):
    config, section = config_of(size), section_of(size)
    draft = initialise(DSparkDraft(config), None, 0)
    head = torch.randn(size["vocab"], size["hidden"])
    step = StepModule(draft, Vocabulary.of(head, None, torch.float32), section)
    optimizer = build_optimizer(draft, section)
    for _ in range(3):
        records = made_records(size)
        g = torch.Generator().manual_seed(0)
        anchors = [sample_anchors(r.loss_mask, size["anchors"], g) for r in records]
        out = step.run(build_blocks(records, anchors, config.block_size), (0.1, 0.9, 1.0), 100.0)
        torch.stack(list(out.terms.values())).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
run(warm)
def status(name):
    line = next(l for l in open("/proc/self/status") if l.startswith(name))
    return int(line.split()[1]) * 1024
before = status("VmRSS")
# Not ru_maxrss, which begins at what the parent held when it started this process.
open("/proc/self/clear_refs", "w").write("5")
run(size)
print(status("VmHWM") - before)
"""


def config_of(size: dict[str, int]) -> K3DraftConfig:
    return K3DraftConfig(
        hidden_size=size["hidden"],
        intermediate_size=size["mlp"],
        num_hidden_layers=size["layers"],
        num_attention_heads=4,
        vocab_size=size["vocab"],
        max_position_embeddings=4096,
        target_layer_ids=(0, 1, 2),
        target_num_hidden_layers=8,
        target_hidden_size=size["hidden"],
        mask_token_id=5,
        markov_rank=32,
        block_size=7,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    )


def section_of(size: dict[str, int]) -> TrainSection:
    return TrainSection(
        precision="float32",
        batch_size=size["batch"],
        num_anchors=size["anchors"],
        loss=LossSection(chunk_rows=size["chunk"]),
    )


def made_records(size: dict[str, int]) -> list[object]:
    import torch

    from dspark.hidden.record import HiddenRecord

    g = torch.Generator().manual_seed(3)
    length, hidden = size["length"], size["hidden"]
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[length // 8 :] = 1
    return [
        HiddenRecord(
            id=str(i),
            category="made",
            temperature=0.0,
            layer_ids=(0, 1, 2),
            norm_state="post",
            ids=torch.randint(0, size["vocab"], (length,), generator=g, dtype=torch.int32),
            loss_mask=mask,
            taps=torch.randn(length, 3, hidden, generator=g),
            final=torch.randn(length, hidden, generator=g),
            greedy=torch.zeros(length, dtype=torch.int32),
            log_z=torch.zeros(length),
        )
        for i in range(size["batch"])
    ]


def load_of(size: dict[str, int]) -> Load:
    return Load(size["batch"], size["length"], size["anchors"], None, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_the_model_is_within_a_tenth_of_the_measured_peak(name: str) -> None:
    size = SIZES[name]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(size)],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            # Freed blocks go back to the system, so that the peak is of what is alive.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
        },
    )
    measured = int(done.stdout)
    parts = rank_memory(config_of(size), section_of(size), load_of(size))
    # Records are there beside the micro-batch that was padded from them.
    held = size["batch"] * size["length"] * 4 * size["hidden"] * 4
    told = total(parts) + held
    assert abs(told - measured) < 0.1 * measured, (told / measured, parts)


def test_recomputing_keeps_a_layer_s_input_instead_of_its_inside() -> None:
    size = SIZES["deep"]
    kept, one, _ = activation_bytes(config_of(size), section_of(size), load_of(size))
    section = section_of(size).model_copy(update={"checkpoint_activations": True})
    again, same, _ = activation_bytes(config_of(size), section, load_of(size))
    assert one == same
    rows = size["batch"] * size["anchors"] * 7 * size["hidden"] * 4
    assert kept - again == size["layers"] * one
    assert one > 5 * rows
