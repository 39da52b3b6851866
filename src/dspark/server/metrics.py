"""Figures for Prometheus under vLLM's names, and for ``/debug/mtp_stats`` under ATOM's.

A dashboard made for vLLM works unchanged: what vLLM calls a request is one answer to one prompt
here too, so ``n = 3`` is three of them. Engine counters are read when they are asked for, so they
cost nothing while decoding and never drift from the engine's own. Three counts that published
figures mix are kept apart as ``dspark:drafted_tokens``, ``dspark:admitted_tokens`` and
``dspark:accepted_tokens``; ``vllm:spec_decode_num_draft_tokens`` is what was offered to
verification, as in vLLM, which is the admitted ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dspark.decoding.acceptance import AcceptanceCounter
from dspark.decoding.params import SamplingParams
from dspark.engine.answer import Completion, Delta, RequestOutput
from dspark.engine.core import EngineCore
from dspark.errors import DSparkError
from dspark.server.admission import Gate
from dspark.server.exposition import Families, Tally
from dspark.server.outside import handover_figures, offload_figures

if TYPE_CHECKING:
    from dspark.server.handover import HandoverRole

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
         40, 80, 160)  # fmt: skip
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
        5, 7.5, 10)  # fmt: skip
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
COUNTS = (1, 2, 5, 10, 20)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time to an answer's first token.", FIRST),
    "inter_token_latency_seconds": ("Time between two pieces of an answer.", EACH),
    "request_time_per_output_token_seconds": ("Time per token after the first piece.", EACH),
    "e2e_request_latency_seconds": ("Time of an answer, from its request on.", WHOLE),
    "request_queue_time_seconds": ("Time an answer waited for its prefill.", WHOLE),
    "request_prefill_time_seconds": ("Time from prefill to the first token.", WHOLE),
    "request_decode_time_seconds": ("Time from the first token to the last.", WHOLE),
    "request_inference_time_seconds": ("Time from prefill to the last token.", WHOLE),
    "request_prompt_tokens": ("Tokens of an answer's prompt.", SIZES),
    "request_prefill_kv_computed_tokens": ("Of these, computed and not found.", SIZES),
    "request_generation_tokens": ("Tokens of an answer.", SIZES),
    "request_max_num_generation_tokens": ("Tokens of a prompt's longest answer.", SIZES),
    "request_num_preemptions": ("How often an answer lost its pages.", (0, *COUNTS)),
    "request_params_n": ("Answers asked for.", COUNTS),
    "request_params_max_tokens": ("max_tokens.", SIZES),
}


class Metrics:
    """Everything that is counted of one engine; one registry a server."""

    def __init__(
        self, core: EngineCore, gate: Gate, model: str, role: HandoverRole | None = None
    ) -> None:
        self.core, self.gate, self.model, self.role = core, gate, model, role
        self.registry = CollectorRegistry()
        self.registry.register(_Scraped(self))
        self.tallies = {name: Tally(text, bounds) for name, (text, bounds) in HISTOGRAMS.items()}
        self.prompt_tokens = self.cached_tokens = self.preempted = self.errors = 0
        self.success = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    def observe(self, name: str, value: float) -> None:
        """Count a value in one of :data:`HISTOGRAMS`."""
        self.tallies[name].observe(value)

    @contextmanager
    def request(self, params: Sequence[SamplingParams]) -> Iterator[RequestClock]:
        """Clock of one request; what leaves the context early counts as aborted."""
        clock = RequestClock(self)
        for own in params:
            self.observe("request_params_n", own.n)
            for _ in range(own.n):
                self.observe("request_params_max_tokens", own.max_new_tokens)
        answers, reason = sum(own.n for own in params), "abort"
        try:
            yield clock
        except DSparkError:  # refused before anything was generated
            answers = 0
            raise
        except Exception:
            self.errors += 1
            reason = "error"
            raise
        finally:
            self.success[reason] += max(0, answers - clock.answers)

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


class RequestClock:
    """Times of one request's pieces. ``answers`` have ended so far."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}
        self._begun: dict[tuple[int, int], int] = {}
        self.answers = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def step(self, number: int, delta: Delta) -> None:
        """A piece of the answer ``delta.index`` to prompt ``number`` was made."""
        key, observe = (number, delta.index), self._metrics.observe
        if key in self._last:
            observe("inter_token_latency_seconds", delta.at - self._last[key])
        else:
            self._begun[key] = len(delta.ids)
            observe("time_to_first_token_seconds", delta.at - self._start)
        self._last[key] = delta.at
        if delta.finish_reason is not None:
            observe("e2e_request_latency_seconds", delta.at - self._start)

    def ended(self, number: int, output: RequestOutput) -> None:
        """All answers to prompt ``number`` are there."""
        metrics = self._metrics
        size = len(output.prompt_ids)
        metrics.prompt_tokens += size
        metrics.cached_tokens += output.cached_tokens
        longest = max(len(c.ids) for c in output.completions)
        metrics.observe("request_max_num_generation_tokens", longest)
        for completion in output.completions:
            self.answers += 1
            metrics.success[completion.finish_reason] += 1
            metrics.preempted += completion.preemptions
            metrics.observe("request_num_preemptions", completion.preemptions)
            metrics.observe("request_prompt_tokens", size)
            metrics.observe("request_prefill_kv_computed_tokens", size - output.cached_tokens)
            metrics.observe("request_generation_tokens", len(completion.ids))
            self._phases(completion, self._begun.get((number, completion.index), 0))

    def _phases(self, completion: Completion, begun: int) -> None:
        """Where an answer's time went; its first piece had ``begun`` tokens."""
        times, observe = completion.times, self._metrics.observe
        if times.started is None or times.first is None or times.last is None:
            return  # it never began
        observe("request_queue_time_seconds", times.started - times.queued)
        observe("request_prefill_time_seconds", times.first - times.started)
        observe("request_decode_time_seconds", times.last - times.first)
        observe("request_inference_time_seconds", times.last - times.started)
        if (more := len(completion.ids) - begun) > 0:
            observe("request_time_per_output_token_seconds", (times.last - times.first) / more)


