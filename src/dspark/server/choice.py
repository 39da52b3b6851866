"""One answer on its way out: text, ids and log-probabilities that agree whenever they are sent.

The engine's text lags behind its tokens: half a character waits for the other half, and what might
become a stop string waits until it is one or not. Log-probabilities wait with it. So a reader who
joins the tokens of the log-probabilities never sees a stop string either, and what was reported up
to any moment describes the text up to that moment. The end token and the tokens of a stop string
have no text: they are in the ids and the usage, not in the log-probabilities.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dspark.engine.answer import Delta
from dspark.engine.request import TokenLogprob


@dataclass(slots=True)
class Piece:
    """What is new of answer ``index`` to prompt ``prompt``.

    ``places`` are where in the answer's text the tokens of ``logprobs`` begin; ``steps`` the
    forwards that gave it (of one alone, ``delta`` itself).
    """

    prompt: int
    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    places: tuple[int, ...]
    delta: Delta
    steps: tuple[Delta, ...] = ()

    @property
    def finish_reason(self) -> str | None:
        return self.delta.finish_reason


def joined(pieces: Sequence[Piece]) -> Piece:
    """One piece out of all consecutive pieces of an answer; its delta has every token."""
    last = pieces[-1]
    deltas = [piece.delta for piece in pieces]
    delta = replace(last.delta, text="", ids=tuple(i for d in deltas for i in d.ids), logprobs=())
    return Piece(
        last.prompt,
        last.index,
        "".join(piece.text for piece in pieces),
        tuple(x for piece in pieces for x in piece.logprobs),
        tuple(x for piece in pieces for x in piece.places),
        delta,
        tuple(deltas),
    )


@dataclass
class Track:
    """State of one answer; :meth:`take` what the engine gives."""

    prompt: int
    index: int
    tokens: int = 0
    _sent: int = 0
    _held: deque[tuple[int, TokenLogprob]] = field(default_factory=deque)

    def take(self, delta: Delta) -> Piece:
        """The next piece."""
        self.tokens += len(delta.ids)
        self._sent += len(delta.text)
        self._held.extend(zip(delta.starts, delta.logprobs, strict=False))
        ready = []
        while self._held and self._held[0][0] < self._sent:
            ready.append(self._held.popleft())
        return Piece(
            self.prompt,
            self.index,
            delta.text,
            tuple(logprob for _, logprob in ready),
            tuple(place for place, _ in ready),
            delta,
        )


class TokenTexts:
    """The text of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Decoders strip the space of a first token: behind another one it stays.
        ids = tokenizer.encode("a", add_special_tokens=False)
        self._before = [int(i) for i in ids][-1:]
        self._prefix = self._decode(self._before)
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:
            whole = self._decode([*self._before, token])
            cut = whole.startswith(self._prefix)
            self._known[token] = whole[len(self._prefix) :] if cut else self._decode([token])
        return self._known[token]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def stop_reason(delta: Delta, own_ends: frozenset[int]) -> int | str | None:
    """vLLM's field: the string or id of the request that ended it; None for the target's own."""
    reason = delta.stop_reason
    return None if isinstance(reason, int) and reason in own_ends else reason


def token_kinds(piece: Piece, texts: TokenTexts) -> dict[str, Any]:
    """``return_token_kinds`` of a choice, forward by forward."""
    return {"steps": [_step(delta, texts) for delta in piece.steps or (piece.delta,)]}


def _step(delta: Delta, texts: TokenTexts) -> dict[str, Any]:
    """Each token's id, kind and place in the answer's text;
    what was drafted, admitted and accepted; the texts of drafted tokens that were refused."""
    count = delta.count
    return {
        "tokens": [
            {"id": token, "kind": kind, "start": start}
            for token, kind, start in zip(delta.ids, delta.kinds, delta.starts, strict=True)
        ],
        "drafted": count.drafted if count else 0,
        "admitted": count.admitted if count else 0,
        "accepted": count.accepted if count else 0,
        "rejected": [texts(token) for token in delta.rejected],
    }
