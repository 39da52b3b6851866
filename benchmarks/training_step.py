"""One training step against a plain eager implementation of the same loss.

    python benchmarks/training_step.py --out benchmarks/results/training_step.json

*plain* computes what the paper's formulas say, as one would write them first: full logits of every
block row and of every position of the sequence, softmaxes over the whole vocabulary kept by
autograd, a dense mask. *dspark* is `dspark.training.step:training_step`. Both run the same draft on
the same blocks, in fp32, in turn, each in a process of its own; their losses and gradients must be
equal. Seconds are of the clock and of the CPU, which other programs disturb less. Memory is the
peak of the process above what it held before its first step.

Two shapes: 512 anchors in a sequence, as the contract has it, and short sequences with few anchors,
where the products with lm_head, which both arms must form, are nearly all of the work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dspark.cli.origin import origin_of
from dspark.config.architecture import K3DraftConfig
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise
from dspark.training.anchors import Blocks, attention_mask, build_blocks, sample_anchors
from dspark.training.loss import slot_weights
from dspark.training.step import Vocabulary, block_states, training_step, window_weight

CASES = {
    "contract": {"vocabulary": 49152, "hidden": 576, "batch": 1, "length": 2048, "anchors": 512},
    "few anchors": {"vocabulary": 49152, "hidden": 576, "batch": 2, "length": 512, "anchors": 64},
}
STEPS = {"contract": 2, "few anchors": 5}
COEFFICIENTS, DECAY, BLOCK, LAYERS_TAPPED = (0.1, 0.9, 1.0), 4.0, 7, 5


def draft_of(vocabulary: int, hidden: int) -> DSparkDraft:
    config = K3DraftConfig(
        hidden_size=hidden,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        target_layer_ids=tuple(range(LAYERS_TAPPED)),
        target_num_hidden_layers=30,
        target_hidden_size=hidden,
        mask_token_id=6,
        markov_rank=64,
        block_size=BLOCK,
        q_lora_rank=256,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
    )
    return initialise(DSparkDraft(config), None, 0)


def blocks_of(vocabulary: int, hidden: int, batch: int, length: int, anchors: int) -> Blocks:
    g = torch.Generator().manual_seed(1)
    records, chosen = [], []
    for i in range(batch):
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[length // 4 :] = 1
        records.append(
            HiddenRecord(
                id=str(i),
                category="made",
                temperature=0.0,
                layer_ids=tuple(range(LAYERS_TAPPED)),
                norm_state="post",
                ids=torch.randint(0, vocabulary, (length,), generator=g, dtype=torch.int32),
                loss_mask=mask,
                taps=torch.randn(length, LAYERS_TAPPED, hidden, generator=g),
                final=torch.randn(length, hidden, generator=g),
                greedy=torch.zeros(length, dtype=torch.int32),
                log_z=torch.zeros(length),
            )
        )
        chosen.append(sample_anchors(mask, anchors, g))
    return build_blocks(records, chosen, BLOCK)


def plain_step(draft: DSparkDraft, blocks: Blocks, head: torch.Tensor) -> torch.Tensor:
    """The loss by its formulas (contract, section 4), everything materialised."""
    lengths = torch.full((len(blocks.ids),), blocks.ids.shape[1])
    mask = attention_mask(blocks.anchors, lengths, blocks.ids.shape[1], BLOCK)
    h = block_states(draft, replace(blocks, attention=mask))
    m, e = draft.markov_head.block(blocks.previous, h)
    logits = h @ head.T + draft.markov_head.markov_w2(m)
    target = torch.softmax(blocks.final @ head.T, -1)
    rows = torch.arange(len(blocks.ids)).view(-1, 1, 1)
    p = target[rows, blocks.source]
    log_q = torch.log_softmax(logits, -1)
    ce = F.nll_loss(log_q.flatten(0, 2), blocks.labels.flatten(), reduction="none")
    l1 = (log_q.exp() - p).abs().sum(-1)
    accepted = (1 - l1 / 2).clamp(0, 1).detach()
    confidence = draft.confidence_head(h, e)
    bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    weight = slot_weights(BLOCK, DECAY) * blocks.slot_mask
    total = (
        COEFFICIENTS[0] * ce.view_as(l1) + COEFFICIENTS[1] * l1 + COEFFICIENTS[2] * bce
    ) * weight
    return total.sum() / weight.sum()


def memory(name: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def arm(name: str, shape: dict[str, int], chunk: int, steps: int) -> dict[str, Any]:
    """Time and memory of one arm, in this process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    vocabulary, hidden = shape["vocabulary"], shape["hidden"]
    draft = draft_of(vocabulary, hidden)
    head = torch.randn(vocabulary, hidden, generator=torch.Generator().manual_seed(2)) * 0.05
    blocks = blocks_of(vocabulary, hidden, shape["batch"], shape["length"], shape["anchors"])
    denominator = window_weight([blocks], DECAY)
    known = Vocabulary.of(head, None, torch.float32)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    times, work, loss = [], [], torch.zeros(())
    for _ in range(steps):
        draft.zero_grad(set_to_none=True)
        began, spent = time.perf_counter(), time.process_time()
        if name == "plain":
            loss = plain_step(draft, blocks, head)
        else:
            out = training_step(
                draft,
                blocks,
                known,
                coefficients=COEFFICIENTS,
                decay=DECAY,
                denominator=denominator,
                chunk=chunk,
            )
            loss = torch.stack(list(out.terms.values())).sum()
        loss.backward()
        times.append(time.perf_counter() - began)
        work.append(time.process_time() - spent)
    peak = memory("VmHWM")
    grads = [p.grad for p in draft.parameters() if p.grad is not None]
    norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
    return {
        "seconds": statistics.median(times[1:]),
        "cpu_seconds": statistics.median(work[1:]),
        "peak_bytes": peak - before,
        "loss": float(loss.detach()),
        "grad_norm": float(norm),
        "rows": int(blocks.slot_mask.sum()),
    }


