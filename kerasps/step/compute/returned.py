"""The values that a model's method returned in a trace, and which of them are metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf


@dataclass(frozen=True)
class MetricResult:
    """The result of a metric, or the entry `key` of one whose result is a dictionary."""

    metric: keras.Metric
    key: str | None = None

    def value(self) -> Any:
        """Return the result for the current values of the metric's variables."""
        result = self.metric.result()
        return result if self.key is None else result[self.key]


@dataclass(frozen=True)
class Returned:
    """The values that a model's method returned in a trace."""

    log_names: list[str] = field(default_factory=list)  # the names of the scalars in logs
    logs: list[tf.Tensor] = field(default_factory=list)  # these scalars, as tensors of the trace
    # Whether the logs are the model's metrics and nothing else; then `logs` is empty.
    logs_are_metrics: bool = False
    # Those of the other logs that are results of metrics.
    results: dict[str, MetricResult] = field(default_factory=dict)
    # The return value of `predict_step`; [] for other methods.
    predicted: Any = field(default_factory=list)

    @classmethod
    def of_logs(cls, logs: object, model: keras.Model, results: Results) -> Returned:
        """Return the record for the logs that a step returned."""
        scalars = _scalars(logs)
        metrics = _scalars(model.get_metrics_result())
        if scalars and scalars.keys() == metrics.keys():
            # The merged states of all workers replace one step's logs.
            return cls(logs_are_metrics=True)
        return cls(
            list(scalars),
            [tf.reshape(_as_float(value), []) for value in scalars.values()],
            results={n: results[value] for n, value in scalars.items() if value in results},
        )


class Results:
    """The results of metrics: from a tensor, or variable, to the metric that returned it."""

    def __init__(self) -> None:
        self._results: dict[int, tuple[Any, MetricResult]] = {}

    def __contains__(self, value: object) -> bool:
        return id(value) in self._results

    def __getitem__(self, value: object) -> MetricResult:
        return self._results[id(value)][1]

    def add(self, metric: keras.Metric, result: object) -> None:
        """Note the result of a metric."""
        for key, value in result.items() if isinstance(result, dict) else [(None, result)]:
            # Keeps the value alive, so that its id is not reused.
            self._results[id(value)] = value, MetricResult(metric, key)


@contextlib.contextmanager
def noting_results(metrics: Iterable[keras.Metric]) -> Iterator[Results]:
    """In this context, note the results of each of `metrics`."""
    results = Results()
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(_noting(metric, results))
        yield results


@contextlib.contextmanager
def _noting(metric: keras.Metric, results: Results) -> Iterator[None]:
    original, attributes = metric.result, vars(metric)
    if isinstance(attributes.get("result"), _Noted):
        yield  # patched already, for the first of several replicas that are traced together
        return

    before = attributes.get("result")
    attributes["result"] = _Noted(metric, original, results)
    try:
        yield
    finally:
        del attributes["result"]
        if before is not None:
            attributes["result"] = before


class _Noted:
    """Replaces `result` of a metric, and notes the values that it returns."""

    def __init__(
        self, metric: keras.Metric, original: Callable[[], object], results: Results
    ) -> None:
        self._metric = metric
        self._original = original
        self._results = results

    def __call__(self) -> Any:
        returned = self._original()
        self._results.add(self._metric, returned)
        return returned


def _scalars(logs: object) -> dict[str, Any]:
    """Return all scalars in logs, which may be nested, by name."""
    found: dict[str, Any] = {}
    for name, value in logs.items() if isinstance(logs, dict) else ():
        if isinstance(value, dict):
            found.update(_scalars(value))
        elif _as_float(value).shape.num_elements() == 1:
            found[name] = value
    return found


def _as_float(value: object) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(value), tf.float32)
