"""A target and a draft small enough to differentiate by hand, and records the target really made.

Everything is random but nothing is faked: answers are greedy or sampled by the target itself and
states come out of its own forward, so the self-test and the loss see what they see in a real run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.config.architecture import (
    DraftConfig,
    Flavour,
    K3DraftConfig,
    MarkovHeadType,
    Qwen3DraftConfig,
    RopeParameters,
)
from dspark.config.recipe import LossSection, TrainSection
from dspark.config.target import TargetConfig
from dspark.hidden.record import HiddenRecord
from dspark.model.draft import DSparkDraft
from dspark.model.init import initialise
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget, TargetOutput
from dspark.training.stage import TargetParts

VOCAB = 97
HIDDEN = 32
TAPS = (0, 2)
BLOCK = 4
MASK_ID = 96
DRAFTS: tuple[tuple[MarkovHeadType, Flavour], ...] = (
    ("vanilla", "k3"),
    ("gated", "k3"),
    ("rnn", "k3"),
    ("vanilla", "qwen3"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Import me: these matrices are tiny, and on a busy machine a second thread only waits.

    It also fixes the order of sums, which bit-for-bit comparisons between processes stand on.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_target(seed: int = 0) -> DecoderTarget:
    """Four layers. The head is loud, so that greedy choices are not near ties."""
    config = TargetConfig(
        attention="gqa",
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope_parameters=RopeParameters(rope_theta=10_000.0),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = DecoderTarget(config, TAPS)
        with torch.no_grad():
            target.final_norm.weight.uniform_(0.3, 2.0)
            target.head_weight().normal_(0, 0.8)
    return target.eval().requires_grad_(False)


def made_record(name: str, length: int, seed: int, prompt: int) -> HiddenRecord:
    """States of nobody, the first ``prompt`` tokens unsupervised: for comparing two layouts of one
    draft."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(length, dtype=torch.uint8)
    mask[:prompt] = 0
    return HiddenRecord(
        id=name,
        category="made",
        temperature=0.0,
        layer_ids=TAPS,
        norm_state="post",
        ids=torch.randint(0, 90, (length,), generator=g, dtype=torch.int32),
        loss_mask=mask,
        taps=torch.randn(length, len(TAPS), HIDDEN, generator=g),
        final=torch.randn(length, HIDDEN, generator=g),
        greedy=torch.zeros(length, dtype=torch.int32),
        log_z=torch.zeros(length),
    )


def tiny_config(
    kind: MarkovHeadType = "vanilla", flavour: Flavour = "k3", *, rank: int = 6
) -> DraftConfig:
    shared: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "target_layer_ids": TAPS,
        "target_num_hidden_layers": 4,
        "target_hidden_size": HIDDEN,
        "mask_token_id": MASK_ID,
        "markov_rank": rank,
        "markov_head_type": kind,
        "block_size": BLOCK,
    }
    if flavour == "qwen3":
        return Qwen3DraftConfig(**shared, num_key_value_heads=2, head_dim=6)
    return K3DraftConfig(
        **shared,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
    )


def tiny_draft(
    kind: MarkovHeadType = "vanilla",
    flavour: Flavour = "k3",
    *,
    seed: int = 1,
    target: DecoderTarget | None = None,
) -> DSparkDraft:
    """A draft in which no parameter is at a neutral start, so that every path carries signal."""
    embedding = None if target is None else target.embedding_weight()
    draft = initialise(DSparkDraft(tiny_config(kind, flavour)), embedding, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif "markov" in name or "confidence" in name or name.endswith("bias"):
                parameter.normal_(0, 0.4, generator=generator)
    return draft


@torch.no_grad()
def plain_forward(target: DecoderTarget, ids: list[int]) -> TargetOutput:
    """Whole sequence, alone, no cache."""
    out: TargetOutput = target(torch.tensor([ids]), Span.alone(1, len(ids), target.device))
    return TargetOutput(out.final[0], out.taps[0])


def answer(
    target: DecoderTarget, prompt: list[int], count: int, generator: torch.Generator | None = None
) -> list[int]:
    """``prompt`` and ``count`` tokens of the target: greedy, or sampled with ``generator``."""
    ids = list(prompt)
    for _ in range(count):
        logits = target.logits(plain_forward(target, ids).final[-1])
        if generator is None:
            ids.append(int(logits.argmax()))
        else:
            probs = torch.softmax(logits, -1)
            ids.append(int(torch.multinomial(probs, 1, generator=generator)))
    return ids


@torch.no_grad()
def record_of(
    target: DecoderTarget, ids: list[int], prompt: int, *, name: str, temperature: float = 0.0
) -> HiddenRecord:
    """The record of one sequence in fp32."""
    out = plain_forward(target, ids)
    logits = target.logits(out.final)
    mask = torch.zeros(len(ids), dtype=torch.uint8)
    mask[prompt:] = 1
    return HiddenRecord(
        id=name,
        category="extraction" if temperature == 0 else "writing",
        temperature=temperature,
        layer_ids=target.layer_ids,
        norm_state="post",
        ids=torch.tensor(ids, dtype=torch.int32),
        loss_mask=mask,
        taps=out.taps,
        final=out.final,
        greedy=logits.argmax(-1).int(),
        log_z=torch.logsumexp(logits, -1),
    )


def before_norm(target: DecoderTarget, record: HiddenRecord) -> Tensor:
    """The residual stream after the last layer, taken by a hook on the real target."""
    seen: list[Tensor] = []
    hook = target.layers[-1].register_forward_hook(lambda *args: seen.append(args[-1]))
    ids = record.ids.long().unsqueeze(0)
    target(ids, Span.alone(1, len(record), target.device))
    hook.remove()
    return seen[0][0]


def tiny_records(target: DecoderTarget, count: int, *, seed: int = 0) -> list[HiddenRecord]:
    """Answers of different lengths, alternately greedy and sampled."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for i in range(count):
        size = int(torch.randint(3, 9, (1,), generator=generator))
        prompt = torch.randint(0, VOCAB - 1, (size,), generator=generator).tolist()
        length = int(torch.randint(6, 16, (1,), generator=generator))
        temperature = float(i % 2)
        ids = answer(target, prompt, length, generator if temperature else None)
        records.append(
            record_of(target, ids, size, name=f"record-{i:03d}", temperature=temperature)
        )
    return records


def target_parts(target: DecoderTarget) -> TargetParts:
    return TargetParts(target.head_weight(), target.embedding_weight(), target.norm)


def tiny_section(**changes: object) -> TrainSection:
    """Two epochs over a handful of records in fp32, on the clock of nobody."""
    values: dict[str, object] = {
        "epochs": 2.0,
        "batch_size": 2,
        "num_anchors": 4,
        "learning_rate": 2e-3,
        "precision": "float32",
        "eval_every": 4,
        "checkpoint_every": 3,
        "loss": LossSection(chunk_rows=16),
    }
    return TrainSection.model_validate(values | changes)


def gradients(draft: DSparkDraft) -> dict[str, Tensor]:
    """Gradients of all trainable parameters; a parameter without one is an error."""
    found = {}
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[name] = parameter.grad.clone()
    return found
