"""``dspark serve --plan RECIPE``: a cluster on paper, from the recipe's ``serving`` section.

What is exact: parameters, bytes of weights, rows and states. What is a model: the time of a step,

    T(n) = (bytes of weights that n tokens touch + rows + states) / (GPUs x bandwidth x share)
           or flops / (GPUs x peak x share), whichever is larger, + layers x layer_us

with the expected number of different experts, E (1 - (1 - k/E)^n), if routing were independent.
Speculation pays tau tokens for one draft pass and one verification of gamma + 1 tokens a request:

    speed-up = tau x T(R) / (T(R (gamma + 1)) + T_draft(R))

docs/kimi-k3.md explains every term and what is left out.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

from dspark.config.architecture import DraftConfig
from dspark.config.load import load_recipe
from dspark.config.resolve import draft_config
from dspark.config.serving import ServingSection
from dspark.config.target import TargetConfig
from dspark.errors import ConfigError
from dspark.model.draft import DSparkDraft

GB = 1e9


@dataclass(frozen=True)
class Weights:
    """Parameters: of routed experts, of the rest, of the rest that is read every step."""

    experts: int
    others: int
    embedding: int

    @staticmethod
    def of(c: TargetConfig) -> Weights:
        h, heads = c.hidden_size, c.num_attention_heads
        nope, rope, v = (
            int(x or 0) for x in (c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
        )
        kv, q = int(c.kv_lora_rank or 0), c.q_lora_rank
        mla = h * (kv + rope) + kv * heads * (nope + v) + heads * v * h * (1 + c.output_gate)
        mla += heads * (nope + rope) * (h if q is None else q) + (0 if q is None else h * q)
        total = (c.num_hidden_layers - len(c.recurrent_layers)) * mla
        if c.linear is not None:
            w, d = c.linear.width, c.linear.head_dim
            gate = h * w if c.linear.full_rank_gate else h * d + d * w
            kda = 4 * h * w + gate + h * d + d * w + h * c.linear.heads + 3 * w * c.linear.kernel
            total += len(c.recurrent_layers) * kda
        experts = 0
        for layer in range(c.num_hidden_layers):
            e = c.experts_of(layer)
            if e is None:
                total += 3 * h * c.intermediate_size
                continue
            width = e.routed_expert_hidden_size or h
            experts += e.n_routed_experts * 3 * width * e.moe_intermediate_size
            total += 3 * h * e.n_shared_experts * e.moe_intermediate_size + h * e.n_routed_experts
            total += 2 * h * width if e.routed_expert_hidden_size else 0
        table = c.vocab_size * h
        return Weights(experts, total + (1 if c.tie_word_embeddings else 2) * table, table)


@dataclass(frozen=True)
class Share:
    """One GPU of ``gpus`` that hold one copy. Bytes; ``tokens`` fit into what is left.

    ``step_ms`` of plain decoding, ``verify_ms`` and ``draft_ms`` of a drafted step, all of
    ``requests`` answers; ``speedup`` per acceptance length.
    """

    gpus: int
    target: float
    draft: float
    states: float
    left: float
    tokens: int
    step_ms: float
    verify_ms: float
    draft_ms: float
    speedup: dict[str, float]


@dataclass(frozen=True)
class ScalePlan:
    """Facts of the model in bytes, then one :class:`Share` per cluster size.

    ``transfer`` is what a prompt moves from prefill to decode; ``hidden_states`` what it would take
    to ship the draft's inputs instead of its rows.
    """

    parameters: int
    active: int
    row_bytes: int
    draft_row_bytes: int
    state_bytes: int
    transfer: int
    transfer_ms: float
    hidden_states_ratio: float
    shares: list[Share]


def scale_plan(path: Path) -> ScalePlan:
    """The plan of the recipe at ``path``.

    Raises:
        ConfigError: a recipe that cannot be read, without ``serving``, or whose cluster cannot hold
            the model.
    """
    recipe = load_recipe(path)
    section = recipe.serving
    if section is None or recipe.target.sizes is None:
        missing = "serving" if section is None else "target.sizes"
        raise ConfigError(
            expected=f"a section {missing} with a target and a cluster to reckon with",
            found="none",
            where=str(path),
            fix="Add one as in recipes/kimi-k3.yaml, or plan for a draft's folder.",
        )
    draft = draft_config(recipe.draft, recipe.target.sizes)
    return _Reckoned(section, draft).plan()


class _Reckoned:
    def __init__(self, section: ServingSection, draft: DraftConfig) -> None:
        self.s, self.c, self.draft = section, section.target, draft
        self.weights = Weights.of(self.c)
        row = int(self.c.kv_lora_rank or 0) + int(self.c.qk_rope_head_dim or 0)
        self.row_layers = self.c.num_hidden_layers - len(self.c.recurrent_layers)
        self.target_row = self.row_layers * self.row_bytes(row)
        self.draft_row = draft.num_hidden_layers * self.row_bytes(draft.row_width)
        with torch.device("meta"):
            self.draft_parameters = sum(p.numel() for p in DSparkDraft(draft).parameters())

    def row_bytes(self, width: int) -> int:
        """Of one row: fp8 rows have a scale."""
        return width + 4 if self.s.rows == "fp8" else 2 * width

    @property
    def state(self) -> int:
        """Bytes of one request's recurrent states: fp32 matrices, bfloat16 convolution inputs."""
        linear = self.c.linear
        if linear is None:
            return 0
        each = linear.heads * linear.head_dim**2 * 4 + (linear.kernel - 1) * 3 * linear.width * 2
        return len(linear.layers) * each

    def plan(self) -> ScalePlan:
        s, e = self.s, self.c.experts
        active = self.weights.others
        if e is not None:
            active += self.weights.experts * e.num_experts_per_tok // e.n_routed_experts
        row = self.target_row + self.draft_row
        moved = s.prompt_tokens * row + self.state
        states = len(self.draft.target_layer_ids) * self.c.hidden_size * 2
        return ScalePlan(
            self.weights.experts + self.weights.others, active, row, self.draft_row, self.state,
            moved, moved * 8 / (s.network_gbit * 1e9) * 1e3, states / self.draft_row,
            [self.share(gpus) for gpus in s.tensor_parallel],
        )  # fmt: skip

    def share(self, gpus: int) -> Share:
        """Weights and states are split; latent rows and the draft's are whole on every GPU."""
        s = self.s
        bits = self.weights.experts * s.expert_bits + self.weights.others * s.other_bits
        target, draft = bits / 8 / gpus, self.draft_parameters * s.draft_bits / 8 / gpus
        states = (s.requests + s.state_snapshots) * self.state / gpus
        left = (s.device_gb - s.reserve_gb) * GB - target - draft - states
        if left <= 0:
            needed = (target + draft + states) / GB + s.reserve_gb
            raise ConfigError(
                expected=f"more than {needed:.0f} GB on each of {gpus} GPUs",
                found=f"{s.device_gb:g} GB",
                where="serving.tensor_parallel",
                fix="More or larger GPUs, fewer requests or state_snapshots, or fewer bits.",
            )
        tokens = int(left // (self.target_row + self.draft_row))
        block = self.draft.block_size + 1
        step, verify = (self.seconds(n, gpus) for n in (s.requests, s.requests * block))
        drafted = self.draft_seconds(gpus)
        speedup = {f"{tau:g}": round(tau * step / (verify + drafted), 2) for tau in s.acceptance}
        return Share(
            gpus, target, draft, states, left, tokens, step * 1e3, verify * 1e3, drafted * 1e3,
            speedup,
        )  # fmt: skip

    def seconds(self, tokens: int, gpus: int) -> float:
        """Of one target forward over ``tokens`` of all requests."""
        s, e = self.s, self.c.experts
        read = (self.weights.others - self.weights.embedding) * s.other_bits / 8
        active = self.weights.others - self.weights.embedding
        if e is not None:
            per_token = e.num_experts_per_tok / e.n_routed_experts
            touched = 1.0 - math.pow(1.0 - per_token, tokens)
            read += self.weights.experts * s.expert_bits / 8 * touched
            active += round(self.weights.experts * per_token)
        read += 2 * s.requests * self.state  # read, and written once accepted
        rows = s.requests * s.context * self.target_row  # on every GPU, all of them
        slow = (read / gpus + rows) / (s.memory_gbs * GB * s.bandwidth_share)
        busy = 2 * active * tokens / (gpus * s.device_tflops * 1e12 * s.compute_share)
        return max(slow, busy) + self.c.num_hidden_layers * s.layer_us * 1e-6

    def draft_seconds(self, gpus: int) -> float:
        """Of one block pass and the Markov head's walk, which waits for each slot."""
        s, d = self.s, self.draft
        read = self.draft_parameters * s.draft_bits / 8 + self.c.vocab_size * self.c.hidden_size * 2
        rows = s.requests * s.context * self.draft_row
        slow = (read / gpus + rows) / (s.memory_gbs * GB * s.bandwidth_share)
        return slow + (d.num_hidden_layers + d.block_size) * s.layer_us * 1e-6


def show_scale(plan: ScalePlan, *, as_json: bool) -> None:
    """The figures on stdout."""
    if as_json:
        typer.echo(json.dumps(asdict(plan), indent=2))
        return
    console = Console()
    facts = Table(title="dspark serve: on paper", box=None, show_header=False)
    for name, text in _facts(plan):
        facts.add_row(name, text)
    console.print(facts)
    for share in plan.shares:
        table = Table(title=f"each of {share.gpus} GPUs", box=None, show_header=False)
        for name, text in _shared(share):
            table.add_row(name, text)
        console.print(table)
    console.print("nothing was run; formula and assumptions: docs/kimi-k3.md")


def _shared(share: Share) -> list[tuple[str, str]]:
    sizes = {"target": share.target, "draft": share.draft, "states": share.states}
    speed = ", ".join(f"{value:.2f} at {tau}" for tau, value in share.speedup.items())
    return [
        ("weights and states", ", ".join(f"{n} {x / GB:.1f} GB" for n, x in sizes.items())),
        ("rows", f"{share.left / GB:.1f} GB: {share.tokens:,} tokens"),
        ("a step", f"plain {share.step_ms:.1f} ms; verify {share.verify_ms:.1f} ms and draft "
                   f"{share.draft_ms:.1f} ms"),
        ("speed-up", f"{speed} tokens a step"),
    ]  # fmt: skip


def _facts(plan: ScalePlan) -> list[tuple[str, str]]:
    digits = 4 - math.ceil(math.log10(plan.parameters / 1e9))
    return [
        ("parameters", f"{plan.parameters / 1e9:,.{max(0, digits)}f} billion, "
                       f"{plan.active / 1e9:.1f} active per token"),
        ("rows", f"{plan.row_bytes:,} bytes a token, {plan.draft_row_bytes:,} of them the draft's"),
        ("state", f"{plan.state_bytes / 1e6:.1f} MB a request"),
        ("prefill to decode", f"{plan.transfer / 1e6:.0f} MB a prompt, {plan.transfer_ms:.1f} ms"),
        ("hidden states instead", f"{plan.hidden_states_ratio:.1f} times the draft's rows"),
    ]  # fmt: skip
