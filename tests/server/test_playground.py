"""The page at /: inert towards the outside, and in a real browser, true."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.server.playground import playground
from server.serving import Served, make_engine, serving

FACTS = {"version": "1", "target": "t", "draft": "d", "block_size": 7, "model": "m", "locked": True, "examples": ()}  # fmt: skip


def test_the_page_loads_nothing_and_allows_its_own_script_only(served: Served) -> None:
    with served.http() as http:
        response = http.get("/")
    page = response.text
    assert response.headers["content-type"].startswith("text/html")
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert not re.search(r"@import|url\((?!data:)", page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = response.headers["content-security-policy"]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def test_names_cannot_become_markup_or_script() -> None:
    nasty = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    example = ({"role": "user", "content": nasty},)
    page = playground(
        {**FACTS, "model": nasty, "draft": nasty, "target": nasty, "examples": (example,)}
    )
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("<script") == 2


def browser_path() -> str | None:
    """A Chromium of this machine, or None for Playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser."""
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as tools:
        try:
            found = tools.chromium.launch(
                executable_path=browser_path(), args=["--no-sandbox", "--disable-gpu"]
            )
        except api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield found
        found.close()


def ask(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.click("#send")


def done(page: Any) -> None:
    page.wait_for_selector("#turns[aria-busy=false]", timeout=60_000)


@pytest.mark.slow
def test_a_chat_in_a_browser_shows_what_the_server_said(
    made_pair: tuple[Path, Path], browser: Any, tmp_path: Path
) -> None:
    with serving(make_engine(made_pair)) as served:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        outside: list[str] = []
        faults: list[str] = []
        page.on(
            "request", lambda r: r.url.startswith((served.base, "data:")) or outside.append(r.url)
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda m: m.type == "error" and faults.append(m.text))
        page.goto(served.base)
        assert not page.is_visible("#key-label")
        page.fill("#most", "150")
        ask(page, "hello there")
        done(page)
        page.check("#refused")
        page.click("summary")
        page.screenshot(path=tmp_path / "chat.png", full_page=True)
        kinds = {k: page.locator(f".turn.assistant > .text .piece.{k}").count()
                 for k in ("accepted", "corrected", "bonus")}  # fmt: skip
        assert min(kinds.values()) > 0, kinds
        plain = served.client.chat.completions.create(
            model="made-pair", messages=[{"role": "user", "content": "hello there"}],
            temperature=0, max_tokens=150,
        ).choices[0].message.content  # fmt: skip
        shown = "".join(page.locator(".turn.assistant > .text .piece").all_text_contents())
        assert shown == plain
        other = "".join(page.locator("details .piece").all_text_contents())
        assert other == plain
        assert "The same text" in page.inner_text("summary")
        stats = served.service.metrics.mtp_stats()
        first = page.inner_text("#slots .slot:first-child span:last-child")
        assert re.fullmatch(r"\d+ %", first)
        assert 1 < float(page.inner_text("#length")) < 8
        assert float(page.inner_text("#speed")) > 0
        assert float(page.inner_text("#plain")) > 0
        assert stats["total_steps"] > 0
        assert page.locator(".turn .no:visible").count() > 0
        page.set_viewport_size({"width": 390, "height": 800})
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=tmp_path / "narrow.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert not faults
        assert not outside
        page.close()


@pytest.mark.slow
def test_stop_key_and_a_full_server_are_told_in_the_page(
    made_pair: tuple[Path, Path], browser: Any
) -> None:
    with serving(make_engine(made_pair), keys=("open",)) as served:
        page = browser.new_page()
        page.goto(served.base)
        assert page.is_visible("#key-label")
        ask(page, "without a key")
        done(page)
        assert "API key" in page.inner_text(".turn.fault")
        page.fill("#key", "open")
        page.fill("#most", "480")
        page.click("#fresh")
        ask(page, "stop me")
        page.wait_for_selector(".turn.assistant .piece")
        page.click("#stop")
        done(page)
        assert "stopped" in page.inner_text(".turn.assistant h3")
        served.idle()
        page.close()


@pytest.mark.slow
def test_an_example_is_asked_with_its_earlier_turns(
    made_pair: tuple[Path, Path], browser: Any, tmp_path: Path
) -> None:
    example = (
        {"role": "system", "content": "Be <b>brief</b>."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    )
    with serving(make_engine(made_pair), examples=(example,)) as served:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(served.base)
        page.uncheck("#compare")
        page.fill("#most", "60")
        page.click("#example")
        done(page)
        page.screenshot(path=tmp_path / "example.png", full_page=True)
        given = page.locator(".turn.given .text").all_text_contents()
        assert given == [turn["content"] for turn in example[:-1]]
        asked = served.client.chat.completions.create(
            model="made-pair", messages=list(example), temperature=0, max_tokens=60
        )
        shown = "".join(page.locator(".turn.assistant:not(.given) .piece").all_text_contents())
        assert shown == asked.choices[0].message.content
        page.close()
    with serving(make_engine(made_pair)) as served, served.http() as http:
        assert 'id="example"' not in http.get("/").text
