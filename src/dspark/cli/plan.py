"""``--plan``: what a run would need, before anything runs.

Bytes and rows follow from the recipe and the target's config. Times are rough: they divide the
arithmetic of each stage by an assumed rate of this machine (:data:`RATE` per thread), which is
printed, so that a reader can correct it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dspark.config.architecture import DraftConfig, K3DraftConfig, Qwen3DraftConfig
from dspark.config.recipe import Recipe
from dspark.config.resolve import TargetShape, draft_config, layer_ids

if TYPE_CHECKING:
    from dspark.cli.context import RunContext

RATE = 60e9  # sustained multiply-adds * 2 per second and thread, fp32/bf16 mix on a server core
DECODE_SHARE = 0.25  # batched decoding reaches about a quarter of it
BATCH_ONE_TOKENS = 25.0  # plain tokens per second at batch 1, 100M-parameter target


def _shape(run: RunContext) -> tuple[TargetShape, int]:
    """Target sizes from its config alone, and its parameter count."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    files = run.target_files
    options = {"gguf_file": files.gguf} if files.gguf else {}
    raw = AutoConfig.from_pretrained(files.location, **options).get_text_config()
    shape = TargetShape.from_hf(raw.to_dict(), run.recipe.target.max_context)
    hidden = shape.hidden_size
    layer = 3 * hidden * shape.intermediate_size + 3 * hidden * hidden
    return shape, shape.num_hidden_layers * layer + shape.vocab_size * hidden


def estimates(recipe: Recipe, shape: TargetShape, parameters: int) -> dict[str, dict[str, Any]]:
    """Rows, bytes on disk, bytes of memory and seconds of every stage."""
    train_rows = sum(getattr(s, "train", 0) for s in recipe.prompts.sources)
    held = sum(s.held_out for s in recipe.prompts.sources)
    config = draft_config(recipe.draft, shape)
    width = {"float32": 4, "bfloat16": 2}
    taps = len(layer_ids(recipe.draft, shape.num_hidden_layers))
    answer = recipe.regenerate.max_new_tokens
    tokens = train_rows * (recipe.prompts.max_prompt_tokens + answer)
    per_token = (taps + 1) * shape.hidden_size * width[recipe.capture.dtype] + 13
    target_memory = parameters * width[recipe.target.dtype]
    rate = RATE * (os.cpu_count() or 1)
    draft_parameters = _draft_parameters(config)
    trainable = draft_parameters - config.vocab_size * config.hidden_size
    slots = train_rows * recipe.train.num_anchors * config.block_size * recipe.train.epochs
    training = slots * 6 * trainable / rate
    runs = len(recipe.bench.temperatures) * (
        held + (recipe.bench.repeats - 1) * 2 * recipe.bench.speed_prompts
    )
    decoding = train_rows * answer * 2 * parameters / (rate * DECODE_SHARE)
    return {
        "prompts": _row(train_rows + held, (train_rows + held) * 600, 0, 5),
        "answers": _row(train_rows, tokens * 7, target_memory, decoding),
        "states": _row(
            train_rows, tokens * per_token, target_memory, tokens * 2 * parameters / rate
        ),
        "draft": _row(
            int(slots),
            draft_parameters * width[recipe.target.dtype],
            tokens * per_token + 16 * trainable + target_memory,
            min(training, recipe.train.max_seconds or training),
        ),
        "bench": _row(
            runs,
            runs * 500,
            target_memory + 4 * draft_parameters,
            runs * recipe.bench.max_new_tokens * 1.7 / BATCH_ONE_TOKENS,
        ),
    }


def _row(rows: int, disk: float, memory: float, seconds: float) -> dict[str, Any]:
    return {"rows": rows, "disk": int(disk), "memory": int(memory), "seconds": seconds}


def _attention_parameters(c: DraftConfig) -> int:
    if isinstance(c, Qwen3DraftConfig):
        return 2 * c.hidden_size * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    assert isinstance(c, K3DraftConfig)
    return (
        c.hidden_size * (c.q_lora_rank + c.row_width)
        + c.q_lora_rank * c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        + c.kv_lora_rank * c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
        + c.num_attention_heads * c.v_head_dim * c.hidden_size
    )


def _draft_parameters(c: DraftConfig) -> int:
    layer = _attention_parameters(c) + 3 * c.hidden_size * c.intermediate_size
    taps = len(c.target_layer_ids) * c.hidden_size * c.hidden_size
    return c.num_hidden_layers * layer + taps + c.vocab_size * (c.hidden_size + 2 * c.markov_rank)


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return ""


def print_plan(run: RunContext, only: str | None) -> None:
    """One row a stage, upper bounds (every prompt as long as allowed, every answer at its cap)."""
    shape, parameters = _shape(run)
    found = estimates(run.recipe, shape, parameters)
    table = Table(title=f"plan of {run.recipe.name}: nothing was run", title_justify="left")
    for name in ("stage", "rows", "on disk", "memory", "rough time", "writes"):
        table.add_column(name, justify="left" if name in {"stage", "writes"} else "right")
    for kind, row in found.items():
        if only not in {None, kind}:
            continue
        table.add_row(
            kind,
            f"{row['rows']:,}",
            _bytes(row["disk"]),
            _bytes(row["memory"]),
            f"{row['seconds'] / 60:.1f} min",
            str(run.root / kind),
        )
    run.screen.console.print(table)
    prompt, answer = run.recipe.prompts.max_prompt_tokens, run.recipe.regenerate.max_new_tokens
    run.screen.console.print(
        f"Upper bounds: every prompt of {prompt} tokens, every answer of {answer}. "
        f"Times assume {RATE / 1e9:.0f} Gflop/s a core on {os.cpu_count()} cores.",
        highlight=False,
        soft_wrap=True,
    )
