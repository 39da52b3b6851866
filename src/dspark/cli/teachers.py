"""Teachers as processes: ``dspark teach``, and the ones a trainer starts beside itself."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import torch

from dspark.artifacts import atomic_json
from dspark.capture.teacher import EmbeddedMaker, teach
from dspark.cli.context import RunContext
from dspark.cli.vllm_capture import become_teacher
from dspark.config.architecture import DraftConfig
from dspark.config.resolve import draft_config
from dspark.data.chat import end_ids
from dspark.data.conversation import EMBEDDED, Maker
from dspark.data.played import Played
from dspark.data.renderer import Renderer
from dspark.engine.generate import BatchGenerator
from dspark.errors import ConfigError
from dspark.hidden.mail import rank_endpoint
from dspark.hidden.rows import Teaching
from dspark.hidden.writer import TeacherLink

RESTARTS = 3
POLL = 0.5  # seconds


def target_hash(run: RunContext) -> str:
    """Which weights teach: hash of the target's files, without paths."""
    hashes = run.file_hashes
    text = json.dumps([hashes.weights, hashes.config])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def teaching_of(run: RunContext, config: DraftConfig) -> Teaching:
    """What the trainer of this recipe expects of every teacher."""
    return Teaching(
        layer_ids=config.target_layer_ids,
        stream="residual",
        norm_state="post",
        hidden=config.target_hidden_size,
        vocabulary=config.vocab_size,
        target=target_hash(run),
    )


def answering(run: RunContext, config: DraftConfig) -> tuple[BatchGenerator, Played]:
    """Who answers single prompts and who plays conversations, on one target."""
    recipe, target, section = run.recipe, run.target, run.recipe.regenerate
    model = target.build(config.target_layer_ids, section.precision)
    renderer = Renderer(target.tokenizer, end_ids(target), section)

    def engine_of(capacity: int) -> BatchGenerator:
        return BatchGenerator(model, renderer.end_ids, section.batch_size, capacity)

    maker = Maker(recipe.target.source, run.fetched_files.revision, EMBEDDED)
    engine = engine_of(recipe.prompts.max_prompt_tokens + section.max_new_tokens)
    return engine, Played(engine_of, renderer, section, maker)


def run_teacher(run: RunContext, connect: str | None, ranks: int, name: str | None) -> int:
    """Serve the trainer of this recipe until it has finished; the number of records sent.

    With ``capture.engine: vllm`` this process becomes vLLM's, and does not return.

    Raises:
        ConfigError: a recipe without a stream, no endpoint, or no environment with vLLM.
        StreamError: refused, or the trainer is gone.
    """
    recipe = run.recipe
    endpoint = connect or recipe.train.stream.endpoint
    if recipe.train.mode == "offline" or endpoint is None:
        raise ConfigError(
            expected="train.mode replay or online, and an endpoint",
            found=f"mode {recipe.train.mode}, endpoint {endpoint}",
            where="dspark teach",
            fix="Set train.mode, and train.stream.endpoint or --connect tcp://TRAINER:PORT.",
        )
    endpoints = [rank_endpoint(endpoint, rank) for rank in range(ranks)]
    config = draft_config(recipe.draft, run.shape)
    if recipe.capture.engine == "vllm":
        become_teacher(run, teaching_of(run, config), endpoints, name)
    target, section = run.target, recipe.capture
    engine, player = None, None
    if recipe.train.mode == "online":
        engine, player = answering(run, config)
    maker = EmbeddedMaker(
        target.build(config.target_layer_ids, section.precision),
        target_hash(run),
        batch_tokens=section.batch_tokens,
        dtype=getattr(torch, section.dtype),
        engine=engine,
        player=player,
        keep_truncated=recipe.regenerate.on_length != "drop",
    )
    link = TeacherLink(
        endpoints, maker.teaching, name=name, lost_seconds=recipe.train.stream.stall_seconds
    )
    try:
        with run.screen.bar("records taught", None) as bar:
            return teach(link, maker, bar.advance)
    finally:
        link.close()
        if player is not None and player.tally:
            told = ", ".join(f"{name} {count}" for name, count in sorted(player.tally.items()))
            run.screen.stage("teach", f"conversations: {told}")


class Teachers(threading.Thread):
    """``train.stream.teachers`` processes of this recipe; one that dies is started again.

    Their output goes to ``teacher-N.log`` in ``folder``.
    """

    def __init__(self, run: RunContext, folder: Path, endpoint: str, ranks: int) -> None:
        super().__init__(name="teachers", daemon=True)
        recipe = folder / "teacher.json"
        atomic_json(recipe, run.recipe.model_dump(mode="json"))
        connect = endpoint.replace("0.0.0.0", "127.0.0.1").replace("*", "127.0.0.1")
        command = [sys.executable, "-m", "dspark", "teach", str(recipe), "--connect", connect]
        self.command = [*command, "--ranks", str(ranks)]
        self.folder = folder
        self._over = threading.Event()
        self._left = RESTARTS
        self.processes = [self._begin(i) for i in range(run.recipe.train.stream.teachers)]
        self.start()

    def _begin(self, number: int) -> subprocess.Popen[bytes]:
        with (self.folder / f"teacher-{number}.log").open("ab") as log:
            # Ctrl-C in a terminal is the trainer's to answer.
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self) -> None:
        while not self._over.wait(POLL):
            for number, process in enumerate(self.processes):
                if process.poll() not in (None, 0) and self._left > 0:
                    self._left -= 1
                    self.processes[number] = self._begin(number)

    def end(self) -> None:
        """Give them two seconds to go by themselves."""
        self._over.set()
        self.join()
        for process in self.processes:
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
