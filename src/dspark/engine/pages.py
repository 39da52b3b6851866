"""Pages of cached rows: who holds them, what is in them, and which of them may be shared.

Memory for cached rows is cut into pages of ``page_size`` rows. A request's *block table* lists its
pages in order; the same table serves every layer of the target and of the draft, so one page id
stands for a page of each. This file knows ids, counts and hashes, never a tensor
(``dspark.model.paged`` holds those).

*Validity.* After a verify step the target has written rows for rejected tokens too, and the draft's
rows are written only for accepted ones. Per page we therefore count how many leading rows of each
kind are sound. Whatever lies behind a count is never read.

*Prefix cache.* A page may be shared once it is full and BOTH counts are full: a page whose draft
rows are missing would make the draft read rubbish on a hit, which costs acceptance without any
error (field report: 3.41 fell to 1.02). It is found by a hash chained over all tokens from the
start, beginning with the identity of target and draft. Pages nobody holds stay findable until their
memory is needed; the least recently used one goes first, the end of a text before its beginning.

*Hybrid targets.* Rows of full pages are not enough where a recurrent state is needed too: a hit
ends at the last page boundary that has one (``dspark.engine.snapshots``), and never covers a whole
prompt.

*Copy on write.* A hit may cover a whole prompt, whose last token must be run again to be answered.
Its row lies in a shared page: the request gets a copy of the page before it writes.

Concepts from vLLM's paged attention (Kwon et al., arXiv 2309.06180) and its prefix cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dspark.engine.backing import Backing
from dspark.engine.snapshots import Snapshot, Snapshots
from dspark.errors import DecodingError

PAGE_SIZE = 16


class PageCopy(NamedTuple):
    """All rows of page ``source`` must be copied to page ``to`` before the next forward."""

    source: int
    to: int


@dataclass
class Page:
    """``target_rows`` and ``draft_rows`` leading rows are sound; ``key`` is set while findable."""

    holders: int = 0
    target_rows: int = 0
    draft_rows: int = 0
    key: bytes | None = None


@dataclass(eq=False)
class BlockTable:
    """Pages of one request in order; ``rows`` leading rows are sound for the target, ``draft_rows``
    for the draft.

    ``keys`` are the chained hashes of its full pages as far as they were needed; ``cached`` of the
    rows came from the prefix cache.

    Of hybrid targets only: ``origin`` is the slot of the state its cached rows end in; up to
    ``branch`` its rows were cached too, but without a state (0: nothing of the kind); ``rolling``
    is the key of the state that moves along with what it generates.
    """

    pages: list[int] = field(default_factory=list)
    rows: int = 0
    draft_rows: int = 0
    keys: list[bytes] = field(default_factory=list)
    cached: int = 0
    origin: int | None = None
    branch: int = 0
    rolling: bytes | None = None


class PagePool:
    """Hands out pages 0 .. ``count - 1``.

    Args:
        count: number of pages.
        page_size: rows per page.
        identity: names target and draft; pages of other identities are never found.
        drafting: whether a page needs draft rows to be shared.
        share: False turns the prefix cache off.
        snapshots: of a hybrid target's states; None for other targets.
    """

    def __init__(
        self,
        count: int,
        page_size: int = PAGE_SIZE,
        *,
        identity: str = "",
        drafting: bool = True,
        share: bool = True,
        snapshots: Snapshots | None = None,
    ) -> None:
        if count < 1 or page_size < 1:
            raise DecodingError(
                expected="at least one page of at least one row",
                found=f"{count} pages of {page_size} rows",
                where="page pool",
                fix="Give the cache more memory.",
            )
        self.count, self.page_size = count, page_size
        self.drafting, self.share = drafting, share
        self.snapshots = snapshots
        self.pages = [Page() for _ in range(count)]
        self.backing: Backing | None = None
        self.root = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        # Insertion order matters in both: ids in `_free` come out oldest first, which keeps the
        # pages of a lone request in one run; `_idle` is the order of eviction.
        self._free: dict[int, None] = dict.fromkeys(range(count))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._found: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that could be handed out now."""
        return len(self._free) + len(self._idle)

    def pages_for(self, rows: int) -> int:
        """Pages that ``rows`` rows need."""
        return -(-rows // self.page_size)

    def open(self, tokens: Sequence[int]) -> BlockTable:
        """A table holding the longest shared prefix of ``tokens`` (possibly nothing).

        At most ``len(tokens) - 1`` rows count as sound: the last token must be run to be answered.
        """
        table = BlockTable()
        if self.share:
            for index in range(len(tokens) // self.page_size):
                key = self._key(table, tokens, index)
                page = self._found.get(key)
                if page is None:
                    page = self._fetched(key, table.pages)
                else:
                    self._hold(page)
                if page is None:
                    break
                table.keys.append(key)
                table.pages.append(page)
            if self.snapshots is not None:
                self._cut(table, len(tokens), self.snapshots)
        table.rows = max(0, min(len(table.pages) * self.page_size, len(tokens) - 1))
        table.draft_rows = table.rows if self.drafting else 0
        table.cached = table.rows
        return table

    def _fetched(self, key: bytes, before: list[int]) -> int | None:
        """A page of its own for rows that lie outside the cache, if they do and there is room."""
        if self.backing is None or not self.available:
            return None
        content = self.backing.fetch(key)
        if content is None:
            return None
        page = self._take(after=before[-1] if before else None)
        record = self.pages[page]
        record.target_rows = self.page_size
        record.draft_rows = self.page_size if self.drafting else 0
        record.key, self._found[key] = key, page
        self.backing.load(page, content)
        return page

    def _state(self, key: bytes, snapshots: Snapshots) -> int | None:
        """The slot of the state behind ``key``, fetched from outside if need be."""
        slot = snapshots.find(key)
        if slot is not None or self.backing is None:
            return slot
        content = self.backing.fetch_state(key)
        if content is None or (slot := snapshots.take()) is None:
            return None
        snapshots.bind(key, slot)
        self.backing.load_state(slot, content)
        return slot

    def _cut(self, table: BlockTable, tokens: int, snapshots: Snapshots) -> None:
        """Give back pages behind the last boundary that has a state and leaves a token to run."""
        usable = min(len(table.pages), (tokens - 1) // self.page_size)
        kept = usable
        while kept and (slot := self._state(table.keys[kept - 1], snapshots)) is None:
            kept -= 1
        for page in reversed(table.pages[kept:]):
            self._drop(page)
        del table.pages[kept:], table.keys[kept:]
        if kept:
            table.origin = slot
        if usable > kept:
            table.branch = usable * self.page_size

    def keep_state(self, table: BlockTable, snapshot: Snapshot) -> None:
        """Make a snapshot findable whose rows were committed, or give its slot back."""
        snapshots, index = self.snapshots, snapshot.rows // self.page_size
        assert snapshots is not None
        if not 0 < index <= len(table.keys):
            snapshots.release(snapshot.slot)
            return
        key = table.keys[index - 1]
        own = snapshots.bind(key, snapshot.slot)
        if snapshot.rolling:
            if table.rolling is not None and table.rolling != key:
                snapshots.forget(table.rolling)
            # One that others left stays when this request has moved on.
            table.rolling = key if own else None

    def reserve(self, table: BlockTable, length: int) -> list[PageCopy] | None:
        """Make rows ``table.rows`` .. ``length - 1`` writable by this table alone.

        Returns:
            Copies to make before writing, or None (and nothing has changed) without enough pages.
        """
        first = table.rows // self.page_size
        touched = range(first, min(len(table.pages), self.pages_for(length)))
        shared = [i for i in touched if self.pages[table.pages[i]].holders > 1]
        missing = max(0, self.pages_for(length) - len(table.pages))
        if len(shared) + missing > self.available:
            return None
        copies = []
        for index in touched:
            page = table.pages[index]
            if index in shared:
                table.pages[index] = fresh = self._take(after=page)
                origin = self.pages[page]
                self.pages[fresh].target_rows = origin.target_rows
                self.pages[fresh].draft_rows = origin.draft_rows
                copies.append(PageCopy(page, fresh))
                self._drop(page)
            else:
                self._forget(page)
        for _ in range(missing):
            table.pages.append(self._take(after=table.pages[-1] if table.pages else None))
        del table.keys[first:]
        return copies

    def commit(
        self, table: BlockTable, tokens: Sequence[int], target_rows: int, draft_rows: int
    ) -> None:
        """Rows of the first ``target_rows`` / ``draft_rows`` of ``tokens`` are now sound.

        Pages that became complete can be found by other requests from now on.
        """
        size = self.page_size
        behind = min(table.rows, table.draft_rows) if self.drafting else table.rows
        for index in range(behind // size, self.pages_for(target_rows)):
            page = self.pages[table.pages[index]]
            page.target_rows = min(size, target_rows - index * size)
            page.draft_rows = max(0, min(size, draft_rows - index * size))
        table.rows, table.draft_rows = target_rows, draft_rows
        if not self.share:
            return
        for index in range(len(table.keys), target_rows // size):
            number = table.pages[index]
            if not self._complete(self.pages[number]):
                break
            key = self._key(table, tokens, index)
            table.keys.append(key)
            if key not in self._found:
                self._found[key] = number
                self.pages[number].key = key

    def close(self, table: BlockTable) -> None:
        """Give all pages back; complete ones stay findable until their memory is needed."""
        for page in reversed(table.pages):
            self._drop(page)
        table.pages, table.keys, table.rows, table.draft_rows = [], [], 0, 0
        if len(self._free) == self.count:
            # In order again, or the next lone request's pages would wrap around and be gathered.
            self._free = dict.fromkeys(range(self.count))

    def forget_all(self) -> None:
        """Make nothing findable any more (other weights were loaded)."""
        for page in range(self.count):
            self._forget(page)
            if self.pages[page].holders == 0:
                self._idle.pop(page, None)
                self._free[page] = None
        if self.snapshots is not None:
            self.snapshots.forget_all()
        if self.backing is not None:
            self.backing.forget_all()

    def _complete(self, page: Page) -> bool:
        drafted = page.draft_rows == self.page_size or not self.drafting
        return drafted and page.target_rows == self.page_size

    def _key(self, table: BlockTable, tokens: Sequence[int], index: int) -> bytes:
        before = table.keys[index - 1] if index else self.root
        own = array("q", tokens[index * self.page_size : (index + 1) * self.page_size])
        return hashlib.blake2b(before + own.tobytes(), digest_size=16).digest()

    def _hold(self, page: int) -> None:
        self._idle.pop(page, None)
        self.pages[page].holders += 1

    def _drop(self, page: int) -> None:
        record = self.pages[page]
        assert record.holders > 0, f"page {page} was given back twice"
        record.holders -= 1
        if record.holders == 0:
            if record.key is None:
                self._free[page] = None
            else:
                self._idle[page] = None

    def _forget(self, page: int) -> None:
        key = self.pages[page].key
        if key is not None:
            del self._found[key]
            self.pages[page].key = None

    def _take(self, after: int | None) -> int:
        """A page of its own, the one behind ``after`` if free: runs are read without a gather."""
        if after is not None and after + 1 in self._free:
            page = after + 1
            del self._free[page]
        elif self._free:
            page = next(iter(self._free))
            del self._free[page]
        else:
            page, _ = self._idle.popitem(last=False)
            key = self.pages[page].key
            if self.backing is not None and key is not None:
                self.backing.evicted(page, key)
            self._forget(page)
        self.pages[page] = Page(holders=1)
        return page
