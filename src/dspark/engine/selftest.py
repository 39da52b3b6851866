"""Is what this engine emits the target's own distribution? Statistics on the engine as it stands.

A tiny random target (5 tokens, MLA or a hybrid with KDA) and a draft that knows nothing of it run
in the real engine: pages, batches, prefix hits, rules, truncation, the Markov loop. Texts of five
tokens, whose last four come from one drafted block, are counted over many requests and compared
with their exact probabilities, which one forward over all prefixes gives. A draft that is often
wrong is the hard case: every rejection shows. Enumeration (``dspark.decoding.enumeration``) proves
the rules to rounding; this proves that the engine feeds them what they are proved for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from dspark.config.architecture import K3DraftConfig, RopeParameters
from dspark.config.engine import EngineOptions
from dspark.config.hybrid import LinearConfig
from dspark.config.target import TargetConfig
from dspark.decoding.cost import CostTable, Curve
from dspark.decoding.params import SamplingParams, SchedulerName
from dspark.decoding.processors import LogitRules
from dspark.decoding.sampling import STREAMS, RandomStreams, target_probabilities
from dspark.engine.core import EngineCore
from dspark.engine.drafter import Drafter
from dspark.model.draft import DSparkDraft
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget

VOCAB, BLOCK, LENGTH = 5, 3, 5
END = 0
PROMPT = [1, 3, 2, 2, 4, 1, 3, 1]  # two whole pages of four rows: every hit copies on write
BATCH = 512
Joint = dict[tuple[int, ...], float]

SETTINGS: Mapping[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.3, "min_p": 0.15},
    "penalties and bias": {
        "temperature": 1.0,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {1: 0.8, 4: -0.6},
    },
    "minimum length": {"temperature": 1.0, "min_new_tokens": 3},
}


@dataclass(frozen=True)
class Case:
    """One verification mode under one sampling setting."""

    verification: Literal["standard", "block"]
    draft: Literal["probabilistic", "greedy"]
    setting: str
    truncate: bool = True
    scheduler: SchedulerName = "fixed"
    hybrid: bool = False

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=LENGTH, **SETTINGS[self.setting])

    @property
    def name(self) -> str:
        tail = "" if self.truncate else ", open draft"
        tail += "" if self.scheduler == "fixed" else f", {self.scheduler}"
        tail += ", hybrid" if self.hybrid else ""
        return f"{self.verification}/{self.draft}, {self.setting}{tail}"


@dataclass(frozen=True)
class CaseResult:
    """``p_value`` of the chi-square test over ``cells`` cells, before Bonferroni's correction."""

    case: Case
    samples: int
    statistic: float
    cells: int
    p_value: float
    acceptance_length: float


def all_cases() -> list[Case]:
    """Every supported mode under every setting; truncated and open drafts where they differ; every
    scheduler with every mode; a hybrid target with every mode."""
    modes: list[tuple[Any, Any]] = [
        ("standard", "probabilistic"),
        ("standard", "greedy"),
        ("block", "probabilistic"),
    ]
    cases = [Case(v, d, setting) for v, d in modes for setting in SETTINGS]
    cases += [
        Case(v, d, setting, truncate=False)
        for v, d in modes
        if d == "probabilistic"
        for setting in ("top_k", "min_p")
    ]
    schedulers: list[SchedulerName] = ["threshold", "sync", "async"]
    cases += [
        Case(v, d, "temperature 1", scheduler=scheduler)
        for v, d in modes
        for scheduler in schedulers
    ]
    return cases + [Case(v, d, "temperature 1", hybrid=True) for v, d in modes]


