"""Answers that match a grammar: which tokens are allowed behind every row of a block.

The grammar engine is llguidance (optional extra ``grammar``): JSON schema, regular expression or
Lark. Under speculation a mask is needed behind every drafted token, not once a step: an unmasked
row in the middle of a block is how drafts broke JSON in other engines. The draft is masked as well,
so an illegal token is never drafted, and a block ends where nothing the draft knows is legal.

The matcher holds the accepted text. Drafted tokens are pushed onto it, masks taken, and all of them
popped again; masks behind equal prefixes are kept until the text grows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.decoding.params import Grammar, SamplingParams
from dspark.errors import DecodingError, MissingDependencyError

KEPT = 64
"""Compiled grammars kept: a server is sent new ones for ever."""


class GrammarRows:
    """The grammar of one request; ``matcher`` stands behind nothing yet."""

    def __init__(
        self, matcher: Any, end_ids: frozenset[int], vocab_size: int, device: torch.device
    ) -> None:
        self._matcher, self._end_ids = matcher, end_ids
        self._vocab_size, self._device = vocab_size, device
        self._text: list[int] = []
        self._over = False
        self._masks: dict[tuple[int, ...], Tensor | None] = {}

    def behind(self, output: Sequence[int], drafted: Sequence[int]) -> Tensor | None:
        """Mask [V], True = allowed, behind ``output`` and ``drafted``.

        None where nothing counts any more: the answer ended before, or ``drafted`` is illegal.
        """
        self._follow(output)
        key = tuple(drafted)
        if key not in self._masks:
            self._masks[key] = self._mask_behind(key)
        return self._masks[key]

    def allowed(self, output: Sequence[int], drafted: Sequence[int]) -> list[Tensor | None]:
        """:meth:`behind` every prefix of ``drafted``, the empty one first."""
        return [self.behind(output, drafted[:size]) for size in range(len(drafted) + 1)]

    def _follow(self, output: Sequence[int]) -> None:
        """Bring the matcher up to the generated text."""
        for token in output[len(self._text) :]:
            self._masks.clear()
            self._text.append(token)
            self._over = self._over or token in self._end_ids
            if not self._over and not self._matcher.consume_token(token):
                raise DecodingError(
                    expected="generated tokens that the grammar allows",
                    found=f"token {token} at place {len(self._text) - 1}",
                    where="grammar",
                    fix=str(self._matcher.get_error()) or "This is a bug in dspark.",
                )

    def _mask_behind(self, drafted: tuple[int, ...]) -> Tensor | None:
        if self._over or any(token in self._end_ids for token in drafted):
            return None
        pushed = self._matcher.try_consume_tokens(list(drafted))
        mask = self._mask() if pushed == len(drafted) else None
        if pushed:
            self._matcher.rollback(pushed)
        return mask

    def _mask(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        return torch.from_numpy(allowed).to(self._device)


class GrammarCompiler:
    """Makes :class:`GrammarRows` for one tokenizer; grammars are compiled once.

    Raises:
        MissingDependencyError: llguidance is not installed.
        DecodingError: the tokenizer's tokens cannot be told apart as bytes.
    """

    def __init__(
        self, tokenizer: Any, end_ids: frozenset[int], vocab_size: int, device: torch.device
    ) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise MissingDependencyError(
                expected="the package llguidance, to follow grammars",
                found="it is not installed",
                where="sampling parameter grammar",
                fix="pip install 'dspark[grammar]'",
            )
        self._end_ids, self._vocab_size, self._device = end_ids, vocab_size, device
        self._tokens = _token_table(tokenizer, end_ids, vocab_size)
        self._compiled: dict[Grammar, Any] = {}

    def rows(self, params: SamplingParams) -> GrammarRows:
        """A fresh state of the request's grammar.

        Raises:
            DecodingError: a grammar that does not compile, or parameters that contradict it.
        """
        grammar = params.grammar
        assert grammar is not None
        if params.ignore_eos or params.min_new_tokens:
            raise DecodingError(
                expected="an answer that ends where its grammar does",
                found="grammar with ignore_eos or min_new_tokens",
                where="sampling parameters",
                fix="Say in the grammar how long the answer must be.",
            )
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > KEPT:
                del self._compiled[next(iter(self._compiled))]
        matcher = self._compiled[grammar].deep_copy()
        return GrammarRows(matcher, self._end_ids, self._vocab_size, self._device)

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher

        build = {
            "json": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "lark": LLMatcher.grammar_from_lark,
        }[grammar.kind]
        try:
            matcher = LLMatcher(self._tokens, build(grammar.text), log_level=0)
            fault = matcher.get_error() if matcher.is_error() else self._first_step(matcher)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise DecodingError(
                expected=f"a {grammar.kind} grammar that compiles",
                found=" ".join(fault.split())[:200],
                where="sampling parameter grammar",
                fix="Correct the grammar.",
            )
        return matcher

    def _first_step(self, matcher: Any) -> str:
        """What is wrong with a first token that the grammar itself allows: grammars without an end
        compile, and fail in the middle of a batch otherwise."""
        trial = matcher.deep_copy()
        bits = np.unpackbits(
            np.frombuffer(trial.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        allowed = [int(i) for i in np.flatnonzero(bits[: self._vocab_size])]
        first = next((i for i in allowed if i not in self._end_ids), None)
        if first is None or trial.consume_token(first):
            return ""
        return str(trial.get_error()) or "a grammar that refuses what it allows"


class _Words:
    """A tokenizer whose tokens are texts of their own, for llguidance's wrapper."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int], vocab_size: int) -> None:
        special = set(tokenizer.all_special_ids)
        texts = [
            "" if i in special or i >= len(tokenizer) else str(tokenizer.decode([i]))
            for i in range(vocab_size)
        ]
        if any("�" in text for text in texts):
            raise ValueError("tokens that are parts of characters")
        self._tokenizer = tokenizer
        self.eos_token_id = min(end_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(special)
        # A special token must never be mistaken for its own name: 0xFF begins no UTF-8 text.
        self.tokens = [
            b"\xff" + f"<{i}>".encode() if not text else text.encode()
            for i, text in enumerate(texts)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text if isinstance(text, str) else text.decode()
        return [int(i) for i in self._tokenizer.encode(plain, add_special_tokens=False)]


def _token_table(tokenizer: Any, end_ids: frozenset[int], vocab_size: int) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(end_ids))
    except ValueError as error:
        reason = str(error)
    try:
        words = _Words(tokenizer, end_ids, vocab_size)
        return LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size, eos_token=sorted(end_ids))
    except ValueError as error:
        raise DecodingError(
            expected="a tokenizer whose tokens are known as bytes",
            found=f"{reason}; {error}",
            where="sampling parameter grammar",
            fix="Use a target with a byte-level or byte-fallback tokenizer.",
        ) from error
