"""Upper bounds of what each stage needs: rows, bytes on disk, memory, and a rough time.

Bytes on disk are true bounds: every prompt as long as the recipe allows, every answer at its cap,
every line of JSON at its longest, and beside the artifact itself the working files that a stage
keeps until it is sealed. Prompts are generated and measured, which takes seconds; nothing is
tokenized. Memory adds up what is held at once (weights, caches, records, optimiser, the largest
products) on top of :data:`PROCESS`; it is an estimate on the high side. Times divide arithmetic by
an assumed rate.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dspark.artifacts import Kind
from dspark.checkpoint.sizes import WIDTH, TargetSizes
from dspark.config.architecture import DraftConfig
from dspark.config.prompts import PackageSource
from dspark.config.recipe import BenchSection, Recipe
from dspark.config.resolve import draft_config
from dspark.data.prompt import Prompt
from dspark.model.draft import DSparkDraft

RATE = 60e9  # sustained multiply-adds * 2 per second and core, fp32/bf16 mix on a server
DECODE_SHARE = 0.25  # batched decoding reaches about a quarter of it
BATCH_ONE_TOKENS = 25.0  # plain tokens per second at batch 1, 100M-parameter target
PROCESS = 700_000_000  # Python with torch and transformers, before anything is loaded
# JSON with indentation, names and 17-digit numbers at their longest.
STEP_ROW, EVAL_ROW, ANSWER_ROW, RECORD_HEAD, TENSOR_HEAD = 480, 1400, 1400, 2048, 200
TOKEN_TEXT = 12  # bytes of a generated token as JSON holds its text; a token of prose is 4
PROMPT_KEYS, PROMPT_SIGNATURE = 64, 256  # what is remembered of one prompt while sieving
MANIFEST, FILE_ROW, REPORT, BENCH_ROW, BENCH_TEXT = 32_768, 400, 65_536, 600, 24


@dataclass(frozen=True)
class Need:
    """``disk`` bytes stay, ``working`` bytes are there besides until the stage is sealed."""

    rows: int
    disk: int
    working: int
    memory: int
    seconds: float


@dataclass(frozen=True)
class DraftSizes:
    """Numbers of a draft: all, those that are trained, and tensors; and its cache of one token."""

    parameters: int
    trainable: int
    tensors: int
    row: int


def draft_sizes(config: DraftConfig) -> DraftSizes:
    """Counted on the module itself, without storage."""
    with torch.device("meta"):
        draft = DSparkDraft(config)
    every = list(draft.parameters())
    return DraftSizes(
        parameters=sum(p.numel() for p in every),
        trainable=sum(p.numel() for p in every if p.requires_grad),
        tensors=len(draft.state_dict()),
        row=config.num_hidden_layers * config.row_width,
    )


class Bounds:
    """The bounds of one recipe on one target; ``prompt_bytes`` from :func:`prompt_bytes`.

    ``turns``: user turns that are asked for training, at most one row each; None: one a prompt.
    """

    def __init__(
        self, recipe: Recipe, target: TargetSizes, prompt_bytes: int, turns: int | None = None
    ) -> None:
        self.recipe, self.target, self.prompt_bytes = recipe, target, prompt_bytes
        self.config = draft_config(recipe.draft, target.shape)
        self.draft = draft_sizes(self.config)
        sources = recipe.prompts.sources
        # `all` is refused in a run's recipe, which is what makes a plan possible.
        self.train_rows = sum(
            s.train for s in sources if not isinstance(s, PackageSource) and s.train != "all"
        )
        self.held_rows = sum(s.held_out for s in sources)
        self.rows = max(self.train_rows, turns or 0)
        self.new_tokens = recipe.regenerate.most_new_tokens()
        self.length = recipe.prompts.max_prompt_tokens + self.new_tokens
        if self.rows > self.train_rows:
            self.length = recipe.target.max_context  # a later turn has the earlier ones before it
        self.tokens = self.rows * self.length
        taps = len(self.config.target_layer_ids)
        # taps and final state, and of each token id, mask, greedy token and log_z
        self.record_token = (taps + 1) * target.shape.hidden_size * WIDTH[recipe.capture.dtype] + 13
        self.manifest = MANIFEST + 3 * len(json.dumps(recipe.model_dump(mode="json")))
        self.rate = RATE * (os.cpu_count() or 1)

    def needs(self) -> dict[Kind, Need]:
        """One :class:`Need` a stage, in order."""
        return {
            "prompts": self._prompts(),
            "answers": self._answers(),
            "states": self._states(),
            "draft": self._draft(),
            "bench": bench_need(
                self.recipe.bench, self.target, self.config, self._load(), self._weights("float32")
            ),
        }

    def _load(self) -> BenchLoad:
        recipe, held = self.recipe, Counter[str]()
        for source in recipe.prompts.sources:
            held[source.category] += source.held_out
        return BenchLoad(
            prompts=sum(min(n, recipe.bench.prompts_per_category) for n in held.values()),
            categories=len(held),
            groups=1 if set(held) <= set(recipe.prompts.workload) else 2,
            tokens=recipe.prompts.max_prompt_tokens,
            fixed=self.manifest + self.prompt_bytes * len(recipe.bench.temperatures),
        )

    def _prompts(self) -> Need:
        # report.json, report.html and contamination.json
        reports = 3 * REPORT * (1 + len(self.recipe.prompts.sources))
        disk = self.prompt_bytes + reports + self.manifest
        memory = target_weights(self.target, self.recipe.target.dtype, ()) + 20 * self.prompt_bytes
        rows = self.train_rows + self.held_rows
        near = self.recipe.prompts.filters.near_duplicate is not None
        arrays = rows * (PROMPT_KEYS + near * 2 * PROMPT_SIGNATURE)
        working = self.prompt_bytes + arrays + REPORT
        return Need(rows, disk, working, memory, 5 + rows / 1000)

    def _answers(self) -> Need:
        shape, section = self.target.shape, self.recipe.regenerate
        digits = len(str(shape.vocab_size)) + 1
        # Ids, the mask beside them, the text of the answers, and what was asked.
        lines = self.tokens * (digits + 2) + self.rows * (ANSWER_ROW + self.new_tokens * TOKEN_TEXT)
        lines += self.prompt_bytes * -(-self.rows // max(self.train_rows, 1))
        batch = min(section.batch_size, max(self.rows, 1))
        # The batch's rows, as many again while a batch of prompts is taken in, and their prefill.
        cache = (2 * batch + 1) * self.length * self.target.row_bytes
        prefill = batch * (self.length - section.max_new_tokens)
        memory = self._weights() + cache + self._forward(prefill)
        memory += 4 * batch * shape.vocab_size * 4 + 40 * self.tokens
        work = self.rows * self.new_tokens * 2 * self.target.active
        seconds = work / (self.rate * DECODE_SHARE)
        disk = lines + self.manifest + 2 * REPORT
        return Need(self.rows, disk, lines, memory, seconds)

    def _states(self) -> Need:
        section, shape = self.recipe.capture, self.target.shape
        disk = self.tokens * self.record_token + self.rows * (RECORD_HEAD + FILE_ROW)
        batch = max(section.batch_tokens, self.length)
        taps = 3 * batch * (len(self.config.target_layer_ids) + 1) * shape.hidden_size * 4
        logits = 3 * self.new_tokens * shape.vocab_size * 4
        memory = self._weights()
        memory += self._forward(batch) + taps + logits + 2 * batch * self.target.row_bytes
        memory += 40 * self.tokens
        seconds = self.tokens * 2 * self.target.active / self.rate
        return Need(self.rows, disk + self.manifest, 0, memory, seconds)

    def _draft(self) -> Need:
        section, draft, shape = self.recipe.train, self.draft, self.target.shape
        steps = math.ceil(section.epochs * -(-self.rows // section.batch_size) / section.accumulate)
        evaluations = steps // section.eval_every + 1
        slots = 2 * self.config.block_size
        history = steps * STEP_ROW + evaluations * (EVAL_ROW + 40 * slots)
        history += evaluations * 120 * len(self.recipe.prompts.sources)
        disk = draft.parameters * WIDTH[self.recipe.target.dtype] + draft.tensors * TENSOR_HEAD
        # Weights and two moments in fp32, and the next file while the last is still there.
        resume = 2 * (12 * draft.trainable + draft.tensors * 4096 + history + 65_536)
        rows = section.batch_size * section.num_anchors * self.config.block_size
        # A stream holds its pool instead, and a few rows to judge on.
        states = self.tokens * self.record_token + self.rows * RECORD_HEAD
        if section.mode != "offline":
            held = section.stream.held_rows + section.stream.warm_rows
            states = held * self.length * self.record_token + int(section.stream.pool_gb * 1e9)
        wide = 20 * shape.hidden_size + 4 * self.config.intermediate_size
        wide += 4 * self.config.num_attention_heads * (self.length + self.config.block_size)
        layers = self.config.num_hidden_layers + 1
        memory = self._weights("float32") + states + 40 * draft.trainable
        memory += 3 * shape.vocab_size * shape.hidden_size * 4 + rows * layers * wide * 4
        memory += 6 * min(rows, section.loss.chunk_rows) * shape.vocab_size * 4
        work = self.rows * section.num_anchors * self.config.block_size * section.epochs
        seconds = work * 6 * draft.trainable / self.rate
        if section.max_seconds is not None:
            seconds = min(seconds, section.max_seconds)
        disk += history + 16_384 + self.manifest
        return Need(int(work), disk, resume, memory, seconds)

    def _weights(self, *more: str) -> int:
        """The process with the target, packed for every precision that is in use by then."""
        recipe = self.recipe
        every = {recipe.regenerate.precision, recipe.capture.precision, *more}
        return target_weights(self.target, recipe.target.dtype, every)

    def _forward(self, tokens: int) -> int:
        """The largest products of one forward over ``tokens``, fp32."""
        shape = self.target.shape
        return tokens * (12 * shape.hidden_size + 4 * shape.intermediate_size) * 4


@dataclass(frozen=True)
class BenchLoad:
    """What is measured: at most so many prompts of ``tokens`` tokens; ``fixed`` bytes of text."""

    prompts: int
    categories: int
    groups: int
    tokens: int
    fixed: int

    def decodings(self, section: BenchSection) -> int:
        """Prompts decoded by both arms, at most: all once, timed ones ``repeats`` times."""
        timed = min(self.groups * section.speed_prompts, self.prompts)
        return len(section.temperatures) * (self.prompts + (section.repeats - 1) * timed)


def bench_need(
    section: BenchSection, target: TargetSizes, config: DraftConfig, load: BenchLoad, weights: int
) -> Need:
    """A bench of ``load``. ``weights`` are the bytes of the process with its target."""
    draft, count, shape = draft_sizes(config), load.decodings(section), target.shape
    arms = len(section.temperatures) * load.categories
    # An arm shows one sample, token by token, and names every repeat.
    arm = 4096 + 160 * section.max_new_tokens + 80 * (section.repeats + config.block_size)
    disk = 2 * count * BENCH_ROW + arms * arm + load.fixed
    # Both arms of one decoding: ids in digits, and the kind of each token in words.
    each = section.max_new_tokens * (2 * (len(str(shape.vocab_size)) + 2) + BENCH_TEXT)
    # The next file while the last is still there.
    working = 2 * (count * (each + 100 * config.block_size + BENCH_ROW) + BENCH_ROW)
    length = load.tokens + section.max_new_tokens + config.block_size + 1
    wide = 12 * shape.hidden_size + 4 * shape.intermediate_size
    memory = weights + 12 * draft.parameters + shape.vocab_size * shape.hidden_size * 4
    memory += length * (2 * target.row_bytes + 8 * draft.row + 4 * wide)
    memory += 12 * (config.block_size + 1) * shape.vocab_size * 8
    seconds = count * section.max_new_tokens * 1.7 / BATCH_ONE_TOKENS
    return Need(count, disk, working, memory, seconds)


def target_weights(target: TargetSizes, dtype: str, precisions: Iterable[str]) -> int:
    """Bytes of the process with a target of ``dtype``, packed for each of ``precisions``."""
    copies = sum(min(WIDTH[name], WIDTH[dtype]) for name in set(precisions))
    # Once more for a moment, while weights are read and brought into our layout.
    each = 2 * WIDTH[dtype] + (copies if target.own_decoder else 0)
    return PROCESS + target.parameters * each


def prompt_bytes(prompts: Iterable[Prompt], most_turns: int) -> tuple[int, int]:
    """Bytes of ``prompts`` as their file holds them, and user turns of the training ones, of which
    ``most_turns`` are asked of each."""
    size = turns = 0
    for prompt in prompts:
        size += len(prompt.model_dump_json().encode()) + 1
        if prompt.split == "train":
            turns += min(1 + len(prompt.later_turns), most_turns)
    return size, turns
