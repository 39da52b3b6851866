"""Figures of pages outside the engine's cache: offloaded ones, and those of other machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from dspark.engine.offload import Offload
from dspark.server.exposition import Families

if TYPE_CHECKING:
    from dspark.server.handover import HandoverRole


def offload_figures(offload: Offload, make: Families) -> Iterator[Metric]:
    """Of pages and states together."""
    counts, store = offload.counts, offload.store
    for name, text, value in (
        ("saved", "Pages and states that left the cache and were kept.", counts.saved),
        ("queries", "Those that the cache did not have and that were looked for.", counts.asked),
        ("restored", "Those that were written back into the cache.", counts.restored),
        ("evicted", "Those that were deleted for want of room.", store.evicted),
        ("refused", "Those that were not sound, and were computed.", counts.refused),
    ):
        yield make.counter(f"dspark:offload_{name}", text, value)
    found: dict[str, float] = {"host": counts.from_host, "disk": counts.from_disk}
    yield make.counters("dspark:offload_hits", "Those that were found, by place.", "place", found)
    for place, held in (("host", store.in_host), ("disk", store.on_disk)):
        yield make.gauge("dspark:offload_bytes", "Bytes that are kept.", held, place=place)


def handover_figures(role: HandoverRole, make: Families) -> Iterator[Metric]:
    """Of prefill and decode on two machines; each role has its own."""
    if role.name == "prefill":
        sent = role.node.counts
        text = "Prompts that were computed for decode servers."
        yield make.counter("dspark:handover_prompts_sent", text, sent.prompts)
        yield make.counter("dspark:handover_pages_sent", "Their pages and states.", sent.pages)
        yield make.counter("dspark:handover_bytes_sent", "Bytes of them.", sent.bytes)
        return
    counts = role.counts
    came: dict[str, float] = {"in_time": counts.in_time, "late": counts.late}
    text = "Prompts by whether their pages came in time; late ones were computed here."
    yield make.counters("dspark:handover_prompts", text, "pages", came)
    yield make.counter("dspark:handover_pages_received", "Pages and states.", counts.pages)
    yield make.counter("dspark:handover_bytes_received", "Bytes of them.", counts.bytes)
    heard = float(role.link.alive)
    yield make.gauge("dspark:handover_peer_alive", "Whether the prefill server is heard of.", heard)
