"""Joins the metric states that executions return."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from kerasps.step import ExecutionResult, TracedStep


class MetricTotals:
    """The metric states of all steps, from those that workers have returned.

    Each result is that of its steps alone and is joined here, so an execution that is retried
    because its result was lost counts once. `logs` writes the states to the model's metrics.
    """

    def __init__(self, model: keras.Model, function: TracedStep) -> None:
        self._model = model
        self._function = function
        self._totals = [v.storage.numpy() for v in function.metrics]
        self._last_logs: dict[str, Any] = {}
        self.steps = 0

    @property
    def states(self) -> list[np.ndarray]:
        """The states, in the order of `TracedStep.metrics`."""
        return list(self._totals)

    @property
    def last_logs(self) -> dict[str, Any]:
        """The logs that the last execution returned beside the metrics."""
        return dict(self._last_logs)

    def resume(self, steps: int, states: list[np.ndarray], logs: dict[str, Any]) -> None:
        """Set the steps, the states and the logs to those of another `MetricTotals`."""
        self.steps, self._totals, self._last_logs = steps, list(states), dict(logs)

    def add(self, result: ExecutionResult) -> None:
        """Join the states of one or more executions."""
        self.steps += result.steps
        joins = self._function.joins
        self._totals = [
            join.arrays(total, state)
            for join, total, state in zip(joins, self._totals, result.metrics, strict=True)
        ]
        self._last_logs = result.logs

    def logs(self) -> dict[str, Any]:
        """Write the states to the model's metrics, and return the current logs."""
        for variable, total in zip(self._function.metrics, self._totals, strict=True):
            variable.storage.assign(total)
        if self._function.logs_are_metrics:
            logs = dict(self._model.get_metrics_result())
        else:
            logs = dict(self._last_logs)
            # An execution begins with new metrics, so its last logs cover only its steps.
            for name in self._function.results.keys() & logs.keys():
                logs[name] = self._function.results[name].value()
        # `result` may return a variable. A callback that read one would wait for the steps in
        # flight.
        values: dict[str, Any] = keras.tree.map_structure(
            lambda value: value.value if isinstance(value, keras.Variable) else value, logs
        )
        return values


def merge_once(model: keras.Model, function: TracedStep, result: ExecutionResult) -> dict[str, Any]:
    """Write the states of one execution to the model's metrics, and return the logs."""
    totals = MetricTotals(model, function)
    totals.add(result)
    return totals.logs()
