"""``dspark train --plan``: what training costs on the machines the recipe names, before it starts.

Bytes come first, because that is what surprised people: a cache of states for a large target is
measured in hundreds of terabytes. Rows are taken at their upper bound (every prompt and answer at
its cap). With a ``cluster`` section the plan is held against it, and refused if it cannot fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text

from dspark.checkpoint.sizes import WIDTH, TargetSizes, read_sizes
from dspark.cli.context import RunContext
from dspark.cli.figures import shown_bytes, shown_time
from dspark.config.architecture import DraftConfig, K3DraftConfig
from dspark.config.prompts import PackageSource
from dspark.config.recipe import Recipe
from dspark.config.resolve import draft_config
from dspark.config.stream import ClusterSection
from dspark.errors import ConfigError
from dspark.hidden.codec import record_bytes
from dspark.training.memory import Load, counts_of, rank_memory

GB = 1e9
TEACHER_SHARE = 0.35  # of peak arithmetic, in prefill


@dataclass(frozen=True)
class TrainPlan:
    """Upper bounds. Bytes, seconds and tokens per second; ``memory`` of one rank by purpose."""

    token_bytes: int
    step_bytes: int
    run_bytes: int
    steps: int
    tokens: int
    window_bytes: int
    pool_bytes: int
    memory: dict[str, int]
    ranks: int
    step_seconds: float | None = None
    trainer_rate: float | None = None
    teacher_rate: float | None = None
    run_seconds: float | None = None
    network_gbit: float | None = None


class TrainPlanner:
    """Works a recipe out; no weights, no target files beyond its config."""

    def __init__(self, recipe: Recipe, target: TargetSizes) -> None:
        self.recipe, self.section = recipe, recipe.train
        self.target = target
        self.config: DraftConfig = draft_config(recipe.draft, target.shape)
        self.answer = recipe.regenerate.max_new_tokens
        self.length = recipe.prompts.max_prompt_tokens + self.answer
        self.ranks = recipe.cluster.trainer_ranks if recipe.cluster else 1
        self.rows = sum(
            s.train
            for s in recipe.prompts.sources
            if not isinstance(s, PackageSource) and s.train != "all"
        )

    def row_bytes(self) -> int:
        """One record as it travels."""
        config, taps = self.config, self.section.stream.taps
        layers, width = len(config.target_layer_ids), WIDTH[self.recipe.capture.dtype]
        return record_bytes(
            self.length, self.answer + 1, layers, config.target_hidden_size, width, taps
        )

    def token_bytes(self) -> int:
        """Taps and final state of one supervised token; 13 more for id, mask, greedy and log_z."""
        config = self.config
        wide = (len(config.target_layer_ids) + 1) * config.target_hidden_size
        return wide * WIDTH[self.recipe.capture.dtype]

    def plan(self) -> TrainPlan:
        section, cluster = self.section, self.recipe.cluster
        per_step = section.batch_size * section.accumulate
        batches = math.ceil(section.epochs * -(-self.rows // section.batch_size))
        steps = max(1, math.ceil(batches / section.accumulate))
        row = self.row_bytes()
        batch = section.batch_of(self.length)
        window = row * batch * -(-section.accumulate // self.ranks)
        sharded = self.ranks > 1
        load = Load(
            batch,
            self.length,
            min(section.num_anchors, self.answer),
            self.recipe.draft.vocabulary_size,
            WIDTH[self.recipe.capture.dtype],
        )
        # Ranks are planned for GPUs; a machine that has one trains on it.
        fused = sharded or torch.cuda.is_available()
        memory = rank_memory(
            self.config, section, load, ranks=self.ranks, sharded=sharded, fused=fused
        )
        passes = 1.0 if section.mode == "offline" else section.epochs
        plan = TrainPlan(
            token_bytes=self.token_bytes(),
            step_bytes=row * per_step,
            run_bytes=int(row * self.rows * passes),
            steps=steps,
            tokens=steps * per_step * self.length,
            window_bytes=window,
            pool_bytes=int(section.stream.pool_gb * GB),
            memory=memory,
            ranks=self.ranks,
        )
        return plan if cluster is None else self._timed(plan, cluster, load)

    def step_work(self, load: Load) -> float:
        """Multiply-adds times two of one micro-batch, forward and backward."""
        config, counts = self.config, counts_of(self.config)
        block_rows = load.batch * load.anchors * config.block_size
        context = load.batch * load.length
        keys = load.length + config.block_size
        heads = config.num_attention_heads
        if isinstance(config, K3DraftConfig):
            width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
            row = config.hidden_size * (config.kv_lora_rank + config.qk_rope_head_dim)
            row += config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        else:
            width = 2 * int(getattr(config, "head_dim", 0))
            row = 2 * config.hidden_size * width
        layers = config.num_hidden_layers
        taps = len(config.target_layer_ids) * config.target_hidden_size * config.hidden_size
        work = block_rows * counts.layer * layers
        work += context * (taps + row * layers)
        work += block_rows * keys * heads * width * layers
        total: float = 6.0 * work
        if self.section.checkpoint_activations:
            total += 2.0 * work
        vocabulary = load.support or config.vocab_size
        # Draft logits, target logits, and the gradient of h; the head itself is frozen.
        return total + 6.0 * block_rows * config.hidden_size * vocabulary

    def _timed(self, plan: TrainPlan, cluster: ClusterSection, load: Load) -> TrainPlan:
        peak = cluster.device_tflops * 1e12 * cluster.step_share
        micro = -(-self.section.accumulate // self.ranks)
        step = micro * self.step_work(load) / peak
        per_step = self.section.batch_size * self.section.accumulate * self.length
        trainer = per_step / step
        teacher = cluster.teacher_tokens_per_second
        if teacher is None and cluster.teacher_tflops is not None:
            teacher = cluster.teacher_tflops * 1e12 * TEACHER_SHARE / (2 * self.target.active)
        rate = trainer
        gbit = None
        if self.section.mode != "offline" and teacher is not None:
            rate = min(trainer, teacher * cluster.teachers)
        if self.section.mode != "offline":
            gbit = rate * plan.step_bytes / per_step * 8 / GB
        return TrainPlan(
            **{
                **vars(plan),
                "step_seconds": step,
                "trainer_rate": trainer,
                "teacher_rate": teacher,
                "run_seconds": plan.tokens / rate,
                "network_gbit": gbit,
            }
        )

    def faults(self, plan: TrainPlan) -> list[str]:
        """What cannot fit, each with what would."""
        found, section, cluster = [], self.section, self.recipe.cluster
        if section.accumulate % self.ranks:
            found.append(
                f"{section.accumulate} micro-batches do not share among {self.ranks} ranks"
            )
        if section.mode != "offline" and plan.pool_bytes < plan.window_bytes:
            found.append(
                f"train.stream.pool_gb {section.stream.pool_gb:g} is below one optimiser window of "
                f"{plan.window_bytes / GB:.2f} GB a rank"
            )
        if cluster is None:
            return found
        need = sum(plan.memory.values())
        if need > cluster.device_gb * GB:
            found.append(
                f"a rank needs {need / GB:.1f} GB of {cluster.device_gb:g} (lower "
                "train.batch_size, set train.checkpoint_activations, or use more ranks)"
            )
        if section.mode != "offline" and plan.pool_bytes * plan.ranks > cluster.host_gb * GB:
            found.append(
                f"pools of {plan.ranks} ranks take {plan.pool_bytes * plan.ranks / GB:.0f} GB of "
                f"{cluster.host_gb:g} on one host"
            )
        if plan.network_gbit is not None and plan.network_gbit > cluster.network_gbit:
            found.append(
                f"the network carries {cluster.network_gbit:g} of {plan.network_gbit:.0f} Gbit/s"
            )
        return found


def train_plan(run: RunContext) -> TrainPlanner:
    """The planner of a run; reads the target's config at most."""
    return TrainPlanner(run.recipe, read_sizes(run.recipe.target, run.target_files))


