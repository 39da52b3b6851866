"""A tiny target of Kimi-K3's kind, trained where the run is: it needs no download and no GPU.

What a draft can learn of a random model is little, and little can be measured on it. So this one
learns to answer: conversations become a small byte-level vocabulary, then the weights are trained
on their assistants' turns, on our own decoder, which is what runs the model afterwards. Weights are
trained under their published names and written as the published files are, so that everything
behind sees an ordinary model of this family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from dspark.checkpoint.k3 import k3_shapes, write_k3
from dspark.config.made import MakeSection
from dspark.config.target import TargetConfig
from dspark.model.spans import Span
from dspark.model.target import DecoderTarget
from dspark.model.weights import target_state

Messages = Sequence[dict[str, Any]]


class Text(NamedTuple):
    """Ids of a conversation, and which of them are to be learnt."""

    ids: list[int]
    learnt: list[bool]


SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>", "<system>", "<user>", "<assistant>")
PAD, BOS, EOS = 0, 1, 2
TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WARM = 0.1  # share of the steps in which the rate rises


def make_target(
    section: MakeSection,
    conversations: Sequence[Messages],
    folder: Path,
    on_step: Callable[[int], None] = lambda _: None,
) -> float:
    """Train a model on ``conversations`` and write it, with its tokenizer, into ``folder``.

    Args:
        conversations: of system, user and assistant turns; the assistant's are learnt.
        on_step: told 1 after every step.

    Returns:
        Cross entropy of the last tenth of the steps, in nats a token.
    """
    config = section.target_config
    tokenizer = make_tokenizer(conversations, config.vocab_size)
    texts = [encode(tokenizer, messages) for messages in conversations]
    torch.manual_seed(section.seed)
    weights = start(config)
    loss = _train(section, config, weights, texts, on_step)
    ends = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    text = {**section.config, **ends}
    whole = {"model_type": "kimi_k3", "architectures": ["KimiK3ForCausalLM"], "text_config": text}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    write_k3(folder, whole, weights)
    return loss


def make_tokenizer(conversations: Sequence[Messages], size: int) -> Any:
    """A byte-level vocabulary of at most ``size`` tokens, fitted on ``conversations``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator((str(m["content"]) for c in conversations for m in c), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def encode(tokenizer: Any, messages: Messages) -> Text:
    """A conversation as the template writes it; the assistant's words and their end are learnt."""
    ids, learnt = [BOS], [False]
    for message in messages:
        words = tokenizer.encode(str(message["content"]), add_special_tokens=False)
        ends = [EOS] if message["role"] == "assistant" else []
        ids += [SPECIAL.index(f"<{message['role']}>"), *words, *ends]
        learnt += [False, *[bool(ends)] * (len(words) + len(ends))]
    return Text(ids, learnt)


def start(config: TargetConfig) -> dict[str, Tensor]:
    """Weights to begin with, under their published names; all but the routers' corrections learn.

    Products keep the scale of what they read. States begin with memories of very different lengths:
    the strongest decay is half a token's, the weakest lasts for the whole text.
    """
    weights = {}
    for name, shape in k3_shapes(config).items():
        if name.endswith("norm.weight"):
            weight = torch.ones(shape)
        elif name.endswith(("_res_proj.weight", "A_log", "e_score_correction_bias")):
            weight = torch.zeros(shape)
        elif name.endswith("dt_bias"):
            weight = torch.empty(shape).uniform_(-8, -1)
        elif name.endswith("conv1d.weight"):
            weight = torch.randn(shape) * 0.1
            weight[..., -1] += 1.0
        else:
            weight = torch.randn(shape) * shape[-1] ** -0.5
        weights[name] = weight.requires_grad_(not name.endswith("e_score_correction_bias"))
    return weights


def _train(
    section: MakeSection,
    config: TargetConfig,
    weights: dict[str, Tensor],
    texts: Sequence[Text],
    on_step: Callable[[int], None],
) -> float:
    with torch.device("meta"):
        model = DecoderTarget(config)
    learnt = [w for w in weights.values() if w.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=section.learning_rate, weight_decay=0.0, fused=True)
    last: list[float] = []
    for step, batch in enumerate(_batches(texts, section)):
        part = (step + 1) / section.steps
        rate = min(1.0, part / WARM) * 0.5 * (1 + math.cos(math.pi * part))
        for group in optimizer.param_groups:
            group["lr"] = section.learning_rate * rate
        loss = _loss(model, target_state(config, weights), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last = [*last, float(loss.detach())][-max(1, section.steps // 10) :]
        on_step(1)
    return sum(last) / len(last)


def _batches(texts: Sequence[Text], section: MakeSection) -> Iterator[list[Text]]:
    """``steps`` batches of texts of similar length; every text comes equally often."""
    generator = torch.Generator().manual_seed(section.seed)
    made = 0
    while True:
        # Sorted by length first and cut into batches, then the batches are shuffled.
        order = torch.randperm(len(texts), generator=generator).tolist()
        batches: list[list[Text]] = [[]]
        for text in sorted((texts[i] for i in order), key=lambda text: len(text.ids)):
            if (len(batches[-1]) + 1) * len(text.ids) > section.batch_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(text)
        for at in torch.randperm(len(batches), generator=generator).tolist():
            if made == section.steps:
                return
            yield batches[at]
            made += 1


def _loss(model: DecoderTarget, state: dict[str, Tensor], batch: Sequence[Text]) -> Tensor:
    """Cross entropy of what is to be learnt."""
    longest = max(len(text.ids) for text in batch)
    ids = torch.full((len(batch), longest), PAD)
    wanted = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, text in enumerate(batch):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        wanted[row, : len(text.ids)] = torch.tensor(text.learnt)
    span = Span.alone(len(batch), longest, ids.device)
    final = functional_call(model, state, (ids, span)).final
    before = wanted[:, 1:]
    return F.cross_entropy(final[:, :-1][before] @ state["lm_head.weight"].T, ids[:, 1:][before])
