"""Which texts' recurrent states are kept, and in which slots: ids and hashes, never a tensor.

A page's rows serve whoever begins alike. The state behind a page serves only who continues exactly
there, and it is as large as hundreds of rows, so few are kept: ``count`` slots, the least recently
used one goes first. They are found by the page's own chained hash, so a prefix hit ends at the last
page boundary that has a state.

Where states are worth keeping:

- at the last page boundary of a prompt (the same prompt again, several answers to it);
- where a prompt left the pages that others share, once that is known (a prompt that comes behind
  the same instructions): see :attr:`~dspark.engine.pages.BlockTable.branch`;
- at the last page boundary so far of a long prompt's chunks and of what a request generated (the
  next turn of a conversation, coming back after preemption). It moves along: each request has one
  of those at most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class Snapshot(NamedTuple):
    """A state behind the first ``rows`` tokens of a request, in ``slot``; ``rolling`` ones replace
    the request's last."""

    rows: int
    slot: int
    rolling: bool


class Snapshots:
    """Slots ``first`` .. ``first + count - 1``.

    ``tail`` is how many tokens behind a boundary one forward may run and still give its state.
    ``on_evict`` is told key and slot of a state that will be overwritten for want of slots.
    """

    def __init__(self, first: int, count: int, tail: int) -> None:
        self.count, self.tail = count, tail
        self._free = list(range(first + count - 1, first - 1, -1))
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self._taken: set[int] = set()
        self.on_evict: Callable[[bytes, int], None] | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: bytes) -> int | None:
        """The slot with the state behind the text of ``key``; it counts as used."""
        slot = self._by_key.get(key)
        if slot is not None:
            self._by_key.move_to_end(key)
        return slot

    def take(self) -> int | None:
        """A slot to write to, which nobody finds until :meth:`bind`; None if all are taken."""
        if not self._free and not self._by_key:
            return None
        if self._free:
            slot = self._free.pop()
        else:
            key, slot = self._by_key.popitem(last=False)
            if self.on_evict is not None:
                self.on_evict(key, slot)
        self._taken.add(slot)
        return slot

    def bind(self, key: bytes, slot: int) -> bool:
        """``slot`` now holds the state of ``key``. A text that has one already keeps it (False)."""
        self._taken.remove(slot)
        if key in self._by_key:
            self._by_key.move_to_end(key)
            self._free.append(slot)
            return False
        self._by_key[key] = slot
        return True

    def release(self, slot: int) -> None:
        """A slot that :meth:`take` gave and nobody will find."""
        self._taken.remove(slot)
        self._free.append(slot)

    def reclaim(self) -> None:
        """Take back what was taken and neither bound nor released (its step failed)."""
        self._free += sorted(self._taken)
        self._taken.clear()

    def forget(self, key: bytes) -> None:
        """The state of ``key`` is not wanted any more; an unknown key is left alone."""
        if (slot := self._by_key.pop(key, None)) is not None:
            self._free.append(slot)

    def forget_all(self) -> None:
        for key in list(self._by_key):
            self.forget(key)
