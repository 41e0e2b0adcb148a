"""The messages between the workers of a run while they are in the same `fit`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.step import ExecutionResult, TracedStep
from kerasps.training import MetricTotals
from kerasps.variables.keras.joins import Join
from kerasps.worker_driven.run import Run

# The interval at which a worker sends its sums to the chief, and checks whether the chief has
# stopped. Each time costs a round trip.
_INTERVAL_S = 0.5


class FitMessages:
    """Sends every worker's metric states to the chief, and the chief's stop request to the workers.

    A worker adds its states to a sum on a ps from time to time. The chief takes that sum at the end
    of each of its epochs, and waits for no worker. So each step counts in one epoch of the chief.
    """

    def __init__(self, run: Run, model: keras.Model, function: TracedStep, number: int) -> None:
        self._run = run
        self._model = model
        self._states = _MetricStates(function)
        self._sum = run.shared_sum(
            f"fit {number}/metrics", self._states.length, self._states.num_maxima
        )
        self._stop = stop_cell(run, number)
        self._unsent: list[np.ndarray] = []
        self._next = time.monotonic() + _INTERVAL_S

    def add(self, result: ExecutionResult) -> None:
        """Add a result of this process, and send the sums to the chief at intervals."""
        if self._run.is_chief:
            return
        self._unsent.append(self._states.packed(result.steps, result.metrics))
        if time.monotonic() >= self._next:
            self._send_sums()
            if self._stop.is_set:
                self._model.stop_training = True
            self._next = time.monotonic() + _INTERVAL_S

    def end_epoch(self, totals: MetricTotals) -> None:
        """Send the remaining sums to the chief; in the chief, add those of others to `totals`."""
        if not self._run.is_chief:
            self._send_sums()
            return
        steps, metrics = self._states.unpacked(self._sum.read_and_reset())
        if steps:
            totals.add(ExecutionResult(steps, metrics, [], totals.last_logs, []))

    def _send_sums(self) -> None:
        if self._unsent:
            self._sum.add(self._states.joined(self._unsent))
            self._unsent = []


class _MetricStates:
    """Packs a number of steps and metric states into the numbers of a `SharedSum`.

    Sums come first. Minima are sent as maxima, with the other sign.
    """

    def __init__(self, function: TracedStep) -> None:
        self._shapes = [(tuple(v.shape), v.storage.dtype) for v in function.metrics]
        self._joins = function.joins
        numbers = range(len(self._joins))
        self._sums = [i for i in numbers if self._joins[i] is Join.SUM]
        self._bounds = [i for i in numbers if self._joins[i] is not Join.SUM]
        self.num_maxima = self._size_of(self._bounds)
        self.length = 1 + self._size_of(self._sums) + self.num_maxima

    def _size_of(self, indices: list[int]) -> int:
        return sum(int(np.prod(self._shapes[i][0])) for i in indices)

    def packed(self, steps: int, metrics: Sequence[np.ndarray]) -> np.ndarray:
        """Return a number of steps and the states of metrics as numbers."""
        parts = [np.array([steps], np.float64)]
        for i in [*self._sums, *self._bounds]:
            values = np.ravel(metrics[i]).astype(np.float64)
            parts.append(-values if self._joins[i] is Join.MINIMUM else values)
        return np.concatenate(parts)

    def joined(self, results: Sequence[np.ndarray]) -> np.ndarray:
        """Return the numbers for all of several results."""
        num_sums = self.length - self.num_maxima
        stacked = np.stack(results)
        return np.concatenate([stacked[:, :num_sums].sum(0), stacked[:, num_sums:].max(0)])

    def unpacked(self, numbers: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Return the number of steps, and the states of metrics."""
        metrics: list[Any] = [None] * len(self._joins)
        place = 1
        for i in [*self._sums, *self._bounds]:
            shape, dtype = self._shapes[i]
            size = int(np.prod(shape))
            values = numbers[place : place + size].reshape(shape)
            values = -values if self._joins[i] is Join.MINIMUM else values
            metrics[i] = _converted(values, dtype)
            place += size
        return int(numbers[0]), metrics


def _converted(values: np.ndarray, dtype: tf.DType) -> np.ndarray:
    """Return float64 numbers in a dtype; those beyond an integer's range at its ends."""
    if not dtype.is_integer:
        return values.astype(dtype.as_numpy_dtype)
    is_within = (values > dtype.min) & (values < dtype.max)
    ends = np.where(values > 0, dtype.max, dtype.min)
    converted = np.where(is_within, values, 0).astype(dtype.as_numpy_dtype)
    return np.where(is_within, converted, ends.astype(dtype.as_numpy_dtype))


class StopBroadcast(keras.callbacks.Callback):
    """Stops the other workers if a callback of the chief has stopped its `fit`."""

    def __init__(self, run: Run, number: int) -> None:
        super().__init__()
        self._stop = stop_cell(run, number)

    def on_train_end(self, logs: object = None) -> None:
        if self.model.stop_training:
            self._stop.set(True)


def stop_cell(run: Run, number: int) -> Any:
    """Return the cell that is set when the chief has stopped a `fit`."""
    return run.cell(f"fit {number}/stop", tf.bool)
