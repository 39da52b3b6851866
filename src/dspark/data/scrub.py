"""Takes personal data out of a text before anything of it is stored, hashed or compared.

The default knows what can be told by its form alone: e-mail addresses, telephone numbers, IP
addresses, keys and tokens of well-known services, card numbers that pass their checksum. Names and
addresses cannot be found by a pattern; whoever logs those gives a function of their own
(``module:function``, text to text), which replaces the default.
"""

from __future__ import annotations

import importlib
import ipaddress
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from dspark.errors import ConfigError

Scrubber = Callable[[str, Counter[str]], str]

_KEYS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:sk|pk|rk)[-_](?:[A-Za-z0-9]+[-_])*[A-Za-z0-9]{16,}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_\w{20,}\b|\bhf_[A-Za-z0-9]{20,}\b"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{16,}=*",
    re.DOTALL,
)
_EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
_IPV6 = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])")
_PHONE = re.compile(
    r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?(?:\d[ .-]?){6,12}\d"
    r"|\(\d{3}\) ?\d{3}[ .-]\d{4}|\d{3}[ .-]\d{3}[ .-]\d{4}"
    r"|0\d{2,4}[ /-]\d{3,4}[ -]?\d{3,5})(?![\w-])"
)


def scrubber(name: str) -> Scrubber:
    """The scrubber a recipe names. It is called with a text and a counter of replacements.

    Raises:
        ConfigError: there is no such module or function.
    """
    if name == "none":
        return lambda text, counts: text
    if name == "default":
        return scrub
    module, _, function = name.partition(":")
    try:
        own: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            expected="a Python function module:function that can be imported",
            found=str(error),
            where=f"scrub {name}",
            fix="Put the module's folder on PYTHONPATH, or use default.",
        ) from error
    return lambda text, counts: _own(own, name, text, counts)


def _own(function: Any, name: str, text: str, counts: Counter[str]) -> str:
    result = function(text)
    if not isinstance(result, str):
        raise ConfigError(
            expected="a function that takes a text and returns a text",
            found=f"a {type(result).__name__}",
            where=f"scrub {name}",
            fix="Return the scrubbed text.",
        )
    if result != text:
        counts[name] += 1
    return result


def scrub(text: str, counts: Counter[str]) -> str:
    """``text`` with <KEY>, <EMAIL>, <IP>, <CARD> and <PHONE> in place of what they stand for."""
    text, found = _KEYS.subn("<KEY>", text)
    counts["key"] += found
    if "@" in text:
        text, found = _EMAIL.subn("<EMAIL>", text)
        counts["email"] += found

    def replace(pattern: re.Pattern[str], kind: str, real: Callable[[str], bool]) -> None:
        nonlocal text

        def one(match: re.Match[str]) -> str:
            if not real(match.group()):
                return match.group()
            counts[kind] += 1
            return f"<{kind.upper()}>"

        text = pattern.sub(one, text)

    replace(_IPV4, "ip", _is_address)
    replace(_IPV6, "ip", _is_address)
    replace(_CARD, "card", _is_card)
    replace(_PHONE, "phone", lambda _: True)
    return text


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return text != "::"


def _is_card(text: str) -> bool:
    """The Luhn checksum, so that order numbers stay."""
    digits = [int(c) for c in text if c.isdigit()]
    doubled = (d if i % 2 == 0 else d * 2 - 9 * (d > 4) for i, d in enumerate(reversed(digits)))
    return sum(doubled) % 10 == 0
