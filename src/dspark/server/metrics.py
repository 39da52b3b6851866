"""Figures for Prometheus under vLLM's names, and for ``/debug/mtp_stats`` under ATOM's.

A dashboard made for vLLM works unchanged. Engine counters are read when they are asked for, so they
cost nothing while decoding and never drift from the engine's own. Three counts that published
figures mix are kept apart as ``dspark:drafted_tokens``, ``dspark:admitted_tokens`` and
``dspark:accepted_tokens``; ``vllm:spec_decode_num_draft_tokens`` is what was offered to
verification, as in vLLM, which is the admitted ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dspark.decoding.acceptance import AcceptanceCounter
from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Delta, RequestOutput
from dspark.engine.core import EngineCore
from dspark.errors import DSparkError
from dspark.server.admission import Gate

LABELS = ["model_name", "engine"]
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
         40, 80, 160)  # fmt: skip
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
        5, 7.5, 10)  # fmt: skip
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
COUNTS = (1, 2, 5, 10, 20)


class Metrics:
    """Everything that is counted of one engine; one registry a server."""

    def __init__(self, core: EngineCore, gate: Gate, model: str) -> None:
        self.core, self.gate = core, gate
        self.labels = [model, "0"]
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(self))
        self.first = self._histogram("time_to_first_token_seconds", "Time to first token.", FIRST)
        self.between = self._histogram(
            "inter_token_latency_seconds", "Time between two pieces of an answer.", EACH
        )
        self.each = self._histogram(
            "request_time_per_output_token_seconds", "Time per token after the first.", EACH
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "Time of a request.", WHOLE)
        self.prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt.", SIZES)
        self.answer_size = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", SIZES
        )
        self.asked_n = self._histogram("request_params_n", "Answers asked for.", COUNTS)
        self.asked_tokens = self._histogram("request_params_max_tokens", "max_tokens.", SIZES)
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens answered.")
        self.generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self.preempted = self._counter("vllm:num_preemptions", "Answers that lost their pages.")
        self.errors = self._counter("dspark:engine_errors", "Requests that the engine failed.")
        self.success = Counter(
            "vllm:request_success", "Answers by how they ended.", [*LABELS, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        for reason in ("stop", "length", "abort"):
            self.success.labels(*self.labels, reason)

    @contextmanager
    def request(self, params: Sequence[SamplingParams]) -> Iterator[RequestClock]:
        """Clock of one request; what leaves the context early counts as aborted."""
        clock = RequestClock(self)
        for own in params:
            self.asked_n.observe(own.n)
            self.asked_tokens.observe(own.max_new_tokens)
        answers = sum(own.n for own in params)
        try:
            yield clock
        except DSparkError:  # refused before anything was generated
            answers = 0
            raise
        except Exception:
            self.errors.inc()
            raise
        finally:
            if (lost := answers - clock.answers) > 0:
                self.success.labels(*self.labels, "abort").inc(lost)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def mtp_stats(self) -> dict[str, Any]:
        """ATOM's ``/debug/mtp_stats``; ``distribution`` maps accepted tokens to steps."""
        total = self.core.totals
        if total is None:
            total = AcceptanceCounter(1)
        at_least = [total.steps, *total.accepted_at, 0]
        steps = {k: at_least[k] - at_least[k + 1] for k in range(len(at_least) - 1)}
        return {
            "enabled": self.core.totals is not None,
            "total_draft_tokens": total.drafted,
            "total_accepted_tokens": total.accepted,
            "acceptance_rate": total.accepted / total.drafted if total.drafted else 0.0,
            "average_tokens_per_forward": total.acceptance_length if total.steps else 0.0,
            "distribution": {str(k): v for k, v in steps.items()},
            "distribution_percent": {
                str(k): v / total.steps if total.steps else 0.0 for k, v in steps.items()
            },
            "total_admitted_tokens": total.admitted,
            "total_steps": total.steps,
            "admitted_per_position": list(total.admitted_at),
            "accepted_per_position": list(total.accepted_at),
        }

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(
            f"vllm:{name}", text, LABELS, buckets=tuple(buckets), registry=self.registry
        )
        return made.labels(*self.labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self.labels)


class RequestClock:
    """Times of one request's pieces. ``answers`` have ended so far."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last: dict[tuple[int, int], float] = {}
        self._begun: dict[tuple[int, int], tuple[float, int]] = {}
        self.answers = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def step(self, number: int, delta: Delta) -> None:
        """A piece of the answer ``delta.index`` to prompt ``number`` came."""
        now, key = time.perf_counter(), (number, delta.index)
        metrics = self._metrics
        metrics.generated.inc(len(delta.ids))
        if self._first is None:
            self._first = now
            metrics.first.observe(now - self._start)
        if key in self._last:
            metrics.between.observe(now - self._last[key])
        else:
            self._begun[key] = (now, len(delta.ids))
        self._last[key] = now

    def ended(self, number: int, output: RequestOutput) -> None:
        """All answers to prompt ``number`` are there."""
        metrics = self._metrics
        metrics.whole.observe(self.seconds)
        metrics.prompt_tokens.inc(len(output.prompt_ids))
        metrics.queries.inc(len(output.prompt_ids))
        metrics.hits.inc(output.cached_tokens)
        metrics.prompt_size.observe(len(output.prompt_ids))
        metrics.answer_size.observe(sum(len(c.ids) for c in output.completions))
        for completion in output.completions:
            self.answers += 1
            metrics.preempted.inc(completion.preemptions)
            metrics.success.labels(*metrics.labels, completion.finish_reason).inc()
            begun, count = self._begun[number, completion.index]
            if len(completion.ids) > count:
                spent = self._last[number, completion.index] - begun
                metrics.each.observe(spent / (len(completion.ids) - count))


class _EngineCollector(Collector):
    """What the engine knows of itself, at the moment of the scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        core, gate = self._metrics.core, self._metrics.gate
        running, pool = len(core.scheduler.running), core.pool
        yield self._gauge("vllm:num_requests_running", "Answers being decoded.", running)
        waiting = max(0, gate.inside - running)
        yield self._gauge("vllm:num_requests_waiting", "Answers that wait.", waiting)
        used = 1 - pool.available / pool.count
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of pages held; 1 is all.", used)
        yield self._count("dspark:requests_refused", "Requests refused: full.", gate.refused)
        total = core.totals
        if total is not None:
            yield from self._speculation(total)

    def _speculation(self, total: AcceptanceCounter) -> Iterator[Metric]:
        name = "vllm:spec_decode_num_"
        yield self._count(f"{name}drafts", "Verify steps with drafts.", total.steps)
        yield self._count(f"{name}draft_tokens", "Tokens offered to verification.", total.admitted)
        yield self._count(f"{name}accepted_tokens", "Drafted tokens kept.", total.accepted)
        yield self._slots(f"{name}accepted_tokens_per_pos", "Kept, per slot.", total.accepted_at)
        yield self._count("dspark:drafted_tokens", "Tokens the draft made.", total.drafted)
        yield self._count("dspark:admitted_tokens", "Of these, verified.", total.admitted)
        yield self._count("dspark:accepted_tokens", "Of these, kept.", total.accepted)
        yield self._slots("dspark:admitted_tokens_per_pos", "Verified per slot.", total.admitted_at)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._metrics.labels, value)
        return family

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._metrics.labels, value)
        return family

    def _slots(self, name: str, text: str, values: Sequence[int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*LABELS, "position"])
        for slot, value in enumerate(values):
            family.add_metric([*self._metrics.labels, str(slot)], value)
        return family
