"""One record of hidden states: what the target felt while it wrote one answer.

A record carries everything training needs of one sequence: token ids, the loss mask, the tapped
states, the last state after the final norm, and ``log_z`` (log-partition of the target's logits),
which lets the trainer know exact probabilities of a few tokens without the whole vocabulary.

Every record says which layers were tapped and whether ``final`` is before or after the final norm:
a draft distilled from pre-norm states looks trained and loses a third of its acceptance.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from dspark.errors import DamagedArtifactError

NormState = Literal["pre", "post"]
TappedStream = Literal["residual", "prefix_sum", "mixed"]
"""What a tap is: the residual stream, or one of the two streams of a target with attention
residuals (Kimi-K3): the plain prefix sum, which engines tap by default, or the mixed stream."""


def layer_hash(layer_ids: tuple[int, ...], stream: str) -> str:
    """16 hex digits that two ends of a wire compare: which layers, and of which stream."""
    text = json.dumps([list(layer_ids), stream])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class HiddenRecord:
    """Shapes: ids, loss_mask, greedy, log_z [S]; taps [S, L, H]; final [S, H].

    ``greedy`` is the engine's own argmax token after each position, taken from its logits before
    anything was rounded for storage; the trainer's self-test must reproduce it. dtypes: ids and
    greedy int32, loss_mask uint8, log_z fp32 (natural log), taps and final bf16 or fp32. Where
    ``greedy`` is -1 and ``log_z`` NaN they were not computed (allowed before the answer only).
    ``stream`` says what was tapped, ``engine`` who made the states (name, version, precision).
    """

    id: str
    category: str
    temperature: float
    layer_ids: tuple[int, ...]
    norm_state: NormState
    ids: Tensor
    loss_mask: Tensor
    taps: Tensor
    final: Tensor
    greedy: Tensor
    log_z: Tensor
    stream: TappedStream = "residual"
    engine: str = ""

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def check(self) -> HiddenRecord:
        """Refuse shortened or non-finite states (an engine's prefix cache can swallow rows).

        Raises:
            DamagedArtifactError: a tensor's length, layer count or content is wrong.
        """
        length = len(self)
        sizes = {
            "loss_mask": (tuple(self.loss_mask.shape), (length,)),
            "greedy": (tuple(self.greedy.shape), (length,)),
            "log_z": (tuple(self.log_z.shape), (length,)),
            "final": (tuple(self.final.shape), (length, self.final.shape[-1])),
            "taps": (
                tuple(self.taps.shape),
                (length, len(self.layer_ids), self.final.shape[-1]),
            ),
        }
        for name, (found, expected) in sizes.items():
            if found != expected:
                raise _damaged(self.id, f"{name} of shape {expected}", f"shape {found}")
        for name in ("taps", "final"):
            if not bool(torch.isfinite(getattr(self, name)).all()):
                raise _damaged(self.id, f"finite {name}", "NaN or infinity")
        supervised = self.loss_mask.bool()
        if not bool(torch.isfinite(self.log_z[supervised]).all()):
            raise _damaged(self.id, "a finite log_z all over the answer", "NaN or infinity")
        if bool((self.greedy[supervised] < 0).any()):
            raise _damaged(self.id, "the target's own token all over the answer", "none (-1)")
        return self


def _damaged(record: str, expected: str, found: str) -> DamagedArtifactError:
    return DamagedArtifactError(
        expected=expected,
        found=found,
        where=f"hidden record {record}",
        fix="Delete the states folder and capture again.",
    )


class HiddenStore(Protocol):
    """Where records are put and taken from, at rest or in flight.

    ``ack`` says a record's gradient is in the optimiser and it may be dropped by stores that own
    memory; ``abort`` gives it back for another try; ``gc`` removes what nobody owns.
    """

    def put(self, record: HiddenRecord) -> None: ...

    def get(self, record_id: str) -> HiddenRecord: ...

    def ids(self) -> list[str]: ...

    def ack(self, record_id: str) -> None: ...

    def abort(self, record_id: str) -> None: ...

    def gc(self) -> int: ...

    def health(self) -> dict[str, int]: ...
