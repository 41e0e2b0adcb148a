"""Writes a status as text for Prometheus; needs the package `prometheus-client`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from kerasps.tools.monitoring.metrics import METRICS
from kerasps.tools.monitoring.status import RunStatus


class StatusCollector:
    """Turns a status into metrics each time that Prometheus asks."""

    def __init__(self, read: Callable[[], RunStatus]) -> None:
        self._read = read

    def describe(self) -> Iterable[Any]:
        """Return nothing, so that registering needs no status."""
        return []

    def collect(self) -> Iterable[Any]:
        """Yield the current metrics."""
        status = self._read()
        for metric in METRICS:
            family = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            found = family(metric.name, metric.text, labels=metric.labels)
            for labels, value in metric.samples(status):
                found.add_metric(labels, value)
            yield found


def exposition(read: Callable[[], RunStatus]) -> Callable[[str], tuple[str, bytes]]:
    """Return a function that writes the current metrics.

    It takes the `Accept` header of a request, and returns the content's type and the content.
    """
    registry = CollectorRegistry()
    registry.register(StatusCollector(read))

    def write(accept: str) -> tuple[str, bytes]:
        encode, content_type = choose_encoder(accept)
        return content_type, encode(registry)

    return write
