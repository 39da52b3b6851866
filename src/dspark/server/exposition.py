"""Prometheus' text out of plain numbers.

Counting happens per piece of every answer, on the thread that also moves the pieces; so it is an
addition and nothing else, and names, labels and locks wait until somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

LABELS = ("model_name", "engine")


class Tally:
    """A histogram: how many values were at most each of ``bounds``, and their sum."""

    def __init__(self, text: str, bounds: Sequence[float]) -> None:
        self.text, self.bounds = text, tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), the last one without a bound."""
        names = [*(f"{float(bound)}" for bound in self.bounds), "+Inf"]
        total, out = 0, []
        for name, count in zip(names, self.counts, strict=True):
            total += count
            out.append((name, float(total)))
        return out


class Families:
    """Makes metrics that carry ``own``, the values of :data:`LABELS`, and labels of their own."""

    def __init__(self, own: Sequence[str]) -> None:
        self._own = list(own)

    def gauge(self, name: str, text: str, value: float, **labels: str) -> Metric:
        """A value that goes up and down."""
        family = GaugeMetricFamily(name, text, labels=[*LABELS, *labels])
        family.add_metric([*self._own, *labels.values()], value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """A value that only grows; ``_total`` is added to its name."""
        family = CounterMetricFamily(name, text, labels=list(LABELS))
        family.add_metric(self._own, value)
        return family

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """Such values by ``label``."""
        family = CounterMetricFamily(name, text, labels=[*LABELS, label])
        for key, value in values.items():
            family.add_metric([*self._own, key], value)
        return family

    def histogram(self, name: str, tally: Tally) -> Metric:
        """What a tally counted."""
        family = HistogramMetricFamily(name, tally.text, labels=list(LABELS))
        family.add_metric(self._own, buckets=tally.buckets(), sum_value=tally.sum)
        return family
