"""Text out of tokens, piece by piece, and the strings that end it.

A token may end inside a UTF-8 character: its text is held back until a later token completes it, so
that no reader ever sees half a character. A piece is the difference of two decodings of a small
window, because decoders join tokens (spaces, bytes) in ways no single token shows.

A stop string may lie anywhere across tokens, also inside one accepted run of a verify step. The
text is cut where it begins; what might still become one is held back from a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "�"  # what decoders show for bytes that are no character yet


class TextStream:
    """The growing text of one answer.

    ``decode`` turns ids into text without special tokens. ``text`` is all text that is sure to be
    characters; ``stopped_by`` the stop string that was found.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self._decode, self._stops, self._include = decode, tuple(stops), include_stop
        self._window: list[int] = []  # tokens decoded together; the first `_old` are in `text`
        self._old = 0
        self._searched = 0  # no stop string begins before this place
        self._sent = 0

    def push(self, token: int, *, search: bool = True) -> bool:
        """Add a token; whether a stop string is complete now.

        ``search`` False lets stop strings in the text so far pass (before ``min_new_tokens``).
        """
        self._window.append(token)
        whole = self._decode(self._window)
        if not whole.endswith(HALF):
            before = self._decode(self._window[: self._old])
            self.text += whole[len(before) :]
            self._window = self._window[self._old :]
            self._old = len(self._window)
        return self._find(search)

    def finish(self) -> None:
        """No more tokens: bytes that never became a character are shown as they are."""
        if self.stopped_by is None and self._old < len(self._window):
            before = self._decode(self._window[: self._old])
            self.text += self._decode(self._window)[len(before) :]
            self._old = len(self._window)

    def fresh(self, *, final: bool) -> str:
        """Text not returned yet; unless ``final``, without what might become a stop string."""
        end = len(self.text)
        if not final:
            end -= self._suspense()
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _find(self, search: bool) -> bool:
        longest = max((len(s) for s in self._stops), default=0)
        if search:
            found = [(at, s) for s in self._stops if (at := self.text.find(s, self._searched)) >= 0]
            if found:
                at, self.stopped_by = min(found)
                self.text = self.text[: at + len(self.stopped_by) if self._include else at]
                return True
            self._searched = max(self._searched, len(self.text) - longest + 1)
        else:
            self._searched = len(self.text)
        return False

    def _suspense(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        most = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self.text)), most, -1):
                if self.text.endswith(stop[:size]):
                    most = size
                    break
        return most
