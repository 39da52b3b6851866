"""A server's own totals, and what may be said from their difference.

vLLM (and our server) publish Prometheus counters: ``vllm:spec_decode_num_drafts``,
``..._num_draft_tokens``, ``..._num_accepted_tokens`` and the same per position, beside
``vllm:request_success`` and ``vllm:generation_tokens``. ATOM publishes
``/debug/mtp_stats``: total drafted and accepted tokens and how many steps accepted n. Both count
everything that the server does. So a difference is only believed when the server's own number of
requests and tokens agrees with ours; where it publishes neither, steps and accepted tokens must
make up the tokens that we got. Counters that went down were reset: no figure then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from dspark.bench.play.turn import Accepted, Counters

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIX = "vllm:spec_decode_num_"
_SLOTS = {
    f"{_PREFIX}accepted_tokens_per_pos": "accepted",
    "dspark:admitted_tokens_per_pos": "admitted",
}


def parse_metrics(text: str, model: str | None = None) -> Counters | None:
    """Counters from a ``/metrics`` page; None where it has none of speculation.

    Args:
        model: only samples of this ``model_name`` (those without the label count too).
    """
    totals: dict[str, float] = {}
    slots: dict[str, dict[int, float]] = {"accepted": {}, "admitted": {}}
    for name, labels, value in _samples(text):
        if model is not None and labels.get("model_name", model) != model:
            continue
        name = name.removesuffix("_total")
        if name in _SLOTS:
            own, position = slots[_SLOTS[name]], labels.get("position", "")
            if position.isdecimal():
                own[int(position)] = own.get(int(position), 0.0) + value
        else:
            totals[name] = totals.get(name, 0.0) + value
    if f"{_PREFIX}drafts" not in totals:
        return None
    offered = totals.get(f"{_PREFIX}draft_tokens", 0.0)
    accepted = _counted(
        steps=int(totals[f"{_PREFIX}drafts"]),
        # vLLM's figure is what was offered to verification; ours keeps the two apart.
        drafted=int(totals.get("dspark:drafted_tokens", offered)),
        admitted=_whole(totals.get("dspark:admitted_tokens")),
        accepted=int(totals.get(f"{_PREFIX}accepted_tokens", 0)),
        accepted_at=_slots(slots["accepted"], totals.get(f"{_PREFIX}accepted_tokens", 0)),
        admitted_at=_slots(slots["admitted"], None),
    )
    if accepted is None:
        return None
    return Counters(
        source="vllm-counters",
        accepted=accepted,
        requests=_whole(totals.get("vllm:request_success")),
        tokens=_whole(totals.get("vllm:generation_tokens")),
        running=_whole(totals.get("vllm:num_requests_running")),
    )


def parse_mtp_stats(text: str) -> Counters | None:
    """Counters from ATOM's ``/debug/mtp_stats``; None where speculation is off or unknown.

    Its ``distribution`` maps accepted tokens to steps.
    """
    try:
        raw = json.loads(text)
    except ValueError:
        return None
    if not isinstance(raw, dict) or not raw.get("enabled", False):
        return None
    try:
        spread = {int(k): int(v) for k, v in (raw.get("distribution") or {}).items()}
        drafted, total = int(raw["total_draft_tokens"]), int(raw["total_accepted_tokens"])
    except (KeyError, TypeError, ValueError):
        return None
    at = tuple(
        sum(count for n, count in spread.items() if n > slot)
        for slot in range(max(spread, default=0))
    )
    accepted = _counted(
        steps=sum(spread.values()),
        drafted=drafted,
        admitted=_whole(raw.get("total_admitted_tokens")),
        accepted=total,
        accepted_at=at if sum(at) == total else None,
    )
    return None if accepted is None else Counters(source="atom-counters", accepted=accepted)


def difference(before: Counters, after: Counters) -> Counters | None:
    """What happened between two readings.

    None where a counter went down (it was reset) or counts contradict each other (read while a step
    was being counted).
    """
    parts: dict[str, Any] = {}
    for name in ("steps", "drafted", "admitted", "accepted"):
        old, new = getattr(before.accepted, name), getattr(after.accepted, name)
        if old is None or new is None:
            continue
        if new < old:
            return None
        parts[name] = new - old
    for name in ("accepted_at", "admitted_at"):
        new_at = getattr(after.accepted, name)
        if new_at is None:
            continue
        old_at = getattr(before.accepted, name) or ()
        old_at = (*old_at, *[0] * (len(new_at) - len(old_at)))
        moved = tuple(n - o for n, o in zip(new_at, old_at, strict=True))
        if min(moved, default=0) < 0:
            return None
        parts[name] = moved
    if parts.get("accepted_at") and sum(parts["accepted_at"]) != parts["accepted"]:
        del parts["accepted_at"]  # read while a step was being counted
    whole: dict[str, int | None] = {}
    for name in ("requests", "tokens"):
        old, new = getattr(before, name), getattr(after, name)
        whole[name] = None if old is None or new is None else new - old
    accepted = _counted(**parts)
    if accepted is None:
        return None
    return Counters(
        source=after.source,
        accepted=accepted,
        requests=whole["requests"],
        tokens=whole["tokens"],
        running=after.running,
    )


def foreign_traffic(moved: Counters, answers: int, tokens: int, block: int) -> str | None:
    """Why the difference cannot be of our ``answers`` (of ``tokens`` in all) alone, or None.

    ``block`` is how many tokens one step may give too many: those behind the end of an answer.
    """
    if moved.requests is not None and moved.requests != answers:
        return f"the server finished {moved.requests} requests, {answers} were ours"
    if moved.tokens is not None and moved.tokens > tokens + answers * (block + 1):
        return f"the server generated {moved.tokens} tokens, {tokens} were ours"
    if moved.requests is None and moved.tokens is None:
        told = moved.accepted.steps + moved.accepted.accepted + answers
        if told > tokens + answers * (block + 1):
            return f"steps and accepted tokens make {told} tokens, {tokens} were ours"
    if moved.running:
        return f"{moved.running} requests were still running when ours had ended"
    return None


def _counted(**counts: Any) -> Accepted | None:
    """None where the counts contradict each other: a page may be read in the middle of a step."""
    try:
        return Accepted(**counts)
    except ValidationError:
        return None


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        found = _SAMPLE.match(line.strip())
        if found is None:
            continue
        name, labels, number = found.groups()
        try:
            yield name, dict(_LABEL.findall(labels or "")), float(number)
        except ValueError:
            continue


def _slots(at: dict[int, float], total: float | None) -> tuple[int, ...] | None:
    if not at:
        return None
    whole = tuple(int(at.get(slot, 0)) for slot in range(max(at) + 1))
    return whole if total is None or sum(whole) == int(total) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
