"""How one request is sampled and when it ends: plain values, checked once, no torch.

Two kinds of fields. *Logit rules* (penalties, bias, minimum length, grammar) change logits and
depend on the text so far; *shape* (temperature, min_p, top_k, top_p) turns a row of logits into a
distribution. Both act on every target row of a block with the drafted tokens before it applied, and
on the draft's rows too, so that drafting follows them.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from dspark.config.faults import did_you_mean
from dspark.errors import DecodingError

# Below this the softmax of fp32 logits is a one-hot up to rounding: the user means greedy.
MIN_TEMPERATURE = 1e-5
# Beyond these fp32 logits overflow, and the request would fail in the middle of a batch.
LARGEST_SHIFT = 1_000_000
REPETITION = (0.001, 1000.0)


class Shape(NamedTuple):
    """What turns logits into a distribution; requests of equal shape are computed together."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


GrammarKind = Literal["json", "regex", "lark"]
SchedulerName = Literal["fixed", "threshold", "sync", "async"]


@dataclass(frozen=True)
class Grammar:
    """What the whole answer must match: a ``json`` schema (as JSON text), a ``regex``, or a
    ``lark`` grammar."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind) or not self.text:
            raise DecodingError(
                expected=f"a kind of {list(get_args(GrammarKind))} and a text",
                found=f"kind {self.kind!r}, {len(self.text)} characters",
                where="sampling parameter grammar",
                fix="Give grammar.kind and grammar.text.",
            )


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Args:
        temperature: 0 is greedy (argmax); otherwise at least ``MIN_TEMPERATURE``.
        top_k: keep the k most probable tokens (ties with the k-th stay); 0 is off.
        top_p: keep the smallest set of most probable tokens with at least this mass (ties with
            the last stay); 1.0 is off.
        min_p: drop tokens less probable than ``min_p`` times the most probable; 0 is off.
        presence_penalty: subtracted once from the logit of every generated token.
        frequency_penalty: subtracted for every time a token was generated.
        repetition_penalty: logits of tokens in prompt or answer are divided by it when positive,
            multiplied when negative; 1 is off.
        logit_bias: added to the logits of these ids.
        seed: of this request's random streams; None draws one, which the result reports.
        n: answers to make; answer i > 0 uses a seed derived from ``seed`` and i.
        max_new_tokens: generated tokens at most.
        min_new_tokens: end and stop tokens are impossible, and stop strings not looked for, before.
        stop: strings that end the answer; they are cut off unless ``include_stop``.
        stop_ids: tokens that end the answer, as the target's own end tokens do.
        ignore_eos: the target's end tokens are tokens like any other.
        include_stop: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: report log-probabilities of the target before any rule or temperature: of the
            generated token, and of this many most likely ones. None is off.
        grammar: what the answer must match.
        scheduler: instead of the engine's own: ``fixed``, ``threshold``, ``sync`` or ``async``.
        speculate: False decodes this request without drafts, beside others that draft.

    Raises:
        DecodingError: a value of the wrong type or outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    grammar: Grammar | None = None
    scheduler: SchedulerName | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        t = self.temperature
        if not _is_number(t) or not (t == 0 or t >= MIN_TEMPERATURE):
            self._refuse("temperature", f"0 (greedy) or a finite number >= {MIN_TEMPERATURE}")
        self._check_integer("top_k", 0, "an integer >= 0 (0 is off)")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            self._refuse("top_p", "a number in (0, 1] (1 is off)")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            self._refuse("min_p", "a number in [0, 1] (0 is off)")
        if self.seed is not None and (not _is_integer(self.seed) or not 0 <= self.seed < 2**63):
            self._refuse("seed", "an integer in [0, 2**63)")
        self._check_integer("n", 1, "an integer >= 1")
        self._check_integer("max_new_tokens", 1, "an integer >= 1")
        if self.scheduler is not None and self.scheduler not in get_args(SchedulerName):
            known = get_args(SchedulerName)
            fix = did_you_mean(str(self.scheduler), known)
            self._refuse("scheduler", f"one of {', '.join(known)}", fix)
        self._check_rules()
        self._check_ends()

    def _check_rules(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not _is_number(getattr(self, name)) or abs(getattr(self, name)) > LARGEST_SHIFT:
                self._refuse(name, f"a number in [-{LARGEST_SHIFT}, {LARGEST_SHIFT}] (0 is off)")
        low, high = REPETITION
        if not _is_number(self.repetition_penalty) or not low <= self.repetition_penalty <= high:
            self._refuse("repetition_penalty", f"a number in [{low}, {high}] (1 is off)")
        for token, bias in self.logit_bias.items():
            small = _is_number(bias) and abs(bias) <= LARGEST_SHIFT
            if not _is_integer(token) or token < 0 or not small:
                self._refuse("logit_bias", f"token ids >= 0, numbers up to {LARGEST_SHIFT} in size")
        if self.logprobs is not None:
            self._check_integer("logprobs", 0, "an integer >= 0, or None")

    def _check_ends(self) -> None:
        self._check_integer("min_new_tokens", 0, "an integer >= 0")
        if self.min_new_tokens > self.max_new_tokens:
            self._refuse("min_new_tokens", f"at most max_new_tokens ({self.max_new_tokens})")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            self._refuse("stop", "a tuple of non-empty strings")
        if not isinstance(self.stop_ids, tuple) or not all(
            _is_integer(i) and i >= 0 for i in self.stop_ids
        ):
            self._refuse("stop_ids", "a tuple of token ids")

    @property
    def shape(self) -> Shape:
        return Shape(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens the text holds."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def seed_or_fresh(self) -> int:
        """The seed, or a new one that nobody has seen."""
        return secrets.randbits(62) if self.seed is None else self.seed

    def _check_integer(self, name: str, least: int, expected: str) -> None:
        value = getattr(self, name)
        if not _is_integer(value) or value < least:
            self._refuse(name, expected)

    def _refuse(self, name: str, expected: str, fix: str = "") -> NoReturn:
        raise DecodingError(
            expected=expected,
            found=repr(getattr(self, name)),
            where=f"sampling parameter {name}",
            fix=fix or f"Set {name} to {expected}.",
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))
