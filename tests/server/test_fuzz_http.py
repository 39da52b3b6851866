"""Requests made from the server's own OpenAPI schema, sound and unsound: never a 5xx."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dspark import Engine
from dspark.config.engine import EngineOptions
from server.serving import MODEL, Served, serving

FEW, MANY = 30, 20_000


@pytest.fixture(scope="module")
def small(made_pair: tuple[Path, Path]) -> Any:
    """A server with a context of 48 tokens: answers are short, and limits are met often."""
    target, draft = made_pair
    options = EngineOptions(max_requests=8, cache_gib=0.01)
    with serving(Engine(str(target), draft, options=options, device="cpu", max_context=48)) as s:
        yield s


def operations(served: Served) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{served.base}/openapi.json")
    found = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        found[operation.path] = operation
    return found


def hammer(served: Served, path: str, mode: Any, examples: int, seen: Counter[int]) -> None:
    """``examples`` cases of one route; every answer is below 500 and, if a fault, in shape."""
    operation = operations(served)[path]
    strategy = operation.as_strategy(generation_mode=mode)

    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck), derandomize=True)  # fmt: skip
    @given(case=strategy)
    def run(case: Any) -> None:
        if isinstance(case.body, dict) and case.body.get("model") and len(case.body) % 3:
            case.body["model"] = MODEL  # otherwise nearly all of them end at an unknown model
        response = case.call(base_url=served.base)
        seen[response.status_code] += 1
        assert response.status_code < 500, json.dumps(case.body)[:2000]
        if response.status_code >= 400:
            assert set(json.loads(response.content)["error"]) == {
                "message",
                "type",
                "param",
                "code",
            }

    run()


MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
PATHS = ["/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize("mode", MODES, ids=["sound", "unsound"])
@pytest.mark.parametrize("path", PATHS)
def test_a_few_made_requests_never_give_a_5xx(small: Served, path: str, mode: Any) -> None:
    seen: Counter[int] = Counter()
    hammer(small, path, mode, FEW, seen)
    assert sum(seen.values()) >= FEW
    small.idle()


@given(body=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=60, deadline=None, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_bytes_as_bodies_never_give_a_5xx(small: Served, body: bytes) -> None:
    with small.http() as http:
        response = http.post(PATHS[0], content=body, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES, ids=["sound", "unsound"])
@pytest.mark.parametrize("path", PATHS)
def test_five_thousand_more_of_each_kind(small: Served, path: str, mode: Any) -> None:
    """Twenty thousand over the four kinds."""
    seen: Counter[int] = Counter()
    hammer(small, path, mode, MANY // 4, seen)
    assert sum(seen.values()) >= MANY // 4, seen
    assert mode is MODES[1] or seen[200] > MANY // 100, seen
    print(f"{path}: answers by status {dict(seen)}")
    small.idle()
