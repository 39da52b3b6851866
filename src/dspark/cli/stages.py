"""What each stage does: reads its parents, hands engines to library code, returns its counts.

The library code below knows nothing of recipes' folders or progress bars; this file knows nothing
of tensors beyond passing them on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark.artifacts import Kind, atomic_json
from dspark.bench.journal import UNFINISHED as UNFINISHED_BENCH
from dspark.bench.journal import Journal
from dspark.bench.local import BenchPrompt, LocalBench, as_json
from dspark.capture.embedded import capture
from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.published import read_config
from dspark.checkpoint.target import LoadedTarget
from dspark.cli.answer_stage import run_answers, write_user_turns
from dspark.cli.console import Screen
from dspark.cli.context import RunContext, StageResult
from dspark.cli.vllm_capture import capture_in_vllm
from dspark.config.architecture import DraftConfig
from dspark.config.recipe import BenchSection
from dspark.config.resolve import differences, draft_config, layer_ids
from dspark.data.chat import check_mask_token, end_ids, prompt_ids
from dspark.data.prompt import Prompt
from dspark.data.prompts import build_prompts
from dspark.data.self_instruct import working_files
from dspark.data.shards import read_prompts
from dspark.data.tokens import TokenizerTokens
from dspark.engine.decode import Decoder
from dspark.engine.drafter import Drafter
from dspark.errors import ConfigError
from dspark.hidden.answers import read_answers
from dspark.hidden.disk import DiskStore
from dspark.model.fp8 import serving_form

STATES = "records"


def checked_draft_config(run: RunContext) -> DraftConfig:
    """The draft this recipe makes, its mask token checked against the target's tokenizer."""
    target = run.target
    config = draft_config(run.recipe.draft, target.shape)
    check_mask_token(target.tokenizer, config.mask_token_id, config.vocab_size, end_ids(target))
    if run.recipe.train.init_from is not None:
        found, _ = read_config(Path(run.recipe.train.init_from))
        if faults := differences(config, found):
            raise ConfigError(
                expected="a draft of the flavour, sizes and conventions that this recipe makes",
                found="; ".join(faults),
                where=f"train.init_from {run.recipe.train.init_from}",
                fix="Set the draft section to what that draft has, or start from another one.",
            )
    return config


def run_prompts(run: RunContext, folder: Path) -> StageResult:
    """Sources -> shards and their report; the recipe's mask token was checked before."""
    tokens = TokenizerTokens(run.target.tokenizer)
    write_user_turns(run, folder)
    with run.screen.bar("making prompts", None) as bar:
        report = build_prompts(
            run.recipe.prompts, folder, tokens, tasks=run.task_items, on_rows=bar.advance
        )
    counts = report.counts()
    line = f"{counts['train']} to train on, {counts['held_out']} held out"
    later = report.later_turns
    turns = run.recipe.regenerate.turns
    if later["train"] and turns == 1:
        run.screen.stage(
            "prompts",
            f"{later['train']} to train on have later turns, which are not asked: "
            "regenerate.turns is 1",
        )
    if later["held_out"]:
        run.screen.stage(
            "prompts",
            f"{later['held_out']} held out have later turns, which are not asked: only the first "
            "of the user is",
        )
    working = working_files(run.recipe.prompts.sources)
    return StageResult(counts, {"with_later_turns": dict(later)}, line, working)


def run_states(run: RunContext, folder: Path) -> StageResult:
    """Answers replayed: hidden records, from our own target or from vLLM."""
    section = run.recipe.capture
    answers = read_answers(run.folder("answers"))
    (folder / STATES).mkdir(exist_ok=True)
    store = DiskStore(folder / STATES)
    store.gc()
    if section.engine == "vllm":
        ids = layer_ids(run.recipe.draft, run.shape.num_hidden_layers)
    else:
        ids = layer_ids(run.recipe.draft, run.target.num_layers)
    total = sum(len(a.ids) for a in answers)
    with run.screen.bar("hidden states (tokens)", total) as bar:
        if section.engine == "vllm":
            present = set(store.ids())
            bar.advance(sum(len(a.ids) for a in answers if a.id in present), kept=True)
            capture_in_vllm(run, store.folder, ids, bar.advance)
        else:
            capture(
                run.target.build(ids, section.precision),
                answers,
                store,
                batch_tokens=section.batch_tokens,
                dtype=getattr(torch, section.dtype),
                on_tokens=bar.advance,
            )
    health = store.health()
    notes = {"layer_ids": list(ids), "norm_state": "post", "dtype": section.dtype}
    notes["engine"] = section.engine
    line = f"{health['records']} records, {total:,} tokens, {health['bytes'] / 1e9:.2f} GB"
    return StageResult({**health, "tokens": total}, notes, line)


