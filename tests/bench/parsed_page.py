"""A page as a parser sees it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(HTMLParser):
    """Elements in order, with a stack that must close what it opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data_of_row: dict[str, list[list[float]]] = {}
        self.row = ""
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "tr":
            self.row = found.get("class") or ""
            self.data_of_row.setdefault(self.row, []).append([])
        if tag == "data" and "tr" in self.stack:
            self.data_of_row[self.row][-1].append(float(found["value"] or "nan"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