def made_costs() -> CostTable:
    """Steps of up to :data:`BATCH` requests on which schedulers differ: stairs with cliffs. Frozen,
    so that a sample can be repeated."""
    at = (1, BATCH // 2, BATCH, 700, 701, 1024, 1025, 4 * BATCH)
    seconds = (0.004, 0.008, 0.010, 0.0102, 0.0115, 0.012, 0.0135, 0.017)
    return CostTable(Curve((1, BATCH), (1e-4, 5e-4)), Curve(at, seconds), frozen=True)


def tiny_pair(seed: int = 0, *, hybrid: bool = False) -> tuple[DecoderTarget, Drafter]:
    """A random target and a random draft for it, fp32.

    A hybrid target has recurrent layers around one of latent attention without positions.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, Any] = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
    }
    target = DecoderTarget(
        TargetConfig(
            attention="mla", hidden_size=16, intermediate_size=24, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, vocab_size=VOCAB,
            rms_norm_eps=1e-5, max_position_embeddings=32, rope_parameters=RopeParameters(),
            v_head_dim=4, rotary=not hybrid,
            linear=LinearConfig(layers=(0, 2), heads=2, head_dim=4, kernel=3) if hybrid else None,
            **sizes,
        ),
        (0, 1),
    ).eval()  # fmt: skip
    draft = DSparkDraft(
        K3DraftConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=VOCAB, max_position_embeddings=32, target_layer_ids=(0, 1),
            target_num_hidden_layers=3, target_hidden_size=16, mask_token_id=VOCAB - 1,
            markov_rank=4, block_size=BLOCK, v_head_dim=4, **sizes,
        )
    )  # fmt: skip
    with torch.no_grad():
        for module in (target, draft):
            for weight in module.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 1.2 * weight.shape[-1] ** -0.5, generator=generator)
    target.requires_grad_(False)
    return target, Drafter(draft, target.head_weight(), pack=False)


@torch.inference_mode()
def exact_joint(target: DecoderTarget, params: SamplingParams) -> Joint:
    """Probability of every text behind :data:`PROMPT`: up to ``LENGTH`` tokens, or an end token."""
    joint: Joint = {(): 1.0}
    for length in range(LENGTH):
        growing = [t for t in joint if len(t) == length and END not in t]
        ids = torch.tensor([[*PROMPT, *text] for text in growing])
        out = target.forward(ids, Span.alone(len(ids), ids.shape[1], target.device), None)
        for text, row in zip(growing, target.logits(out.final[:, -1]), strict=True):
            rules = LogitRules(params, PROMPT, {END}, VOCAB, target.device)
            ruled = rules.apply(row.unsqueeze(0), text, [])[0]
            chances = target_probabilities(ruled.double(), params).tolist()
            weight = joint.pop(text)
            joint.update({(*text, t): weight * c for t, c in enumerate(chances) if c > 0})
    return joint


def run_case(
    pair: tuple[DecoderTarget, Drafter],
    case: Case,
    samples: int,
    on_samples: Callable[[int], None] = lambda _: None,
) -> CaseResult:
    """Decode :data:`PROMPT` ``samples`` times under ``case`` and compare with the exact joint."""
    target, drafter = pair
    core = EngineCore(
        target,
        drafter,
        frozenset({END}),
        options=EngineOptions(
            max_requests=BATCH,
            max_batch_tokens=BATCH * (BLOCK + 1),
            page_size=4,
            verification=case.verification,
            draft_sample_method=case.draft,
            truncate_draft=case.truncate,
            scheduler=case.scheduler,
            min_gain=0.0,
        ),
        costs=made_costs(),
    )
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = steps = 0
    for start in range(0, samples, 4 * BATCH):
        seeds = range(start, min(start + 4 * BATCH, samples))
        names = [core.submit(PROMPT, replace(case.params, seed=seed)) for seed in seeds]
        while core.unfinished:
            core.step()
        for name in names:
            (done,) = core.collect(name).completions
            counts[done.ids] += 1
            assert done.acceptance is not None
            accepted, steps = accepted + done.acceptance.accepted, steps + done.acceptance.steps
        on_samples(len(names))
    statistic, cells, p_value = chi_square(counts, exact_joint(target, case.params))
    return CaseResult(case, samples, statistic, cells, p_value, 1 + accepted / max(steps, 1))


def chi_square(counts: Mapping[tuple[int, ...], int], joint: Joint) -> tuple[float, int, float]:
    """(statistic, cells, p) of ``counts`` against ``joint``; cells below 5 expected are merged.

    A text that the target cannot emit gives p = 0.
    """
    samples = sum(counts.values())
    if any(text not in joint for text in counts):
        return float("inf"), len(joint), 0.0
    cells: list[tuple[float, float]] = []
    rest_seen = rest_wanted = 0.0
    for text, chance in joint.items():
        if samples * chance >= 5:
            cells.append((counts.get(text, 0), samples * chance))
        else:
            rest_seen, rest_wanted = rest_seen + counts.get(text, 0), rest_wanted + samples * chance
    if rest_wanted >= 5:
        cells.append((rest_seen, rest_wanted))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    half = [torch.tensor(x / 2.0, dtype=torch.float64) for x in (len(cells) - 1, statistic)]
    return statistic, len(cells), float(torch.special.gammaincc(half[0], half[1]))


def stream_overlap(seeds: int = 64, draws: int = 2000) -> tuple[int, float]:
    """(values drawn twice, largest correlation) over the three streams of ``seeds`` requests."""
    made = [RandomStreams(seed).uniform(name, draws) for seed in range(seeds) for name in STREAMS]
    whole = torch.cat(made)
    twice = len(whole) - len(torch.unique(whole))
    correlation = torch.corrcoef(torch.stack(made)).fill_diagonal_(0).abs().max()
    return twice, float(correlation)


def identity(plain: EngineCore, draft: EngineCore, prompts: list[list[int]], tokens: int) -> int:
    """How many of ``prompts`` get the same greedy text of at most ``tokens`` from both."""
    texts = []
    for core in (plain, draft):
        params = SamplingParams(max_new_tokens=tokens)
        names = [core.submit(prompt, params) for prompt in prompts]
        while core.unfinished:
            core.step()
        texts.append([core.collect(name).completions[0].ids for name in names])
    return sum(a == b for a, b in zip(*texts, strict=True))


def tiny_prompts(count: int) -> list[list[int]]:
    """Distinct short prompts over the tiny vocabulary."""
    every = itertools.product(range(1, VOCAB), repeat=4)
    return [list(ids) for ids in itertools.islice(every, count)]