class _Scraped(Collector):
    """All figures at the moment of the scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._make = Families((metrics.model, "0"))

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._answers()
        for name, tally in self._metrics.tallies.items():
            yield self._make.histogram(f"vllm:{name}", tally)
        if self._metrics.core.totals is not None:
            yield from self._speculation(self._metrics.core.totals)
        if self._metrics.core.offload is not None:
            yield from offload_figures(self._metrics.core.offload, self._make)
        if self._metrics.role is not None:
            yield from handover_figures(self._metrics.role, self._make)

    def _engine(self) -> Iterator[Metric]:
        core, gate, make = self._metrics.core, self._metrics.gate, self._make
        running, pool = len(core.scheduler.running), core.pool
        yield make.gauge("vllm:num_requests_running", "Answers being decoded.", running)
        waiting = max(0, gate.inside - running)
        yield make.gauge("vllm:num_requests_waiting", "Answers that wait.", waiting)
        yield make.gauge(
            "vllm:num_requests_waiting_by_reason", "The same, by reason.", waiting,
            reason="capacity",
        )  # fmt: skip
        used = 1 - pool.available / pool.count
        yield make.gauge("vllm:kv_cache_usage_perc", "Share of pages held; 1 is all.", used)
        yield make.gauge(
            "vllm:cache_config_info", "Sizes of the cache.", 1,
            block_size=str(pool.page_size), num_gpu_blocks=str(pool.count),
            enable_prefix_caching=str(pool.share),
            cache_dtype=str(core.target.dtype).removeprefix("torch."),
        )  # fmt: skip
        yield make.counter("dspark:requests_refused", "Requests refused: full.", gate.refused)

    def _answers(self) -> Iterator[Metric]:
        own, make = self._metrics, self._make
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens answered.", own.prompt_tokens),
            ("prompt_tokens_cached", "Of these, found in the cache.", own.cached_tokens),
            ("generation_tokens", "Tokens generated.", own.core.generated),
            ("prefix_cache_queries", "Prompt tokens looked up.", own.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", own.cached_tokens),
            ("num_preemptions", "Times that an answer lost its pages.", own.preempted),
        ):
            yield make.counter(f"vllm:{name}", text, value)
        yield make.counters(
            "vllm:request_success", "Answers by how they ended.", "finished_reason", own.success
        )
        yield make.counter("dspark:engine_errors", "Requests that the engine failed.", own.errors)

    def _speculation(self, total: AcceptanceCounter) -> Iterator[Metric]:
        make, name = self._make, "vllm:spec_decode_num_"

        def slots(name: str, text: str, values: Sequence[int]) -> Metric:
            return make.counters(name, text, "position", {str(k): v for k, v in enumerate(values)})

        yield make.counter(f"{name}drafts", "Verify steps with drafts.", total.steps)
        yield make.counter(f"{name}draft_tokens", "Tokens offered to verification.", total.admitted)
        yield make.counter(f"{name}accepted_tokens", "Drafted tokens kept.", total.accepted)
        yield slots(f"{name}accepted_tokens_per_pos", "Kept, per slot.", total.accepted_at)
        yield make.counter("dspark:drafted_tokens", "Tokens the draft made.", total.drafted)
        yield make.counter("dspark:admitted_tokens", "Of these, verified.", total.admitted)
        yield make.counter("dspark:accepted_tokens", "Of these, kept.", total.accepted)
        yield slots("dspark:admitted_tokens_per_pos", "Verified per slot.", total.admitted_at)
