"""The page at ``/``: a chat in which every token shows how it came to be.

One file without outside assets. Its script is allowed by hash alone, and it may talk to this server
only. Everything the page shows comes from the public interface (``return_token_kinds``,
``speculate``): there is no second way in.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from dspark.page import page_environment


def _text(name: str) -> str:
    return (files("dspark.server") / "templates" / name).read_text(encoding="utf-8")


SCRIPT, STYLE = _text("playground.js"), _text("playground.css")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def playground(facts: dict[str, Any]) -> str:
    """The page's HTML; ``facts`` are the server's (see ``About``), the model's name, and whether a
    key is needed."""
    page = page_environment("dspark.server").get_template("playground.html.j2")
    data = json.dumps(facts).replace("<", "\\u003c").replace("&", "\\u0026")
    return page.render(facts=facts, data=Markup(data), script=Markup(SCRIPT), style=Markup(STYLE))
