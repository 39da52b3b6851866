"""A tokenizer alone, for work on text that needs no model: counting, comparing, rendering."""

from __future__ import annotations

import hashlib
import io
import json
from contextlib import redirect_stderr
from typing import Any

from dspark.checkpoint.source import PACKAGE, find_target, first_line, offline
from dspark.errors import TargetError


def load_tokenizer(source: str, revision: str | None = None) -> Any:
    """The tokenizer at a path, of a hub id, or of ``package:NAME``.

    Raises:
        TargetError: unreadable, or a hub id without a network.
        MissingDependencyError: the named package is not installed.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    location = source
    if source.startswith(PACKAGE) or source.endswith(".gguf"):
        files = find_target(source, revision)
        location, options = files.location, {"gguf_file": files.gguf}
    try:
        with redirect_stderr(io.StringIO()):
            return AutoTokenizer.from_pretrained(location, **options)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            expected="a tokenizer that transformers can load",
            found=f"{first_line(error)}{offline()}",
            where=f"tokenizer {source}",
            fix="Give a local folder with tokenizer.json, or leave the tokenizer out.",
        ) from error


def generation_end_ids(source: str, revision: str | None = None) -> tuple[int, ...] | None:
    """Ids that the model's own generation config ends an answer with; None where it has none."""
    from transformers import GenerationConfig

    if source.startswith(PACKAGE) or source.endswith(".gguf"):
        return None
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        with redirect_stderr(io.StringIO()):
            found = GenerationConfig.from_pretrained(source, **options).eos_token_id
    except (OSError, ValueError, KeyError):
        return None
    return None if found is None else listed_ids(found)


def listed_ids(found: Any) -> tuple[int, ...]:
    """``eos_token_id`` of a generation config, which may be one id, a list of them or nothing."""
    if found is None:
        return ()
    return tuple(int(i) for i in found) if isinstance(found, (list, tuple)) else (int(found),)


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 (hex) of the vocabulary, the merges where they can be read, and the chat template."""
    parts: list[Any] = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    if tokenizer.is_fast:
        parts.append(tokenizer.backend_tokenizer.to_str())
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
