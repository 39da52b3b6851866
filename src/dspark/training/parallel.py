"""One rank or many: who computes which micro-batch, how weights are sharded, how sums are taken.

Every optimiser window has ``accumulate`` micro-batches, whatever the number of ranks: rank r of n
computes those whose number is r modulo n. Losses are divided by the slot weight of the *whole*
window, so gradients are summed over ranks and never averaged, and a run is the same run on any
number of ranks up to the order of its sums.

Weights, gradients and moments are sharded with FSDP2 (``fully_shard``), a layer at a time: fp32
master shards, gathered in bf16 for computing, gradients reduced in fp32. The frozen embedding stays
whole on every rank: nothing of it is ever reduced.
"""

from __future__ import annotations

import os
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dspark.errors import TrainingError
from dspark.model.draft import DSparkDraft
from dspark.training.step import SHARDED_STEP, checked_layer_step

GLOO_THREADS = "pt_gloo"
END_SECONDS = 10.0


class Solo:
    """One process, nothing sharded."""

    rank, size = 0, 1
    sharded = False

    def shard(self, step: nn.Module, draft: DSparkDraft, dtype: torch.dtype | None) -> None:
        """Nothing to do."""

    def last_micro_batch(self, step: nn.Module, last: bool) -> None:
        """Nothing is reduced."""

    def sums(self, values: list[float]) -> list[float]:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def wait(self) -> None:
        """Nobody to wait for."""

    def end(self) -> None:
        """Nothing was started."""


class Ranks(Solo):
    """The ranks of ``torchrun``: gloo on CPUs, NCCL on CUDA devices."""

    sharded = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @torch.no_grad()
    def shard(self, step: nn.Module, draft: DSparkDraft, dtype: torch.dtype | None) -> None:
        """Shard ``step``, which holds ``draft``; ``dtype`` is what it computes in (None: fp32).

        Every rank starts from rank 0's weights.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            MixedPrecisionPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        for tensor in (*draft.parameters(), *draft.buffers()):
            # Complex numbers (rotations) are not known to every backend.
            dist.broadcast(torch.view_as_real(tensor) if tensor.is_complex() else tensor.data, 0)
        mesh = init_device_mesh(self.device.type, (self.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        embedding: Any = draft.embed_tokens.weight
        modules: list[Any] = [*draft.draft_layers, step]
        for module in modules:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                ignored_params={embedding} if module is step else None,
            )
            module.set_gradient_divide_factor(1.0)
            if self.device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)
        for layer in draft.draft_layers:
            # A layer is entered by this name, so its weights are gathered once for all it does.
            setattr(layer, SHARDED_STEP, types.MethodType(checked_layer_step, layer))
            register_fsdp_forward_method(layer, SHARDED_STEP)

    def last_micro_batch(self, step: Any, last: bool) -> None:
        """Gradients are reduced once a window, behind its last micro-batch."""
        step.set_requires_gradient_sync(last)

    def sums(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(v) for v in tensor]

    def any(self, flag: bool) -> bool:
        return self.sums([float(flag)])[0] > 0

    def wait(self) -> None:
        dist.barrier()

    def end(self) -> None:
        """Leave the group, and wait until its threads have nothing left to do.

        Gloo's threads outlive their group while a module or a mesh refers to it. One that drops a
        tensor while the interpreter goes away asks for its lock, and the process is aborted:
        "terminate called without an active exception" (pytorch/pytorch issue 190489).
        """
        dist.destroy_process_group()
        wait_until_idle(GLOO_THREADS, END_SECONDS)


def wait_until_idle(name: str, seconds: float) -> bool:
    """Wait until the threads of this process that are called ``name``... neither run nor wake while
    nobody keeps the interpreter's lock from them; False if that takes longer. On Linux; elsewhere
    nothing is waited for.
    """
    before: list[tuple[bool, list[str]]] | None = None
    deadline = time.monotonic() + seconds
    while (now := _activity(name)) != before or any(not asleep for asleep, _ in now):
        if time.monotonic() > deadline:
            return False
        before = now
        time.sleep(0.01)
    return True


def _activity(name: str) -> list[tuple[bool, list[str]]]:
    """Of each thread called ``name``...: whether it sleeps, and how often it was switched to."""
    found = []
    for path in sorted(Path("/proc/self/task").glob("*/status")):
        lines = path.read_text().splitlines()
        if lines[0].split(maxsplit=1)[1].startswith(name):
            asleep = any(line.startswith("State:") and "S (" in line for line in lines)
            found.append((asleep, [line for line in lines if "ctxt_switches" in line]))
    return found


def launched(device: torch.device) -> Solo:
    """The ranks this process belongs to, as ``torchrun`` says it; else one rank alone."""
    return Ranks(device) if "TORCHELASTIC_RUN_ID" in os.environ else Solo()


def require_even(accumulate: int, group: Solo) -> None:
    """Every rank runs the same number of micro-batches, or the ranks would wait for ever.

    Raises:
        TrainingError: the window cannot be shared out.
    """
    if accumulate % group.size:
        raise TrainingError(
            expected=f"train.accumulate that {group.size} ranks share evenly",
            found=str(accumulate),
            where="train.accumulate",
            fix=f"Set it to {accumulate + -accumulate % group.size}; it counts the micro-batches "
            "of all ranks together, and results do not depend on their number.",
        )


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard (a collective), or the tensor itself."""
    gather = getattr(tensor, "full_tensor", None)
    found: Tensor = gather() if gather is not None else tensor
    return found


@torch.no_grad()
def whole_weights(draft: DSparkDraft) -> dict[str, Tensor]:
    """Full weights by name on the CPU; every rank must call it."""
    return {name: whole(value).cpu() for name, value in draft.state_dict().items()}
