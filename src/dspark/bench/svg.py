"""One drawing as one element of an HTML page that holds many such.

matplotlib draws; :func:`_inline` then turns its output into something a page can own: colours
become CSS variables (dark mode), ids get a prefix (many SVGs share one document), namespaces,
metadata and the global style sheet go, and a title and a description for those who cannot see it
come in.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from dspark.errors import MissingDependencyError

# Drawn colour -> CSS variable of the page. The drawn colours are also the light theme's.
_THEME = {
    "#1d2127": "var(--ink)",
    "#59626d": "var(--muted)",
    "#dde1e6": "var(--line)",
    "#0b6bb0": "var(--c1)",
    "#b65a00": "var(--c2)",
    "#00795a": "var(--c3)",
    "#9b3d82": "var(--c4)",
}
INK, _MUTED, _LINE, *SERIES = _THEME
_WIDTH_INCHES = 3.7
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.parse_math": False,
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _LINE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}


@dataclass(frozen=True)
class Plot:
    """One panel: ``svg`` is safe to put on a page as it is; ``text`` says what it shows."""

    title: str
    text: str
    svg: str


def require_plotting() -> None:
    """Refuse at once, before hours of work, what could not be drawn at their end.

    Raises:
        MissingDependencyError: matplotlib is not installed; names the extra.
    """
    try:
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            expected="matplotlib, which draws the report's plots",
            found=f"it cannot be imported ({error})",
            where="report",
            fix="Run: pip install 'dspark[report]'",
        ) from error


def panel(name: str, title: str, text: str, draw: Callable[[Any], None]) -> Plot:
    """``draw`` on the axes of one panel.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    require_plotting()
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # "default" first: a matplotlibrc of the user's must not change the page.
    with style.context(["default", {**_STYLE, "svg.hashsalt": name}]):
        figure = Figure(figsize=(_WIDTH_INCHES, 2.5), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return Plot(title, text, _inline(buffer.getvalue(), name, title, text))


def _inline(document: str, name: str, title: str, text: str) -> str:
    """matplotlib's document as one element of an HTML page that holds many such."""
    root = ElementTree.fromstring(document)
    prefix = re.sub(r"[^a-z0-9-]", "-", name) + "-"
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {k.rpartition("}")[2]: v for k, v in element.attrib.items()}
        element.attrib.clear()
        for key, value in attributes.items():
            if key == "id":
                value = prefix + value
            elif key == "href":
                value = "#" + prefix + value.lstrip("#")
            value = value.replace("url(#", "url(#" + prefix)
            for colour, variable in _THEME.items():
                value = value.replace(colour, variable)
            element.set(key, value)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{prefix}title {prefix}text"}
    for tag, content in (("desc", text), ("title", title)):
        element = ElementTree.Element(tag, {"id": f"{prefix}{'text' if tag == 'desc' else tag}"})
        element.text = content
        root.insert(0, element)
    return ElementTree.tostring(root, encoding="unicode")
