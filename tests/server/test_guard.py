"""What is settled before any route: the size and pace of bodies, keys, request ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.server import guard
from server.serving import CHAT, Served, body, fault, make_engine, raw_request, serving


def test_oversize_and_slow_bodies_are_cut_off(made_pair: tuple[Path, Path]) -> None:
    with serving(make_engine(made_pair), body_bytes=2000, body_seconds=0.5) as served:
        with served.http() as http:
            error = fault(http.post(CHAT, json=body(user="x" * 3000)), 413)
            assert error["code"] == "request_too_large"

            def parts() -> Any:
                for _ in range(50):
                    yield b" " * 100

            fault(http.post(CHAT, content=parts()), 413)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        assert raw_request(served.port, head).startswith(b"HTTP/1.1 408")
        lie = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n"
        assert raw_request(served.port, lie).split(b"\r\n")[0].split()[1] in (b"413", b"400")
        with served.http() as http:
            assert http.post(CHAT, json=body(max_tokens=3)).status_code == 200


def test_keys_open_the_api_and_are_compared_in_constant_time(
    made_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []
    original = guard.hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return original(a, b)

    monkeypatch.setattr(guard.hmac, "compare_digest", spy)
    with (
        serving(make_engine(made_pair), keys=("first-key", "second")) as served,
        served.http() as http,
    ):
        for header in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer first"},
                       {"authorization": "Basic first-key"}, {"authorization": "Bearer \xe9\xff"}):  # fmt: skip
            for path in ("/v1/models", "/debug/mtp_stats"):
                error = fault(
                    http.get(path, headers={k: v.encode("latin-1") for k, v in header.items()}), 401
                )
                assert error["code"] == "invalid_api_key"
        for key in ("first-key", "second"):
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).is_success
        # What orchestrators and Prometheus ask has no key in vLLM either.
        for path in ("/health", "/metrics", "/"):
            assert http.get(path).is_success
    assert len(compared) == 2 * 12, "both keys, every time"
    assert set(compared) == {(32, 32)}


def test_request_ids_are_kept_when_harmless(served: Served) -> None:
    with served.http() as http:
        kept = http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"]
        made = http.get("/health", headers={"x-request-id": "a b<script>"}).headers["x-request-id"]
    assert kept == "abc-1"
    assert len(made) == 32
