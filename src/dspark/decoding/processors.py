"""Logit rules: what a request's penalties, bias and minimum length do to a row of logits.

Speculation makes this harder than it looks. Row i of a verify step stands behind i drafted tokens,
and its logits must be what they would be had those tokens been generated one by one. So every rule
is applied per row with the drafted prefix counted in (contract, section 5). Order and formulas are
vLLM's: bias, repetition, frequency, presence; impossible tokens are masked last.

The draft's own logits go through the same function. That is not needed for exactness (q may be
anything, as long as tokens are drawn from it), but a draft that ignores a penalty is rejected for
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from dspark.decoding.params import SamplingParams
from dspark.errors import DecodingError


class LogitRules:
    """The rules of one request over a vocabulary of ``vocab_size``.

    Counts of generated tokens are kept and brought up to date by every call, so a call costs the
    new tokens only. ``end_ids`` are what ``min_new_tokens`` forbids.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_ids: Collection[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.params = params
        self._bias = self._seen = self._counts = self._ends = None
        self._counted = 0
        if params.logit_bias:
            _check_ids(params.logit_bias, vocab_size, "logit_bias")
            self._bias = torch.zeros(vocab_size, device=device)
            self._bias[list(params.logit_bias)] = torch.tensor(
                list(params.logit_bias.values()), dtype=torch.float32, device=device
            )
        if params.has_penalties:
            self._counts = torch.zeros(vocab_size, device=device)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[list(prompt)] = True
        if params.min_new_tokens and end_ids:
            _check_ids(end_ids, vocab_size, "stop_ids")
            self._ends = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._ends[list(end_ids)] = True
            if bool(self._ends.all()):
                raise DecodingError(
                    expected="a token that does not end the answer, before min_new_tokens",
                    found="stop_ids that name every token of the vocabulary",
                    where="sampling parameter stop_ids",
                    fix="Name fewer stop tokens, or leave min_new_tokens out.",
                )

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters have any rule."""
        return bool(params.has_penalties or params.logit_bias or params.min_new_tokens)

    def apply(
        self,
        logits: Tensor,
        output: Sequence[int],
        drafted: Sequence[int],
        first: int = 0,
        support: Tensor | None = None,
    ) -> Tensor:
        """Rows [R, V] under the rules; the input is left alone.

        Args:
            logits: row i stands behind ``output`` and ``drafted[: first + i]``.
            output: tokens generated so far; only ever grows from call to call.
            drafted: drafted tokens.
            first: see ``logits``.
            support: ids [V'] of the columns when the draft has a vocabulary of its own.
        """

        def columns(x: Tensor) -> Tensor:
            return x if support is None else x[..., support]

        out = logits.float().clone()
        if self._bias is not None:
            out += columns(self._bias)
        if self._counts is not None and self._seen is not None:
            out = self._penalised(out, output, drafted, first, columns)
        if self._ends is not None:
            early = self.params.min_new_tokens - len(output) - first
            if early > 0:
                out[:early].masked_fill_(columns(self._ends), -math.inf)
        return out

    def _penalised(
        self,
        out: Tensor,
        output: Sequence[int],
        drafted: Sequence[int],
        first: int,
        columns: Callable[[Tensor], Tensor],
    ) -> Tensor:
        assert self._counts is not None
        assert self._seen is not None
        fresh = list(output[self._counted :])
        if fresh:
            new = torch.tensor(fresh, device=out.device)
            self._counts.index_add_(0, new, torch.ones(len(fresh), device=out.device))
            self._counted = len(output)
        counts = self._counts.repeat(len(out), 1)
        for index, token in enumerate(drafted):
            counts[max(0, index + 1 - first) :, token] += 1
        generated = counts > 0
        repeated = columns(self._seen | generated)
        counts, generated = columns(counts), columns(generated)
        p = self.params
        if p.repetition_penalty != 1.0:
            scaled = torch.where(out > 0, out / p.repetition_penalty, out * p.repetition_penalty)
            out = torch.where(repeated, scaled, out)
        return out - p.frequency_penalty * counts - p.presence_penalty * generated


def _check_ids(ids: Collection[int], vocab_size: int, name: str) -> None:
    strange = sorted(i for i in ids if not 0 <= i < vocab_size)
    if strange:
        raise DecodingError(
            expected=f"token ids below the vocabulary of {vocab_size}",
            found=f"{strange[:3]}",
            where=f"sampling parameter {name}",
            fix=f"Correct {name}.",
        )
