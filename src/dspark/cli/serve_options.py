"""What ``dspark serve`` is told, apart from the verb so that its signature stays readable."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

EngineArgs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ENGINE ARGS]", help="Passed on to vLLM or ATOM, after --."),
]
EngineName = Annotated[
    str, typer.Option(help="embedded, vllm (--plan only prints its line), atom (with --plan).")
]
Target = Annotated[
    str | None, typer.Option(help="Folder or hub id; the one in provenance when left out.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(envvar="DSPARK_API_KEY", help="Key that clients must send; repeatable."),
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=2, help="Context in tokens; left out, as the draft was made.")
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Answers decoded together.")]
MaxWaiting = Annotated[int, typer.Option(min=0, help="Answers that may wait; more get a 429.")]
CacheGiB = Annotated[float, typer.Option(min=0.001, help="Memory for cached rows.")]


OffloadMemory = Annotated[
    float, typer.Option(min=0, help="GiB of host memory for pages that leave the cache.")
]
OffloadDisk = Annotated[
    float, typer.Option(min=0, help="GiB on disk for those that leave host memory.")
]
OffloadPath = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where --offload-disk puts them.")
]
OffloadFP8 = Annotated[
    bool, typer.Option("--offload-fp8", help="Keep them as fp8: smaller, and rounded.")
]


class Role(StrEnum):
    """The two halves of serving on two machines; see ``dspark.server.handover``."""

    prefill = "prefill"
    decode = "decode"


RoleOption = Annotated[
    Role | None,
    typer.Option("--role", help="prefill computes prompts for others, decode has it done there."),
]
Peer = Annotated[
    str | None,
    typer.Option(
        metavar="tcp://HOST:PORT", help="prefill: where decode servers come; decode: that place."
    ),
]
Patience = Annotated[
    float, typer.Option(min=0, help="Seconds a prompt waits for its pages (decode).")
]


class Scheduler(StrEnum):
    """The engine's schedulers; see ``dspark.config.engine.EngineOptions``."""

    fixed = "fixed"
    threshold = "threshold"
    sync = "sync"
    async_ = "async"


SchedulerOption = Annotated[
    Scheduler | None,
    typer.Option(
        "--scheduler",
        help="Which drafted tokens are verified: fixed all (default); sync and async what pays.",
    ),
]
SpeculativeConfig = Annotated[
    str | None, typer.Option(metavar="JSON", help="vLLM's keys, as a JSON object.")
]
ServedName = Annotated[
    str | None, typer.Option(help="Name in the API; the target's when left out.")
]
Drain = Annotated[int, typer.Option(min=0, help="Seconds to finish answers when stopped.")]
Probe = Annotated[
    bool, typer.Option("--probe/--no-probe", help="Measure acceptance before serving.")
]
Plan = Annotated[
    bool, typer.Option("--plan", help="Print memory and capacity, or the engine's line, only.")
]


# Recipe keys in library errors, and the option that sets the same thing here.
NAMES = {
    "target.max_context": "--max-model-len",
    "offload_path": "--offload-path",
    "offload_host_gib": "--offload-memory",
}


@dataclass(frozen=True)
class ServeOptions:
    """Everything but the engine's name and what is passed on to others."""

    draft: Path
    target: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_waiting: int = 64
    cache_gib: float = 1.0
    scheduler: str | None = None
    speculative_config: str | None = None
    served_model_name: str | None = None
    drain: int = 60
    probe: bool = True
    offload_memory: float = 0.0
    offload_disk: float = 0.0
    offload_path: Path | None = None
    offload_fp8: bool = False
    role: str | None = None
    peer: str | None = None
    patience: float = 10.0

    @property
    def for_our_engine(self) -> list[str]:
        """Options that were set and that another engine has under names of its own."""
        fields = ("host", "port", "max_model_len", "max_num_seqs", "speculative_config",
                  "served_model_name", "scheduler", "offload_memory", "offload_disk",
                  "offload_path", "offload_fp8", "role", "peer", "patience")  # fmt: skip
        return [
            f"--{name.replace('_', '-')}"
            for name in fields
            if getattr(self, name) != getattr(ServeOptions, name)
        ]
