"""How teachers and trainer are connected, and which machines a plan is made for. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from dspark.config.architecture import Frozen

PositiveFloat = Annotated[float, Field(gt=0)]


class StreamSection(Frozen):
    """The live stream of hidden states (modes ``replay`` and ``online``).

    ``teachers`` are started beside the trainer, on its machine; with 0 they are started elsewhere
    (``dspark teach``) and connect to ``endpoint``, ``tcp://HOST:PORT``, on which rank r listens at
    PORT + r. Without an endpoint a socket file in the run folder serves.

    ``pool_gb``: 1e9 bytes per trainer rank, asked for and not yet in the optimiser; less than one
    optimiser window is refused. ``taps: fp8`` halves the traffic and is lossy. ``held_rows`` are
    kept back for evaluation, ``warm_rows`` are looked at by self-test and warm starts.
    """

    transport: Literal["tcp", "shm", "disk", "mooncake"] = "tcp"
    endpoint: str | None = Field(default=None, pattern=r"^tcp://[^/]+:[0-9]{1,5}$")
    teachers: NonNegativeInt = 1
    pool_gb: PositiveFloat = 2.0
    taps: Literal["stored", "fp8"] = "stored"
    held_rows: PositiveInt = 64
    warm_rows: PositiveInt = 64
    dead_seconds: float = Field(default=10.0, ge=2)
    stall_seconds: PositiveFloat = 600.0


class ClusterSection(Frozen):
    """What ``--plan`` holds a run against. GB are 1e9 bytes, of one device unless said.

    ``teacher_tokens_per_second`` is one teacher's prefill (replay) or answering (online) rate as
    measured; left out, it follows from ``teacher_tflops`` of all its devices. ``step_share`` is the
    share of peak arithmetic that training reaches.
    """

    trainer_ranks: PositiveInt = 1
    device_gb: PositiveFloat = 80.0
    host_gb: PositiveFloat = 512.0
    device_tflops: PositiveFloat = 400.0
    step_share: float = Field(default=0.35, gt=0, le=1)
    teachers: PositiveInt = 1
    teacher_tokens_per_second: PositiveFloat | None = None
    teacher_tflops: PositiveFloat | None = None
    network_gbit: PositiveFloat = 100.0
