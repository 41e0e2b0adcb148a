"""Serves a status at a port: `/metrics` for Prometheus, `/status` for `kerasps top`.

It needs the package `prometheus-client`, whose server this is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kerasps.tools.monitoring.metrics import METRICS
from kerasps.tools.monitoring.status import RunStatus

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


class StatusCollector(Collector):
    """Turns a status into metrics each time that Prometheus asks."""

    def __init__(self, read: Callable[[], RunStatus]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering needs no status."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics."""
        status = self._read()
        for metric in METRICS:
            family = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            found = family(metric.name, metric.text, labels=metric.subject.labels)
            for labels, value in metric.samples(status):
                found.add_metric(labels, value)
            yield found


class Endpoint:
    """Serves a status over HTTP, from the constructor until `close`.

    There is no access control: everyone who can connect to the address can read the status, but
    nobody can change anything.
    """

    def __init__(
        self,
        host: str,
        port: int,
        read: Callable[[], RunStatus],
        describe: Callable[[], Mapping[str, object]],
    ) -> None:
        registry = CollectorRegistry()
        registry.register(StatusCollector(read))
        self._host, self._describe = host, describe
        self._metrics = make_wsgi_app(registry)
        self._server, self._thread = start_http_server(port, host, registry)
        self._thread.name = "kerasps-monitor"
        # Prints nothing about a client that breaks off, since stderr belongs to the script.
        self._server.handle_error = lambda *client: None
        self._server.set_app(self._answer)

    @property
    def address(self) -> str:
        """The `"host:port"` that it listens on."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        kind = "text/plain; charset=utf-8"
        try:
            if environ["PATH_INFO"] == "/metrics":
                page: Iterable[bytes] = self._metrics(environ, start_response)
                return page
            if environ["PATH_INFO"] == "/status":
                code, kind, text = "200 OK", "application/json", json.dumps(self._describe())
            else:
                code, text = "404 Not Found", "Ask for /metrics or /status."
        except Exception as exc:  # such as while the cluster closes
            code, text = "503 No status", f"{type(exc).__name__}: {exc}"
        start_response(code, [("Content-Type", kind)])
        return [text.encode()]
