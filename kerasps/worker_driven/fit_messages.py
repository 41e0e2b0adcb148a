"""The messages between the workers of a run while they are in the same `fit`."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.step import ExecutionResult, TracedStep
from kerasps.training import MetricTotals
from kerasps.worker_driven.run import Run

# The interval at which a worker sends its sums to the chief, and checks whether the chief has
# stopped. Each time costs a round trip.
_INTERVAL_S = 0.5


class FitMessages:
    """Sends every worker's metric sums to the chief, and the chief's stop request to the workers.

    A worker adds its sums to a sum on a ps from time to time. The chief takes that sum at the end
    of each of its epochs, and waits for no worker. So each step counts in one epoch of the chief.

    Args:
        run: the run.
        model: the model that is trained.
        function: its step.
        number: the number of the `fit`.
    """

    def __init__(self, run: Run, model: keras.Model, function: TracedStep, number: int) -> None:
        self._run = run
        self._model = model
        self._shapes = [(tuple(v.shape), v.storage.dtype) for v in function.metrics]
        self._length = 1 + sum(int(np.prod(shape)) for shape, _ in self._shapes)
        self._sum = run.shared_sum(f"fit {number}/metrics", self._length)
        self._stop = stop_cell(run, number)
        self._unsent = np.zeros(self._length)
        self._next = time.monotonic() + _INTERVAL_S

    def add(self, result: ExecutionResult) -> None:
        """Add a result of this process, and send the sums to the chief at intervals."""
        if self._run.is_chief:
            return
        self._unsent += np.concatenate([[result.steps], *(np.ravel(m) for m in result.metrics)])
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
        sums = self._sum.take()
        if sums[0]:
            metrics, place = [], 1
            for shape, dtype in self._shapes:
                size = int(np.prod(shape))
                values = sums[place : place + size].reshape(shape)
                metrics.append(values.astype(dtype.as_numpy_dtype))
                place += size
            totals.add(ExecutionResult(int(sums[0]), metrics, [], totals.last_logs, []))

    def _send_sums(self) -> None:
        if self._unsent[0]:
            self._sum.add(self._unsent)
            self._unsent = np.zeros(self._length)


class StopBroadcast(keras.callbacks.Callback):
    """Stops the other workers if a callback of the chief has stopped its `fit`.

    Args:
        run: the run.
        number: the number of the `fit`.
    """

    def __init__(self, run: Run, number: int) -> None:
        super().__init__()
        self._stop = stop_cell(run, number)

    def on_train_end(self, logs: object = None) -> None:
        if self.model.stop_training:
            self._stop.set(True)


def stop_cell(run: Run, number: int) -> Any:
    """Return the cell that is set when the chief has stopped a `fit`."""
    return run.cell(f"fit {number}/stop", tf.bool)
