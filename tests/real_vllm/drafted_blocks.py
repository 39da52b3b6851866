"""What ``run_offline.py`` tells of vLLM's blocks and counters, and the same blocks by our engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark import SamplingParams
from dspark.checkpoint.draft import load_draft
from dspark.checkpoint.target import LoadedTarget
from dspark.decoding.sampling import RandomStreams
from dspark.engine.drafter import Block, Drafter
from dspark.engine.sampler import RequestSampler
from dspark.model.spans import BlockContext, Span


@dataclass(frozen=True)
class Drafted:
    """One block: ids of the whole ``text`` behind a ``prompt`` of so many tokens, the anchor's
    position and id, and the drafted ids."""

    text: tuple[int, ...]
    prompt: int
    position: int
    anchor: int
    tokens: list[int]


def growth(found: list[dict[str, Any]], batch: int, name: str) -> int:
    """A counter's growth over one batch."""
    values = [b["counters"].get(f"vllm:{name}", 0) for b in found]
    return int(values[batch] - (values[batch - 1] if batch else 0))


def acceptance_length(found: list[dict[str, Any]], batch: int) -> float:
    """As ``/metrics`` gives it: what was accepted behind the end of an answer counts too."""
    accepted = growth(found, batch, "spec_decode_num_accepted_tokens")
    return 1 + accepted / growth(found, batch, "spec_decode_num_drafts")


def blocks_of(found: dict[str, Any], prompts: list[list[int]]) -> list[Drafted]:
    """Every block of one batch whose anchor is part of the text, in the prompt's chunks too."""
    texts = {
        name: (tuple(prompt + answer), len(prompt))
        for name, prompt, answer in zip(found["requests"], prompts, found["answers"], strict=True)
    }
    rows = []
    for name, position, anchor, tokens in found["drafted"]:
        # vLLM adds a random ending to the names of requests.
        text, start = texts[name.rpartition("-")[0]]
        if position < len(text):
            assert text[position] == anchor
            rows.append(Drafted(text, start, position, anchor, tokens))
    return rows


def matched(found: dict[str, Any], prompts: list[list[int]]) -> int:
    """Tokens of the answers' blocks that agree with the text behind their anchor, to its end."""
    total = 0
    for block in blocks_of(found, prompts):
        if block.position < block.prompt:
            continue  # behind a chunk of the prompt; vLLM throws it away
        for at, token in enumerate(block.tokens, start=block.position + 1):
            if at >= len(block.text) or block.text[at] != token:
                break
            total += 1
    return total


class Redrafted:
    """Counts, slot by slot, where our engine drafts another token from the same text, greedily."""

    def __init__(self, loaded: LoadedTarget, folder: Path) -> None:
        draft, _ = load_draft(folder)
        self.width = draft.config.block_size
        self.target = loaded.build(draft.config.target_layer_ids)
        self.drafter = Drafter(draft, self.target.head_weight())
        self.sampler = RequestSampler(SamplingParams(temperature=0), "greedy", RandomStreams(0))
        self.compared = self.differing = 0
        self._rows: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def __str__(self) -> str:
        return f"{self.differing} of {self.compared} drafted tokens differ"

    @torch.inference_mode()
    def compare(self, blocks: list[Drafted], context: int) -> None:
        """Slots beyond ``context``, the longest sequence, are left out."""
        for block in blocks:
            rows = [r[: block.position].unsqueeze(0) for r in self._context(block.text)]
            states = self.drafter.block_states(
                torch.tensor([block.anchor]), torch.tensor([block.position]), [BlockContext(rows)]
            )
            own = Block(self.sampler, [], block.anchor, self.width)
            self.drafter.draw(states, [own])
            inside = min(self.width, context - 1 - block.position)
            pairs = zip(own.ids[:inside], block.tokens[:inside], strict=True)
            self.compared += inside
            self.differing += sum(a != b for a, b in pairs)

    def _context(self, text: tuple[int, ...]) -> list[torch.Tensor]:
        if text not in self._rows:
            span = Span.alone(1, len(text), self.target.device)
            out = self.target.forward(torch.tensor([text]), span, None)
            self._rows[text] = self.drafter.context_rows(out.taps[0], torch.arange(len(text)))
        return self._rows[text]
