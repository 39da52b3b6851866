"""What happened while training: a ledger of rows, metric logs, and a watch over standing still."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from dspark.artifacts import atomic_write, storage_guard
from dspark.errors import MissingDependencyError

LEDGER = "ledger.jsonl"
METRICS = "metrics.jsonl"
STALLED = 70  # exit status (EX_SOFTWARE)


class StepLines:
    """JSON Lines with a ``step`` each, of one file per rank; lines behind a checkpoint are cut when
    a run resumes, because those steps are taken again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int) -> None:
        """Keep whole lines of steps up to ``step``."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, LookupError, TypeError):
                continue  # torn by a kill
        atomic_write(self.path, "".join(kept))

    def write(self, row: Mapping[str, Any]) -> None:
        with storage_guard(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class Sink(Protocol):
    """Takes figures of a step; told first which step a run resumes behind."""

    def resume(self, step: int) -> None: ...

    def write(self, row: Mapping[str, Any]) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _absent("tensorboard") from error
        self.folder, self.made = folder / "tensorboard", SummaryWriter
        self.writer: Any = None

    def resume(self, step: int) -> None:
        # Steps behind the checkpoint are taken again: their old figures are purged.
        make: Any = self.made
        self.writer = make(self.folder, purge_step=step + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in _figures(row):
            self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()


class _WandB:
    def __init__(self, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _absent("wandb") from error
        # The same folder is the same run: a resumed one goes on in it. Steps that are taken again
        # are the same steps, and W&B keeps the first of each.
        name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self.run = wandb.init(dir=str(folder), id=name, resume="allow")

    def resume(self, step: int) -> None:
        """W&B knows."""

    def write(self, row: Mapping[str, Any]) -> None:
        self.run.log(dict(_figures(row)), step=row["step"])


def _absent(name: str) -> MissingDependencyError:
    return MissingDependencyError(
        expected=f"the package {name}",
        found="not installed",
        where=f"train.log: {name}",
        fix=f"pip install {name}, or take it out of train.log.",
    )


def _figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, (int, float)) and name != "step":
            yield name, float(value)
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{k}", v) for k, v in _figures(value))


class MetricLog:
    """``names`` as in ``train.log``; only rank 0 has any.

    Raises:
        MissingDependencyError: tensorboard or wandb is asked for and not installed.
    """

    def __init__(self, names: tuple[str, ...], folder: Path) -> None:
        self.sinks: list[Sink] = [StepLines(folder / METRICS)] if "jsonl" in names else []
        if "tensorboard" in names:
            self.sinks.append(_TensorBoard(folder))
        if "wandb" in names:
            self.sinks.append(_WandB(folder))

    def resume(self, step: int) -> None:
        for sink in self.sinks:
            sink.resume(step)

    def write(self, row: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(row)


class Watchdog:
    """Ends the process, with status :data:`STALLED`, when the trainer itself stands still.

    A hung collective or file system raises nothing. While the trainer waits for data
    (:meth:`waiting`) the stream's own limit counts, which knows the stage.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._beat = time.monotonic()
        self._waits = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        self._beat = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self.beat()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            silent = time.monotonic() - self._beat
            if silent > self.seconds and not self._waits:
                sys.stderr.write(
                    f"stage: trainer: no micro-batch finished for {silent:.0f} s "
                    "(train.stream.stall_seconds). All threads:\n"
                )
                faulthandler.dump_traceback(all_threads=True)
                os._exit(STALLED)