def case(shape: dict[str, int], chunk: int, steps: int, rounds: int) -> dict[str, Any]:
    """Both arms in turn, each in a process of its own."""
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "dspark": []}
    own = [f"--{name}={value}" for name, value in shape.items()]
    own += [f"--chunk={chunk}", f"--steps={steps}"]
    for _ in range(rounds):
        for name, rows in found.items():
            done = subprocess.run(
                [sys.executable, __file__, *own, "--arm", name],
                check=True,
                capture_output=True,
                text=True,
            )
            rows.append(json.loads(done.stdout))
    arms = {
        n: {k: statistics.median(r[k] for r in rows) for k in rows[0]} for n, rows in found.items()
    }
    for key in ("loss", "grad_norm"):
        assert abs(arms["plain"][key] - arms["dspark"][key]) < 1e-4 * abs(arms["plain"][key]), key
    return {
        "shape": shape,
        "steps": steps - 1,
        "arms": arms,
        "rounds": found,
        "times_faster": arms["plain"]["seconds"] / arms["dspark"]["seconds"],
        "times_faster_in_cpu_seconds": arms["plain"]["cpu_seconds"] / arms["dspark"]["cpu_seconds"],
        "memory_share": arms["dspark"]["peak_bytes"] / arms["plain"]["peak_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", choices=["plain", "dspark"])
    for name, value in CASES["contract"].items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--steps", type=int, help="of every arm; the first is not timed")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    if given.arm:
        shape = {name: getattr(given, name) for name in CASES["contract"]}
        print(json.dumps(arm(given.arm, shape, given.chunk, given.steps)))
        return
    steps = {n: given.steps or STEPS[n] for n in CASES}
    cases = {n: case(s, given.chunk, steps[n], given.rounds) for n, s in CASES.items()}
    result = {
        "what": "one training step, forward and backward",
        "chunk_rows": given.chunk,
        "dtype": "float32",
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
        **origin_of("python benchmarks/training_step.py").model_dump(),
        "cases": cases,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
