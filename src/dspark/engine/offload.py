"""Pages that left the cache, in host memory and on disk, until a text begins with them again.

A page is saved when its memory is given to another text, not before: what stays in the cache costs
nothing. Host memory is filled first; its least recently used pages go on to disk, and the disk's
least recently used ones are deleted. Both are bounded in bytes. A disk folder survives the engine:
pages are found again by their key, whoever wrote them.

Nothing is believed. A page is read, checked and decoded BEFORE the scheduler counts its rows as
cached (``dspark.engine.pagefile`` says what is checked); one that fails is deleted, counted, and
its rows are computed. Rows of target and draft are one page here too, so a hit drafts as well as a
cold start does (a public engine that offloaded target rows alone stored gigabytes and never hit).

States of hybrid targets take the same way under the same keys.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dspark.config.engine import EngineOptions
from dspark.engine.pagefile import (
    Form,
    PageLayout,
    PagePart,
    StoredPage,
    decode_page,
    encode_page,
)
from dspark.engine.pages import PagePool
from dspark.errors import PageError, StorageError
from dspark.model.paged import PagedRows
from dspark.model.states import SlotStates

What = Literal["page", "state"]


@dataclass
class OffloadCounts:
    """Pages and states since the start: ``saved`` when they left the cache, ``asked`` for when the
    cache did not have them, found, written back (``restored``), and ``refused`` as unsound."""

    saved: int = 0
    asked: int = 0
    from_host: int = 0
    from_disk: int = 0
    restored: int = 0
    refused: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of what was asked for (because the cache did not have it) that was found."""
        return (self.from_host + self.from_disk) / max(1, self.asked)


