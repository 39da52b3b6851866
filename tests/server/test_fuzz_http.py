"""Requests made from the server's own OpenAPI schema, sound and unsound: never a 5xx.

Making a body takes ten times as long as answering it, and a whole made body is refused for the
first of its many fields. So each is sent as it is, and then a few of its fields at a time are put
into a body that is sound without them: these get further.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dspark import Engine
from dspark.config.engine import EngineOptions
from server.serving import MODEL, Served, body, serving

FEW, MANY = 60, 20_000
GRAFTS = 4  # requests more of each made body
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": body(max_tokens=3),
    "/v1/completions": {"model": MODEL, "prompt": "x", "max_tokens": 3},
}


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


def grafted(made: dict[str, Any], sound: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """``sound`` with one to three fields of ``made``."""
    chosen = rng.sample(sorted(made), min(len(made), rng.choice((1, 1, 2, 3))))
    out = {**sound, **{name: made[name] for name in chosen}}
    if out.get("n") not in (None, 1, 2):
        out["max_tokens"] = 2  # many short answers: this is about requests
    return out


def judge(response: Any, sent: Any, seen: Counter[int]) -> None:
    """Below 500, and a fault is in shape."""
    seen[response.status_code] += 1
    assert response.status_code < 500, json.dumps(sent, default=str)[:2000]
    if response.status_code >= 400:
        error = json.loads(response.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}


def hammer(served: Served, path: str, mode: Any, requests: int, seen: Counter[int]) -> None:
    """``requests`` or a few more to one route, out of a fifth as many made bodies."""
    strategy = operations(served)[path].as_strategy(generation_mode=mode)
    count = requests // (1 + GRAFTS)
    while sum(seen.values()) < requests:
        _hammer(served, path, strategy, count, seen)
        count = max(10, count // 5)  # bodies that are no objects have no fields to graft


def _hammer(served: Served, path: str, strategy: Any, count: int, seen: Counter[int]) -> None:
    @seed(sum(seen.values()))
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=strategy)
    def run(case: Any) -> None:
        judge(case.call(base_url=served.base), case.body, seen)
        if not isinstance(case.body, dict) or not case.body:
            return
        rng = random.Random(json.dumps(case.body, sort_keys=True, default=str))
        for _ in range(GRAFTS):
            sent = grafted(case.body, SOUND[path], rng)
            judge(http.post(path, json=sent), sent, seen)

    with served.http() as http:
        run()


MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
PATHS = ["/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize("mode", MODES, ids=["sound", "unsound"])
@pytest.mark.parametrize("path", PATHS)
def test_a_few_made_requests_never_give_a_5xx(small: Served, path: str, mode: Any) -> None:
    seen: Counter[int] = Counter()
    hammer(small, path, mode, FEW, seen)
    assert sum(seen.values()) >= FEW
    assert seen[200] > 0
    small.idle()


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=60, deadline=None, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_bytes_as_bodies_never_give_a_5xx(small: Served, content: bytes) -> None:
    with small.http() as http:
        response = http.post(
            PATHS[0], content=content, headers={"content-type": "application/json"}
        )
    assert 400 <= response.status_code < 500


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES, ids=["sound", "unsound"])
@pytest.mark.parametrize("path", PATHS)
def test_five_thousand_more_of_each_kind(small: Served, path: str, mode: Any) -> None:
    """Twenty thousand over the four kinds."""
    seen: Counter[int] = Counter()
    hammer(small, path, mode, MANY // 4, seen)
    assert sum(seen.values()) >= MANY // 4, seen
    assert seen[200] > MANY // (20 if mode is MODES[0] else 200), seen
    print(f"{path}: answers by status {dict(seen)}")
    small.idle()
