"""Messages to token ids, which of them are trained on, and which id may stand for "not yet known".

Three small decisions that ruin a draft when they differ between training and serving:

- Prompts go through the target's own chat template, with the generation prompt and without any
  further special tokens: templates write bos themselves, and adding it again shifts everything.
- The loss mask covers the ids the target really generated, first one to end-of-turn inclusive
  (contract, section 4). It is counted, never searched for in rendered text.
- MASK is a reserved id of the target's vocabulary: its embedding row exists and nothing else uses
  it. pad, bos, eos and unk mean something to engines and are refused.

Nothing here imports transformers: any object with a tokenizer's methods will do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from jinja2 import TemplateError

from dspark.errors import ConfigError, DataError, TargetError

_SAMPLE = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]
# Cases, digits, runs of white space, accents in both spellings, other scripts, an emoji, code.
_PROBE = (
    "The 3rd O'Neill paid 1,234.50 EUR (20%) at 07:45.\n\n\tdef f(x):\n        return x**2 # ok\r\n"
    "na\u00efve cafe\u0301 \u4f60\u597d \u041c\u0438\u0440 \u0645\u0631\u062d\u0628\u0627 "
    "\U0001f600 {'a': [1, null]} https://example.org/?q=1 XMLHttpRequest  end "
)
_ANSWER = "answer7f3a"  # lower case and digits: no template strips or rewrites it


Ending = Literal["answer", "open", "closed"]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any
    bos_token_id: Any
    eos_token_id: Any
    pad_token_id: Any
    unk_token_id: Any
    added_tokens_decoder: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render a conversation to text or ids."""

    def encode(self, text: str, **options: Any) -> Any:
        """Ids of a text."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Text of ids."""

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """Name of one id."""

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id, added tokens included."""


def prompt_ids(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    ending: Ending = "answer",
) -> list[int]:
    """Ids of a conversation up to where the target starts to answer, 1-D.

    ``variables`` go to the template as they are (``enable_thinking``, ``reasoning_effort``).
    ``ending`` is what stands at the end: the opening of an ``answer``, the last turn left ``open``
    to be continued, or the last turn ``closed`` and nothing behind it.

    Raises:
        TargetError: the tokenizer has no chat template.
        DataError: no messages, the template refuses them (a role it does not know), or it leaves
            the tools out, so that the target would be asked to use what it is not shown.
    """
    _template_text(tokenizer)
    if not messages:
        raise DataError(
            expected="at least one message",
            found="none",
            where="chat template",
            fix="Give the prompt a user turn.",
        )
    own = {
        "tokenize": True,
        "return_dict": False,
        "add_generation_prompt": ending == "answer",
        "continue_final_message": ending == "open",
    }
    options = {**(variables or {}), **own}
    ids = [int(i) for i in _render(tokenizer, messages, **options)]
    if not tools:
        return ids
    shown = [int(i) for i in _render(tokenizer, messages, tools=list(tools), **options)]
    if shown == ids:
        raise DataError(
            expected="a chat template that shows tools",
            found=f"one that ignores them ({len(tools)} tools)",
            where="chat template",
            fix="Remove prompts with tools, or use a target that is trained to call them.",
        )
    return shown


def template_hash(tokenizer: Tokenizer) -> str:
    """sha256 (hex) of the chat template: answers made under another template are not comparable.

    Raises:
        TargetError: the tokenizer has no chat template.
    """
    return hashlib.sha256(_template_text(tokenizer).encode()).hexdigest()


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """sha256 (hex) of what ids mean and how text becomes ids, whatever file it was read from.

    Covered are every token and its id, which ids are special, and the ids of one fixed text that
    meets the usual rules of splitting and normalising. The chat template is apart.
    """
    added = tokenizer.added_tokens_decoder
    what = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": sorted(int(i) for i, token in added.items() if token.special),
        "named": {str(i): names for i, names in sorted(_named_ids(tokenizer).items())},
        "probe": [int(i) for i in tokenizer.encode(_PROBE, add_special_tokens=False)],
    }
    return hashlib.sha256(json.dumps(what, separators=(",", ":")).encode()).hexdigest()


class Answering(Protocol):
    """A loaded target, as far as the end of its answers goes."""

    tokenizer: Any
    end_ids: tuple[int, ...]


def end_ids(target: Answering) -> frozenset[int]:
    """Token ids that end an answer of ``target``: see :func:`end_of_turn_ids`."""
    return end_of_turn_ids(target.tokenizer, target.end_ids or None)


def end_of_turn_ids(
    tokenizer: Tokenizer, generation_eos: Sequence[int] | None = None
) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's eos and those of the target's generation config.

    Where no generation config is known, the special token that the chat template puts after an
    assistant turn counts too: base tokenizers name another eos than their template writes, and
    answers would run on to the length limit.

    Raises:
        TargetError: no such id exists, or one is outside the vocabulary.
    """
    found = set(generation_eos or ())
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if generation_eos is None:
        found |= _closing_ids(tokenizer)
    known = set(tokenizer.get_vocab().values())
    strange = sorted(found - known)
    if strange or not found:
        raise TargetError(
            expected="end-of-turn ids that are tokens of the target",
            found=f"ids {strange} without a token" if strange else "none at all",
            where="tokenizer and generation config",
            fix="Set eos_token in tokenizer_config.json and eos_token_id in "
            "generation_config.json to the token that ends an answer.",
        )
    return frozenset(found)