class PageStore:
    """Bytes by name: at most ``host_bytes`` in memory and ``disk_bytes`` in ``folder``.

    Raises:
        StorageError: the folder cannot be made.
    """

    def __init__(self, host_bytes: int, folder: Path | None, disk_bytes: int) -> None:
        self.host_bytes, self.disk_bytes, self.folder = host_bytes, disk_bytes, folder
        self._host: OrderedDict[str, bytes] = OrderedDict()
        self._disk: OrderedDict[str, int] = OrderedDict()
        self.in_host = self.on_disk = 0
        self.evicted = 0  # deleted for want of room
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                found = [(p.stat().st_mtime_ns, p) for p in folder.glob("*.dspage")]
            except OSError as error:
                raise StorageError(
                    expected="a folder for offloaded pages", found=str(error), where=str(folder),
                    fix="Choose another offload_path, or leave it out.",
                ) from error  # fmt: skip
            for _, path in sorted(found):
                self._disk[path.stem] = path.stat().st_size
                self.on_disk += self._disk[path.stem]
            self._shrink_disk()

    def put(self, name: str, data: bytes) -> None:
        """Keep ``data``; what is known already only counts as used."""
        if name in self._host:
            self._host.move_to_end(name)
        elif name in self._disk:
            self._disk.move_to_end(name)
        elif len(data) <= self.host_bytes:
            self._host[name] = data
            self.in_host += len(data)
            while self.in_host > self.host_bytes:
                old, freed = self._host.popitem(last=False)
                self.in_host -= len(freed)
                self._to_disk(old, freed)
        else:
            self._to_disk(name, data)

    def get(self, name: str) -> tuple[bytes, Literal["host", "disk"]] | None:
        """The bytes of ``name`` and where they were."""
        if (data := self._host.get(name)) is not None:
            self._host.move_to_end(name)
            return data, "host"
        if name not in self._disk or self.folder is None:
            return None
        try:
            data = self._path(name).read_bytes()
        except OSError:  # somebody else deleted it
            self.drop(name)
            return None
        self._disk.move_to_end(name)
        return data, "disk"

    def drop(self, name: str) -> None:
        """Forget ``name`` and delete its bytes."""
        if (data := self._host.pop(name, None)) is not None:
            self.in_host -= len(data)
        if (size := self._disk.pop(name, None)) is not None:
            self.on_disk -= size
            self._path(name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget everything."""
        for name in [*self._host, *self._disk]:
            self.drop(name)

    def _to_disk(self, name: str, data: bytes) -> None:
        if self.folder is None or len(data) > self.disk_bytes:
            self.evicted += 1
            return
        path = self._path(name)
        try:
            # Not flushed to the disk: what a crash tears is found by its checksum.
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(data)
            partial.replace(path)
        except OSError:
            return  # a full disk costs hits, never an answer
        self._disk[name] = len(data)
        self.on_disk += len(data)
        self._shrink_disk()

    def _shrink_disk(self) -> None:
        while self.on_disk > self.disk_bytes:
            self.drop(next(iter(self._disk)))
            self.evicted += 1

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.dspage"


class Offload:
    """Moves pages and states between the engine's tensors and a store.

    ``first_draft_layer`` is where the draft's layers begin in ``rows``.
    """

    def __init__(
        self, store: PageStore, rows: PagedRows, pool: PagePool, first_draft_layer: int, *,
        fp8: bool,
    ) -> None:  # fmt: skip
        self.store, self.rows, self.pool = store, rows, pool
        self.counts = OffloadCounts()
        self.layout = page_layout(rows, first_draft_layer, fp8=fp8)
        self.state_layout: PageLayout | None = None
        if rows.states is not None:
            self.state_layout = state_layout(rows.states)
            assert pool.snapshots is not None
            pool.snapshots.on_evict = self._save_state
        self._loads: dict[int, StoredPage] = {}
        self._state_loads: dict[int, StoredPage] = {}
        self._saves: list[tuple[int, bytes]] = []

    def evicted(self, page: int, key: bytes) -> None:
        """``page`` will be overwritten: its rows are saved at the beginning of the next step."""
        if self._loads.pop(page, None) is None:
            self._saves.append((page, key))

    def fetch(self, key: bytes) -> StoredPage | None:
        """The checked rows of ``key``; None where there are none to be trusted."""
        return self._fetch(self.layout, key, "page")

    def fetch_state(self, key: bytes) -> StoredPage | None:
        """The checked state of ``key``."""
        assert self.state_layout is not None
        return self._fetch(self.state_layout, key, "state")

    def load(self, page: int, content: StoredPage) -> None:
        """Write ``content`` to ``page`` at the beginning of the next step."""
        self._loads[page] = content

    def load_state(self, slot: int, content: StoredPage) -> None:
        self._state_loads[slot] = content

    def forget_all(self) -> None:
        """Other weights were loaded: nothing stored is sound any more."""
        self._saves, self._loads, self._state_loads = [], {}, {}
        self.store.clear()

    def export(self, tokens: Sequence[int]) -> Iterator[tuple[str, bytes]]:
        """Name and bytes of every full page of ``tokens`` that a hit would use now, and of the
        state it would end in."""
        # One token more: a whole prompt's last page may be of use to whoever computes what follows.
        table = self.pool.open([*tokens, 0])
        try:
            self.exchange()  # what was fetched must lie in its pages
            for page, key in zip(table.pages, table.keys, strict=True):
                content = self._page(page)
                yield _name(key, "page"), encode_page(self.layout, self.pool.root, key, content)
            if table.origin is not None:
                assert self.state_layout is not None
                key, state = table.keys[-1], self._state(table.origin)
                data = encode_page(self.state_layout, self.pool.root, key, state)
                yield _name(key, "state"), data
        finally:
            self.pool.close(table)

    def exchange(self) -> None:
        """A step begins: save what will be overwritten, then write what was fetched."""
        for page, key in self._saves:
            self._save(self.layout, key, "page", self._page(page))
        size, states = self.rows.page_size, self.rows.states
        tensors = [rows for parts in self.rows.layers for rows in parts]
        for page, content in self._loads.items():
            for rows, stored in zip(tensors, content.tensors, strict=True):
                rows[page * size : (page + 1) * size] = stored.to(rows.device, rows.dtype)
        for slot, content in self._state_loads.items():
            assert states is not None
            for layer, (matrices, inputs) in enumerate(
                zip(content.tensors[::2], content.tensors[1::2], strict=True)
            ):
                own = states.matrices[layer, slot]
                own.copy_(matrices[0].view_as(own))
                states.inputs[layer, slot].copy_(inputs[0])
        self.counts.restored += len(self._loads) + len(self._state_loads)
        self._saves, self._loads, self._state_loads = [], {}, {}

    def _page(self, page: int) -> StoredPage:
        size = self.rows.page_size
        run = slice(page * size, (page + 1) * size)
        tensors = tuple(rows[run] for parts in self.rows.layers for rows in parts)
        sound = (True,) * size  # only complete pages can be found, and so evicted
        return StoredPage(sound, sound if self.pool.drafting else (False,) * size, tensors)

    def _save_state(self, key: bytes, slot: int) -> None:
        if self._state_loads.pop(slot, None) is not None:
            return
        assert self.state_layout is not None
        self._save(self.state_layout, key, "state", self._state(slot))

    def _state(self, slot: int) -> StoredPage:
        states, tensors = self.rows.states, []
        assert states is not None
        for layer in range(states.dims.layers):
            tensors.append(states.matrices[layer, slot].flatten(1).unsqueeze(0))
            tensors.append(states.inputs[layer, slot].unsqueeze(0))
        return StoredPage((True,), (True,), tuple(tensors))

    def _save(self, layout: PageLayout, key: bytes, what: What, content: StoredPage) -> None:
        try:
            data = encode_page(layout, self.pool.root, key, content)
        except PageError:  # not finite: whoever comes next computes it anew
            self.counts.refused += 1
            return
        self.store.put(_name(key, what), data)
        self.counts.saved += 1

    def _fetch(self, layout: PageLayout, key: bytes, what: What) -> StoredPage | None:
        self.counts.asked += 1
        found = self.store.get(_name(key, what))
        if found is None:
            return None
        try:
            content = decode_page(layout, self.pool.root, key, found[0])
            complete = all(content.target_rows) and (
                all(content.draft_rows) or not self.pool.drafting
            )
        except PageError:
            content, complete = None, False
        if content is None or not complete:
            self.store.drop(_name(key, what))
            self.counts.refused += 1
            return None
        if found[1] == "host":
            self.counts.from_host += 1
        else:
            self.counts.from_disk += 1
        return content


def page_layout(rows: PagedRows, first_draft_layer: int, *, fp8: bool) -> PageLayout:
    """How an engine's pages are stored: in their own dtype, or as fp8."""
    parts = []
    for number, layer in enumerate(rows.layers):
        drafted = number >= first_draft_layer
        for tensor in layer:
            form: Form = "fp8" if fp8 else _form(tensor.dtype)
            parts.append(
                PagePart(
                    "draft" if drafted else "target", form,
                    number - first_draft_layer if drafted else number, rows.page_size,
                    tensor.shape[1], tensor.shape[2],
                )
            )  # fmt: skip
    return PageLayout(rows.page_size, tuple(parts))


def state_layout(states: SlotStates) -> PageLayout:
    """How a state is stored: always in its own dtype."""
    dims, parts = states.dims, []
    for layer in range(dims.layers):
        parts.append(PagePart("matrix", "float32", layer, 1, dims.heads, dims.head_dim**2))
        parts.append(
            PagePart("inputs", _form(dims.inputs), layer, 1, dims.kernel - 1, dims.channels)
        )
    return PageLayout(1, tuple(parts))


def made_offload(
    options: EngineOptions, rows: PagedRows, pool: PagePool, first_draft_layer: int
) -> Offload | None:
    """What ``options`` ask for; None where they ask for nothing or pages are not shared."""
    host, disk = (int(g * 2**30) for g in (options.offload_host_gib, options.offload_disk_gib))
    if not pool.share or not host + disk:
        return None
    folder = Path(options.offload_path) if disk and options.offload_path else None
    store = PageStore(host, folder, disk)
    return Offload(store, rows, pool, first_draft_layer, fp8=options.offload_fp8)


def _form(dtype: torch.dtype) -> Form:
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def _name(key: bytes, what: What) -> str:
    return f"{key.hex()}-{what}"
