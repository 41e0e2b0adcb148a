"""Adding up what executions bring back, and telling the callbacks."""

from __future__ import annotations

import time
from typing import Any

import keras

from kerasps.train_function import ExecutionResult, TrainFunction

# Keras's progress bar draws at most every 50 ms; to work out metrics that nobody looks at more often would cost the
# coordinator about as much as dispatching the execution.
_PROGRESS_INTERVAL_S = 0.05


class MetricTotals:
    """The metric states of the model, as far as they have come back from workers.

    Each result starts at zero and is added here, so that what is run again, because its result was lost, counts once. The sums
    are kept as arrays; `logs` brings them to the model's metrics.

    Args:
        model: the model; its metrics hold the state to start from.
        function: the `TrainFunction` whose results are added.
    """

    def __init__(self, model: keras.Model, function: TrainFunction) -> None:
        self._model = model
        self._function = function
        self._totals = [v.storage.numpy() for v in function.metrics]
        self._counters = [v.storage.numpy() for v in function.counters]
        self._last_logs: dict[str, Any] = {}

    def add(self, result: ExecutionResult) -> None:
        """Adds the states of one execution."""
        self._totals = [total + state for total, state in zip(self._totals, result.metrics, strict=True)]
        self._counters = [total + added for total, added in zip(self._counters, result.counters, strict=True)]
        self._last_logs = result.logs

    def logs(self) -> dict[str, Any]:
        """Writes the sums to the metrics and returns the logs as they stand now."""
        for variable, total in zip(self._function.metrics, self._totals, strict=True):
            variable.storage.assign(total)
        return dict(self._model.get_metrics_result()) if self._function.logs_are_metrics else dict(self._last_logs)

    def correct_counters(self) -> None:
        """Sets the counters on the ps to what succeeded; a lost worker may have pushed a part that was then run again."""
        for variable, total in zip(self._function.counters, self._counters, strict=True):
            variable.storage.assign(total)


class BatchCallbacks:
    """Calls the batch-level callbacks as results come back.

    Every execution where a callback listens to batches; where only the progress bar does, as often as it draws.

    Args:
        callbacks: the `keras.callbacks.CallbackList`.
        totals: what the logs come from.
    """

    def __init__(self, callbacks: Any, totals: MetricTotals) -> None:
        self._callbacks = callbacks
        self._totals = totals
        self._every_execution = listen_to_batches(callbacks)
        self._next_call = 0.0
        self._pending: tuple[int, int] | None = None

    def add(self, first: int, last: int) -> None:
        """Takes note that the steps `first` to `last` of the epoch are done."""
        self._pending = (first, last)
        if self._every_execution or time.monotonic() >= self._next_call:
            self.flush()

    def flush(self) -> None:
        """Reports what was not reported yet."""
        if self._pending is None:
            return
        first, last = self._pending
        self._pending = None
        self._next_call = time.monotonic() + _PROGRESS_INTERVAL_S
        self._callbacks.on_train_batch_begin(first)
        self._callbacks.on_train_batch_end(last, self._totals.logs())


def listen_to_batches(callbacks: keras.callbacks.CallbackList) -> bool:
    """Whether a callback wants to hear of every execution; a progress bar does not."""
    return any(_listens_to_batches(callback) for callback in callbacks.callbacks)


def _listens_to_batches(callback: keras.callbacks.Callback) -> bool:
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, n), "__func__", None) is not getattr(base, n) for n in names)


def merge_once(model: keras.Model, function: TrainFunction, result: ExecutionResult) -> dict[str, Any]:
    """The logs after one execution, merged into the model's metrics."""
    totals = MetricTotals(model, function)
    totals.add(result)
    return totals.logs()
