"""A teacher and trainer of the tiny target in processes of their own, on one set of prompts.

``python streaming_run.py teach ENDPOINTS NAME`` is a teacher; ``... train FOLDER ENDPOINT MODE
[KEY=VALUE]`` a trainer (also under torchrun), which writes ``result.json`` at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, tiny_draft, tiny_section, tiny_target

from dspark.capture.embedded import replay_group
from dspark.capture.teacher import EmbeddedMaker, teach
from dspark.config.stream import StreamSection
from dspark.engine.generate import BatchGenerator
from dspark.hidden.answers import Answer
from dspark.hidden.mail import rank_endpoint
from dspark.hidden.record import HiddenRecord
from dspark.hidden.rows import Row
from dspark.hidden.writer import TeacherLink
from dspark.training.parallel import launched, whole_weights
from dspark.training.streamed import Sizes, StreamPlan
from dspark.training.trainer import Trainer

ROWS, NEW_TOKENS = 26, 12
SECTION: dict[str, Any] = {
    "order": "shuffled",
    "batch_size": 2,
    "accumulate": 2,
    "epochs": 3.0,
    "eval_every": 1000,
    "checkpoint_every": 2,
}


def prompts() -> list[Row]:
    g = torch.Generator().manual_seed(5)
    rows = []
    for i in range(ROWS):
        ids = torch.randint(0, VOCAB - 1, (4 + i % 5,), generator=g).tolist()
        rows.append(
            Row(f"row-{i:03d}", "made", float(i % 2), tuple(ids), len(ids), NEW_TOKENS, seed=i)
        )
    return rows


def maker() -> EmbeddedMaker:
    target = tiny_target()
    engine = BatchGenerator(target, frozenset(), 8, 40)
    return EmbeddedMaker(
        target, "tiny", batch_tokens=256, dtype=torch.float32, engine=engine, keep_truncated=True
    )


def answered() -> list[Row]:
    """The prompts with the target's answers, each answered alone."""
    made = maker()
    rows = []
    for row in prompts():
        (record,) = made.make([row])
        rows.append(
            Row(
                row.id, row.category, row.temperature, tuple(record.ids.tolist()), row.prompt_length
            )
        )
    return rows


def offline_records(rows: list[Row]) -> list[HiddenRecord]:
    answers = [
        Answer(
            id=r.id,
            category=r.category,
            temperature=r.temperature,
            prompt_length=r.prompt_length,
            finish_reason="length",
            ids=r.ids,
        )
        for r in rows
    ]
    return replay_group(tiny_target(), answers, batch_tokens=256, dtype=torch.float32)


def section(mode: str, **changes: Any) -> Any:
    stream = {"pool_gb": 0.002, "warm_rows": 4, "dead_seconds": 2.0, "stall_seconds": 40.0}
    stream |= changes.pop("stream", {})
    return tiny_section(**{**SECTION, "mode": mode, "stream": StreamSection(**stream), **changes})


def summary(trainer: Trainer, history: dict[str, Any]) -> dict[str, Any]:
    weights = whole_weights(trainer.draft)
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return {
        "weights": digest.hexdigest(),
        "losses": [row["loss"] for row in history["steps"]],
        "norms": [row["grad_norm"] for row in history["steps"]],
        "tau": history["evals"][-1]["tau_all"],
    }


def train(folder: Path, endpoint: str, mode: str, **changes: Any) -> dict[str, Any]:
    """One trainer, this process; resumes what lies in ``folder``."""
    torch.set_num_threads(1)
    stop_at = changes.pop("stop_at", None)
    target = tiny_target()
    group = launched(target.device)
    draft = tiny_draft(target=target)
    own = section(mode, **changes)
    head = target.head_weight()

    def on_step(step: int, total: int, row: dict[str, Any]) -> None:
        if group.rank == 0:
            print(step, flush=True)
        while step == stop_at:
            time.sleep(0.01)

    if mode == "offline":
        rows = offline_records(answered())
        trainer = Trainer(draft, head, rows, own, folder, group=group)
        history = trainer.run(on_step)
    else:
        rows_asked = prompts() if mode == "online" else answered()
        plan = StreamPlan(
            rows_asked, own, draft.config.block_size, Sizes(2, head.shape[1], 4), group
        )
        bodies = folder / "bodies"
        bodies.mkdir(exist_ok=True)
        settings = plan.settings(
            rank_endpoint(endpoint, group.rank),
            f"t{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}r{group.rank}",
            bodies,
        )
        plan.open(settings, maker().teaching)
        held = plan.take_held()
        plan.take_warm()
        trainer = Trainer(draft, head, held, own, folder, plan=plan, group=group)
        try:
            history = trainer.run(on_step)
            plan.finish()
        except BaseException:
            plan.close()
            raise
    result = summary(trainer, history)
    if group.rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    group.wait()
    group.end()
    return result


def run_teacher(endpoints: str, name: str) -> None:
    torch.set_num_threads(1)
    made = maker()
    link = TeacherLink(endpoints.split(","), made.teaching, name=name, lost_seconds=60)
    try:
        teach(link, made)
    finally:
        link.close()


def descendants(pid: int) -> list[int]:
    """Processes below ``pid``, as /proc tells."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found


class Process:
    """One of these programs; killed when a test ends. ``ranks`` run it under torchrun."""

    def __init__(self, *arguments: str, ranks: int = 0) -> None:
        command = [sys.executable]
        if ranks:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        self.popen = subprocess.Popen(
            [*command, __file__, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            },
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it; torchrun puts its workers into sessions of their own."""
        every = [self.popen.pid, *descendants(self.popen.pid)]
        for pid in every if self.popen.poll() is None else every[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.popen.communicate()

    def reaches(self, step: int) -> None:
        """Wait until the trainer says ``step``."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.strip() == str(step):
                return
        raise AssertionError(self.popen.communicate()[1])

    def result(self, folder: Path) -> dict[str, Any]:
        _, errors = self.popen.communicate(timeout=200)
        assert self.popen.returncode == 0, errors
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found


def forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            sink.sendall(piece)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def run_wire(listen: str, to: str) -> None:
    """The network between teacher and trainer, as a process that can be killed."""
    ports = [int(e.rpartition(":")[2]) for e in (listen, to)]
    with socket.create_server(("127.0.0.1", ports[0])) as server:
        while True:
            near, _ = server.accept()
            try:
                far = socket.create_connection(("127.0.0.1", ports[1]))
            except OSError:
                near.close()
                continue
            for ends in ((near, far), (far, near)):
                threading.Thread(target=forward, args=ends, daemon=True).start()


def main(kind: str, *arguments: str) -> None:
    if kind == "wire":
        run_wire(*arguments)
        return
    if kind == "teach":
        run_teacher(*arguments)
        return
    folder, endpoint, mode, *changes = arguments
    values = {k: json.loads(v) for k, v in (c.split("=", 1) for c in changes)}
    train(Path(folder), endpoint, mode, **values)


if __name__ == "__main__":
    main(*sys.argv[1:])
