"""The train stage: where its states come from, who teaches, and what is written at the end."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.artifacts import atomic_json
from dspark.checkpoint.draft import TARGET_NOTE, load_draft, save_draft
from dspark.checkpoint.sizes import WIDTH
from dspark.checkpoint.tensors import digest_of
from dspark.cli.context import RunContext, StageResult
from dspark.cli.provenance import draft_provenance
from dspark.cli.stages import STATES, checked_draft_config
from dspark.cli.teachers import Teachers, teaching_of
from dspark.cli.vllm_capture import vllm_model
from dspark.config.architecture import DraftConfig
from dspark.data.chat import end_ids, prompt_ids
from dspark.data.played import prompt_row
from dspark.data.renderer import Renderer
from dspark.data.shards import read_prompts
from dspark.decoding.acceptance import AcceptanceCounter
from dspark.decoding.params import SamplingParams
from dspark.engine.decode import Decoder
from dspark.engine.drafter import Drafter
from dspark.hidden.answers import read_answers
from dspark.hidden.disk import DiskStore
from dspark.hidden.mail import rank_endpoint
from dspark.hidden.rows import Row
from dspark.model.draft import DSparkDraft
from dspark.training.checkpoint import BEST
from dspark.training.checkpoint import FILE as RESUME_FILE
from dspark.training.checkpoint import FOLDER as RESUME_FOLDER
from dspark.training.parallel import Solo, launched
from dspark.training.stage import TargetParts, TrainedDraft, train_draft
from dspark.training.streamed import Sizes, StreamPlan


def training_rows(run: RunContext) -> list[Row]:
    """What a teacher is asked: cached answers to replay, or prompts to answer."""
    if run.recipe.train.mode == "replay":
        return [
            Row(a.id, a.category, a.temperature, a.ids, a.prompt_length, loss_mask=a.loss_mask)
            for a in read_answers(run.folder("answers"))
        ]
    section, target = run.recipe.regenerate, run.target
    renderer = Renderer(target.tokenizer, end_ids(target), section)
    return [
        prompt_row(prompt, section, renderer, run.recipe.target.max_context)
        for prompt in read_prompts(run.folder("prompts"), "train")
        if prompt.messages  # somebody else's ids: there is nothing to ask
    ]


def stream_name(run: RunContext, rank: int) -> str:
    """Letters and digits that are this run folder's and this rank's alone, on any machine."""
    text = f"{run.folder('draft').resolve()}"
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}r{rank}"


def local_endpoint(run: RunContext) -> str:
    """Where rank 0 listens when the recipe names no endpoint: a short path in the system's
    temporary folder, because socket paths may not be long."""
    name = stream_name(run, 0)[:16]
    return f"ipc://{tempfile.gettempdir()}/dspark-{name}"


@contextmanager
def streamed(
    run: RunContext, config: DraftConfig, group: Solo, folder: Path
) -> Iterator[StreamPlan]:
    """The opened stream of this rank; rank 0 also starts the recipe's teachers.

    Raises:
        ConfigError: teachers in vLLM, and no environment with it.
    """
    section = run.recipe.train
    if run.recipe.capture.engine == "vllm" and section.stream.teachers and group.rank == 0:
        vllm_model(run)  # written out here once, not by every teacher
    sizes = Sizes(
        len(config.target_layer_ids), config.target_hidden_size, WIDTH[run.recipe.capture.dtype]
    )
    plan = StreamPlan(training_rows(run), section, config.block_size, sizes, group)
    endpoint = section.stream.endpoint or local_endpoint(run)
    bodies = folder / "bodies"
    if section.stream.transport == "disk":
        bodies.mkdir(exist_ok=True)
    settings = plan.settings(
        rank_endpoint(endpoint, group.rank), stream_name(run, group.rank), bodies
    )
    plan.open(settings, teaching_of(run, config))
    teachers = Teachers(run, folder, endpoint, group.size) if group.rank == 0 else None
    try:
        yield plan
        plan.finish()
    except BaseException:
        plan.close()
        raise
    finally:
        if teachers is not None:
            teachers.end()


def run_draft(run: RunContext, folder: Path) -> StageResult:
    """Hidden states -> checkpoint with provenance, and ``training.json``."""
    config = checked_draft_config(run)
    model = run.target.build(config.target_layer_ids)
    parts = TargetParts(model.head_weight().float(), model.embedding_weight(), model.norm)
    start = None
    if run.recipe.train.init_from is not None:
        start, _ = load_draft(Path(run.recipe.train.init_from), head=parts.head)
    group = launched(parts.head.device)
    arguments: dict[str, Any] = {
        "vocabulary_size": run.recipe.draft.vocabulary_size,
        "start": start,
        "group": group,
        "decode": real_decoding(run, config),
        "on_note": lambda text: run.screen.console.print(f"{'':>12}{text}", highlight=False),
    }
    with run.screen.bar("training steps", None) as bar:

        def on_step(step: int, total: int, row: dict[str, Any]) -> None:
            bar.set(step, total, step_note(row))

        arguments["on_step"] = on_step
        section = run.recipe.train
        if section.mode == "offline":
            store = DiskStore(run.folder("states") / STATES)
            records = [store.get(i) for i in store.ids()]
            trained = train_draft(config, parts, records, section, folder, **arguments)
        else:
            with streamed(run, config, group, folder) as plan:
                trained = train_draft(config, parts, plan, section, folder, **arguments)
    result = _written(run, folder, trained, parts) if group.rank == 0 else StageResult({}, {}, "")
    group.wait()
    group.end()
    return result


def step_note(row: dict[str, Any]) -> str:
    """Behind the bar: losses, and of a stream its pool and how long the trainer waited."""
    note = f"ce {row['ce']:.2f}  l1 {row['l1']:.2f}"
    if "stream_records" in row:
        share = 100 * row["stream_wait_seconds"] / max(row["seconds"], 1e-9)
        used = 100 * row["stream_pool_bytes"] / row["stream_pool_limit"]
        rate = row["stream_tokens"] / max(row["seconds"], 1e-9)
        note += f"  teacher {rate:.0f} tok/s  wait {min(share, 100):.0f} %  pool {used:.0f} %"
    return note


def _written(
    run: RunContext, folder: Path, trained: TrainedDraft, parts: TargetParts
) -> StageResult:
    target = run.target
    provenance = draft_provenance(run, target, trained)
    embedding = parts.embedding.detach().to("cpu", target.dtype).contiguous()
    provenance[TARGET_NOTE] = digest_of(embedding)["sha256"]
    save_draft(folder, trained.draft, provenance, target.dtype)
    atomic_json(folder / "training.json", trained.history)
    last = trained.history["evals"][-1]
    steps = trained.history["steps"][-1]["step"]
    line = f"{steps} steps, teacher-forced acceptance length {last['tau_all']:.2f}: {folder}"
    notes = {"tau": last["tau_all"]}
    if "decoded" in trained.history:
        best = max(trained.history["decoded"], key=lambda r: float(r["acceptance_length"]))
        notes |= {"decoded": best["acceptance_length"], "best_step": best["step"]}
        notes["expected_minus_decoded"] = last["tau_all"] - best["acceptance_length"]
        line = (
            f"{steps} steps, decoded acceptance length {best['acceptance_length']:.2f} (expected "
        )
        line += f"{last['tau_all']:.2f}), of step {best['step']}: {folder}"
    counts = {"steps": steps, "trainable_parameters": trained.parameters}
    return StageResult(counts, notes, line, working_files(folder))


def working_files(folder: Path) -> tuple[str, ...]:
    """What only served to resume and to talk to teachers."""
    patterns = (
        RESUME_FILE,
        BEST,
        f"{RESUME_FOLDER}/**/*",
        "bodies/*",
        "teacher*.json",
        "teacher-*.log",
    )
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return tuple(sorted(path.relative_to(folder).as_posix() for path in found if path.is_file()))


def real_decoding(run: RunContext, config: DraftConfig) -> Callable[[DSparkDraft], float] | None:
    """Greedy decoding of the first held-out prompt of every category, as the bench does it."""
    if not run.recipe.train.decode_every:
        return None
    prompts = read_prompts(run.folder("prompts"), "held_out")
    first = list({q.category: q for q in reversed(prompts)}.values())
    target, section = run.target, run.recipe.bench
    model = target.build(config.target_layer_ids)
    ids = [prompt_ids(target.tokenizer, q.messages, q.tools) for q in first]
    params = SamplingParams(temperature=0.0, max_new_tokens=section.max_new_tokens)

    def decode(draft: DSparkDraft) -> float:
        drafter = Drafter(draft.to(target.dtype), model.head_weight())
        decoder = Decoder(model, drafter, end_ids(target))
        total = AcceptanceCounter(config.block_size)
        for one in ids:
            counter = decoder.generate(one, params).counter
            if counter is not None:
                total.merge(counter)
        return total.acceptance_length if total.steps else 1.0

    return decode