def print_train_plan(run: RunContext) -> None:
    """Raises ConfigError, after the table, when something cannot fit."""
    planner = train_plan(run)
    plan = planner.plan()
    table = Table(
        title=Text(f"training of {run.recipe.name}: nothing was run"), title_justify="left"
    )
    table.add_column("what", overflow="fold")
    table.add_column("upper bound", justify="right", overflow="fold")
    for name, value in plan_rows(plan, planner):
        table.add_row(Text(name), value)
    run.screen.console.print(table)
    if faults := planner.faults(plan):
        raise ConfigError(
            expected="a training run that fits its machines",
            found="; ".join(faults),
            where="--plan",
            fix="Change the recipe's train or cluster section as said.",
        )


def plan_rows(plan: TrainPlan, planner: TrainPlanner) -> list[tuple[str, str]]:
    """Names and values as printed."""
    section, cluster = planner.section, planner.recipe.cluster
    rows = [
        ("mode", section.mode),
        ("bytes a supervised token", f"{plan.token_bytes:,} + ids"),
        ("optimiser steps", f"{plan.steps:,}"),
        ("tokens seen", f"{plan.tokens:,}"),
        ("states of a step", shown_bytes(plan.step_bytes)),
        (
            "states on disk" if section.mode == "offline" else "states streamed in the run",
            shown_bytes(plan.run_bytes),
        ),
    ]
    if section.mode != "offline":
        rows += [
            ("one optimiser window, a rank", shown_bytes(plan.window_bytes)),
            ("pool, a rank", shown_bytes(plan.pool_bytes)),
        ]
    rows += [(f"a rank of {plan.ranks}: {k}", shown_bytes(v)) for k, v in plan.memory.items()]
    rows.append((f"a rank of {plan.ranks}: all", shown_bytes(sum(plan.memory.values()))))
    if cluster is not None and plan.step_seconds is not None:
        rows.append(("time of a step, trainer alone", shown_time(plan.step_seconds)))
        rows.append(("trainer", f"{plan.trainer_rate:,.0f} tokens/s"))
        if plan.teacher_rate is not None and plan.trainer_rate is not None:
            ratio = plan.trainer_rate / plan.teacher_rate
            rows.append(("one teacher", f"{plan.teacher_rate:,.0f} tokens/s"))
            rows.append(("teachers to feed the trainer", f"{ratio:,.1f} (has {cluster.teachers})"))
        if plan.network_gbit is not None:
            rows.append(("network into the trainer", f"{plan.network_gbit:,.1f} Gbit/s"))
        if plan.run_seconds is not None:
            rows.append(("whole run", shown_time(plan.run_seconds)))
    return rows