def usable_mask_ids(
    tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int] = ()
) -> dict[int, str]:
    """Ids that may be MASK, with their names: reserved special tokens, then rows without a token.

    Not among them: pad, bos, eos, unk, ``end_ids``, and whatever the chat template writes.
    """
    taken = set(_named_ids(tokenizer)) | set(end_ids)
    template = ""
    if tokenizer.chat_template:
        template = _template_text(tokenizer)
        taken |= _template_ids(tokenizer)
    usable = {
        int(i): str(token)
        for i, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and i < vocab_size and i not in taken and str(token) not in template
    }
    named = set(tokenizer.get_vocab().values()) | set(tokenizer.added_tokens_decoder)
    usable |= {i: "(no token)" for i in range(vocab_size) if i not in named and i not in taken}
    return usable


def check_mask_token(
    tokenizer: Tokenizer, mask_token_id: int, vocab_size: int, end_ids: Collection[int] = ()
) -> None:
    """Refuse a MASK that engines or the target's own text could also produce.

    Args:
        vocab_size: rows of the target's embedding, at least the tokenizer's size.
        end_ids: see :func:`end_of_turn_ids`; refused like eos.

    Raises:
        ConfigError: at ``draft.mask_token_id``; lists ids that can be used.
    """
    usable = usable_mask_ids(tokenizer, vocab_size, end_ids)
    if mask_token_id in usable:
        return
    names = _named_ids(tokenizer)
    if not 0 <= mask_token_id < vocab_size:
        found = f"{mask_token_id}, outside the vocabulary of {vocab_size}"
    else:
        token = f"{mask_token_id} ({tokenizer.convert_ids_to_tokens(mask_token_id)!r})"
        added = tokenizer.added_tokens_decoder.get(mask_token_id)
        if mask_token_id in names:
            found = f"{token}, the target's {' and '.join(names[mask_token_id])}"
        elif mask_token_id in end_ids:
            found = f"{token}, which ends an answer"
        elif added is None or not added.special:
            found = f"{token}, an ordinary token"
        else:
            found = f"{token}, which the chat template writes"
    listed = ", ".join(f"{i} {name}" for i, name in list(usable.items())[:16])
    raise ConfigError(
        expected="a reserved id of the target's vocabulary",
        found=found,
        where="draft.mask_token_id",
        fix=f"Use one of: {listed}."
        if usable
        else "This vocabulary reserves no id: choose "
        "a target whose tokenizer has an unused special token.",
    )


def _template_text(tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        # Several named templates: all of them, so that the hash changes when any of them does.
        template = json.dumps(template, sort_keys=True, ensure_ascii=False)
    if not template:
        raise TargetError(
            expected="a tokenizer with a chat template",
            found="none",
            where="target tokenizer",
            fix="Use the instruction-tuned version of the target, or put its chat_template.jinja "
            "beside tokenizer_config.json.",
        )
    return str(template)


def _render(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except TemplateError as error:
        raise DataError(
            expected=f"roles that the target's chat template accepts: {error}",
            found=" ".join(message["role"] for message in messages),
            where="chat template",
            fix="Remove system turns or reorder the turns of this prompt.",
        ) from error


def _named_ids(tokenizer: Tokenizer) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name in ("bos", "eos", "pad", "unk"):
        token_id = getattr(tokenizer, f"{name}_token_id")
        if token_id is not None:
            names.setdefault(int(token_id), []).append(name)
    return names


def _template_ids(tokenizer: Tokenizer) -> set[int]:
    """Ids in a rendered conversation, with the system turn where the template knows one."""
    for sample in (_SAMPLE, _SAMPLE[1:]):
        try:
            return set(prompt_ids(tokenizer, sample))
        except DataError:
            continue
    return set()


def _closing_ids(tokenizer: Tokenizer) -> set[int]:
    """The special token the template writes straight after an assistant turn, if any."""
    if not tokenizer.chat_template:
        return set()
    turns = [{"role": "user", "content": "b"}, {"role": "assistant", "content": _ANSWER}]
    text = str(_render(tokenizer, turns, tokenize=False))
    tail = text.rpartition(_ANSWER)[2].lstrip()
    first = tokenizer.encode(tail, add_special_tokens=False)[:1] if tail else []
    added = tokenizer.added_tokens_decoder
    return {int(i) for i in first if i in added and added[i].special}