def run_bench(run: RunContext, folder: Path) -> StageResult:
    """Held-out prompts through both arms; writes ``bench.json`` and the headline rows."""
    prompts = read_prompts(run.folder("prompts"), "held_out")
    journal = Journal(folder / UNFINISHED_BENCH, {"machine": run.origin.machine})
    taken_up(journal, run.screen)
    arms, rows = bench_draft(
        run.screen,
        run.target,
        run.folder("draft"),
        prompts,
        run.recipe.bench,
        run.recipe.prompts.workload,
        journal,
    )
    atomic_json(folder / "bench.json", {"arms": arms})
    atomic_json(folder / "results.json", rows)
    told = [
        f"{row['prompts']} T={row['temperature']}: {length_text(row['acceptance_length'])}, "
        f"{row['speedup']:.2f}x plain speed"
        for row in rows
    ]
    measured = measured_prompts(prompts, run.recipe.bench)
    counts = {"prompts": len(measured), "left_out": len(prompts) - len(measured)}
    notes = {"left_out": left_out(prompts, run.recipe.bench)}
    return StageResult(counts, notes, "; ".join(told), (UNFINISHED_BENCH,))


def measured_prompts(prompts: list[Prompt], section: BenchSection) -> list[Prompt]:
    """The first ``prompts_per_category`` of every category, category by category."""
    own: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        own.setdefault(prompt.category, []).append(prompt)
    return [q for part in own.values() for q in part[: section.prompts_per_category]]


def left_out(prompts: list[Prompt], section: BenchSection) -> dict[str, int]:
    """How many prompts of a category are not measured; categories without such are not named."""
    every = Counter(q.category for q in prompts)
    over = {c: n - section.prompts_per_category for c, n in every.items()}
    return {category: n for category, n in over.items() if n > 0}


def length_text(length: float | None) -> str:
    """An acceptance length for the screen; none where every answer ended with its first token."""
    return "no steps" if length is None else f"{length:.2f}"


def taken_up(journal: Journal, screen: Screen) -> None:
    """Say what an interrupted bench left."""
    if journal.from_elsewhere:
        screen.stage(
            "bench", "begun on another machine, or for other figures: all is measured again"
        )
    elif journal.found:
        screen.stage("bench", f"{journal.found} decodings of an interrupted bench taken up")


def bench_draft(
    screen: Screen,
    target: LoadedTarget,
    checkpoint: Path,
    prompts: list[Prompt],
    section: BenchSection,
    workload: tuple[str, ...],
    journal: Journal | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure ``checkpoint`` on ``prompts``: (arms, summary rows).

    Decodings that ``journal`` holds are not made again.
    """
    config, _ = read_config(checkpoint)
    model = target.build(config.target_layer_ids)
    draft, _ = load_draft(
        checkpoint,
        dtype=target.dtype,
        device=target.device,
        head=model.head_weight(),
        embedding=model.embedding_weight(),
        fp8=serving_form(target.device),
    )
    drafter = Drafter(draft, model.head_weight())
    ends = end_ids(target)
    modes: dict[str, Any] = {
        "verification": section.verification,
        "draft_sample_method": section.draft_sample_method,
    }
    if over := left_out(prompts, section):
        named = ", ".join(f"{number} of {category}" for category, number in over.items())
        screen.stage(
            "bench",
            f"{named} left out: bench.prompts_per_category is {section.prompts_per_category}",
        )
    rows = [
        BenchPrompt(
            q.id,
            q.category,
            q.messages[-1]["content"],
            prompt_ids(target.tokenizer, q.messages, q.tools),
        )
        for q in measured_prompts(prompts, section)
    ]
    with screen.bar("prompts, both arms", None) as bar:
        bench = LocalBench(
            Decoder(model, None, ends),
            Decoder(model, drafter, ends, **modes),
            section,
            draft.config.block_size,
            lambda ids: str(target.tokenizer.decode(ids)),
            workload,
            bar.advance,
            journal,
        )
        bar.set(0, bench.decodings(rows))
        arms, summary = bench.run(rows)
    return as_json(arms), as_json(summary)


RUNNERS: dict[Kind, Callable[[RunContext, Path], StageResult]] = {
    "prompts": run_prompts,
    "answers": run_answers,
    "states": run_states,
    "bench": run_bench,
}
