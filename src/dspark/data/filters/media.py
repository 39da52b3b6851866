"""Rows that show or play something: the target would be asked about what it cannot see.

Media hide in four places: a content part that is no text, a column beside the conversation, a
place-holder in the text (``<image>``) and a data URL. Each is looked for, and the finding is named.
"""

from __future__ import annotations

import re
from typing import Any

_COLUMNS = (
    "image", "images", "image_url", "audio", "audios", "video", "videos", "pixel_values",
)  # fmt: skip
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MARKS = re.compile(
    r"<\|?(?:image|img|audio|video)(?:_pad|_start|_end|_token)?(?:_?\d+)?\|?>"
    r"|\[(?:image|audio|video)\]|data:(?:image|audio|video)/[\w.+-]+;base64,"
    r"|<\|(?:vision|audio)_(?:start|bos)\|>",
    re.IGNORECASE,
)


def media_column(row: dict[str, Any]) -> str | None:
    """Name of a filled column that holds media, if the row has one."""
    for name in _COLUMNS:
        value = row.get(name)
        # An empty list, empty text or null is how tables say "this row has none".
        if value is not None and value != [] and value != "" and value != {}:
            return f"column {name}"
    return None


def media_part(part: dict[str, Any]) -> str | None:
    """Kind of a content part, if it is no text."""
    kind = part.get("type", "text" if "text" in part else "unknown")
    return None if kind in _TEXT_PARTS else f"content part {kind}"


def media_mark(text: str) -> str | None:
    """A place-holder or data URL in a text."""
    if "<" not in text and "[" not in text and "base64" not in text:
        return None
    found = _MARKS.search(text)
    return f"{found.group()[:40]!r} in the text" if found else None
