"""The start-up self-test: do the stored states say what the target itself said?

Two questions, both asked before a single step. *States*: ``argmax(lm_head(final[t]))`` must be the
engine's own greedy token at t on at least 99 % of positions; a missing or doubled final norm or
another target's head falls far below. (A public run trained ten epochs past this fault and lost
6-33 % of its acceptance.) *Order*: in answers written at temperature 0 the next id must be the
argmax too, up to near ties; states shifted by one token, or answers of another model, fall here.

Near ties are forgiven in the second question only: an engine that decodes in another batch shape
or precision than it prefills breaks ties differently (1 % of positions for a 135M model in bf16).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import SelfTestError
from dspark.hidden.record import HiddenRecord

REQUIRED_AGREEMENT = 0.99
NEAR_TIE = 0.5  # logits
MAX_POSITIONS = 4000


@dataclass(frozen=True)
class Agreement:
    """Shares in 0..1 and how many positions each was taken over."""

    states: float
    states_positions: int
    order: float
    order_positions: int


@torch.inference_mode()
def measure_agreement(
    records: Iterable[HiddenRecord], head: Tensor, norm: Callable[[Tensor], Tensor]
) -> Agreement:
    """``head`` [V, H]; ``norm`` is the target's final norm, applied once to ``pre`` records."""
    states = states_total = order = order_total = 0
    for record in records:
        greedy = record.temperature == 0
        if states_total >= MAX_POSITIONS and (not greedy or order_total >= MAX_POSITIONS):
            continue
        where = record.loss_mask[1:].bool().nonzero().squeeze(-1)
        h = record.final[where].to(head.dtype).to(head.device)
        logits = (h if record.norm_state == "post" else norm(h)) @ head.T
        states += int((logits.argmax(-1).cpu() == record.greedy[where]).sum())
        states_total += len(where)
        if greedy:
            following = record.ids[where + 1].long().to(head.device).unsqueeze(-1)
            gap = logits.max(-1).values - logits.gather(-1, following).squeeze(-1)
            order += int((gap <= NEAR_TIE).sum())
            order_total += len(where)
    return Agreement(
        states / max(states_total, 1), states_total, order / max(order_total, 1), order_total
    )


def require_sound_states(
    records: Iterable[HiddenRecord], head: Tensor, norm: Callable[[Tensor], Tensor]
) -> Agreement:
    """Raise unless both questions are answered on >= 99 % of positions.

    Raises:
        SelfTestError: agreement too low, or no answer was written at temperature 0.
    """
    found = measure_agreement(records, head, norm)
    if found.order_positions == 0:
        raise SelfTestError(
            expected="some answers written at temperature 0",
            found="none",
            where="hidden-state self-test",
            fix="Add 0.0 to regenerate.temperatures: greedy answers prove the states.",
        )
    if found.states < REQUIRED_AGREEMENT:
        raise SelfTestError(
            expected="argmax(lm_head(norm(h))) = the engine's own greedy token on >= 99 % of "
            "positions",
            found=f"{found.states:.1%} of {found.states_positions}",
            where="hidden-state self-test",
            fix="States lie on the wrong side of the final norm or belong to another target; "
            "capture again with the target that serves.",
        )
    if found.order < REQUIRED_AGREEMENT:
        raise SelfTestError(
            expected="greedy answers that follow the states' argmax on >= 99 % of positions",
            found=f"{found.order:.1%} of {found.order_positions}",
            where="hidden-state self-test",
            fix="States are shifted by a token or answers came from another model; regenerate and "
            "capture with one target.",
        )
    return found
