"""Takes the wrapping off a text: chat template marks, role labels, instruction preambles.

The same question is passed around inside ChatML, Llama, Alpaca and Vicuna wrappings. Marks become
line breaks, so that what is compared is what was asked. Only for comparing: the stored prompt keeps
its text.
"""

from __future__ import annotations

import re

_HINTS = (
    "<|",
    "[INST",
    "<<SYS",
    "<s>",
    "_of_turn>",
    "###",
    "Below is an ins",
    "uman:",
    "ser:",
    "SER:",
)
_ROLE = r"(?:system|user|assistant|human|model|tool)"
_MARKS = re.compile(
    rf"<\|(?:im_start|start_header_id|start)\|>\s*{_ROLE}?(?:<\|end_header_id\|>)?"
    rf"|<start_of_turn>\s*{_ROLE}?|<end_of_turn>"
    r"|<\|[A-Za-z0-9_▁]{1,40}\|>"
    r"|</?s>|\[/?INST\]|<</?SYS>>"
    r"|^\s*###\s*(?:Instruction|Input|Response|Question|Answer|Human|User|Assistant)s?\s*:?"
    r"|^Below is an instruction that describes a task[^\n]*"
    r"|^\s*(?:Human|User|USER|Assistant|ASSISTANT)\s*:",
    re.MULTILINE,
)


def unwrapped(text: str) -> str:
    """``text`` with wrapping marks replaced by line breaks; the same object if there are none."""
    if not any(hint in text for hint in _HINTS):
        return text
    return _MARKS.sub("\n", text)
