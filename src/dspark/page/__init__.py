"""What every page of dspark shares: style, filters, and the rule that a page is one inert file.

Pages have no scripts, fonts, images or outside links, so they can be mailed, archived and opened in
ten years. Templates escape all text, since prompts and answers may hold markup, and control
characters are shown as pictures. Each stage keeps its own templates; ``page.css`` is shared.
"""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# Control characters are shown as pictures, except those that lay out text.
_CONTROLS = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {127: 0x2421}

# How a token came to be (``dspark.decoding.request.TokenKind``), in the words of every legend.
TOKEN_KINDS = {
    "accepted": "drafted, and the target agreed",
    "corrected": "the target's own, in place of a drafted token that it refused",
    "bonus": "the target's own, where it refused none: after the prompt, after a block it accepted "
    "whole, or where nothing was drafted",
}


def page_environment(package: str) -> Environment:
    """Templates of ``package`` and the shared ones; filters ``count``, ``number``, ``visible``."""
    loaders = [PackageLoader(package, "templates"), PackageLoader("dspark.page", "templates")]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count": count, "number": number, "visible": visible}
    environment.globals["token_kinds"] = TOKEN_KINDS
    return environment


def visible(text: str) -> str:
    """``text`` with control characters as their pictures."""
    return text.translate(_CONTROLS)


def number(value: float | None, digits: int = 2) -> Markup:
    """Rounded for the eye, exact for a program that reads the page; a dash where there is none."""
    if value is None:
        return Markup("–")
    return Markup('<data value="{}">{}</data>').format(value, f"{value:.{digits}f}")


def count(value: int) -> Markup:
    """A whole number with its thousands apart, plain for a program that reads the page."""
    return Markup('<data value="{}">{}</data>').format(value, f"{value:,}")
