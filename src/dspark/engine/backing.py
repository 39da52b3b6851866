"""What a page pool asks of pages outside the cache; ``dspark.engine.offload`` answers."""

from __future__ import annotations

from typing import Any, Protocol


class Backing(Protocol):
    """Pages outside the cache; contents are opaque here."""

    def evicted(self, page: int, key: bytes) -> None:
        """``page`` holds ``key`` until the next step begins; then it is overwritten."""
        ...

    def fetch(self, key: bytes) -> Any | None:
        """Sound rows of a full page, if there are."""
        ...

    def load(self, page: int, content: Any) -> None:
        """``page`` holds ``content`` when the next step has begun."""
        ...

    def fetch_state(self, key: bytes) -> Any | None:
        """The recurrent state behind a page, if there is one."""
        ...

    def load_state(self, slot: int, content: Any) -> None:
        """As :meth:`load`, for a state's slot."""
        ...

    def forget_all(self) -> None:
        """Nothing outside is sound any more."""
        ...
