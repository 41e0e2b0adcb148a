"""Adding up what executions bring back, and telling the callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat, variables
from kerasps.fetch import fetch
from kerasps.step_function import ExecutionResult, StepFunction

# Keras's progress bar draws at most every 50 ms; to work out metrics that nobody looks at more often would cost the
# coordinator about as much as dispatching the execution.
_PROGRESS_INTERVAL_S = 0.05


class MetricTotals:
    """The metric states of the model, as far as they have come back from workers.

    Each result starts at zero and is added here, so that what is run again, because its result was lost, counts once. The sums
    are kept as arrays; `logs` brings them to the model's metrics.

    Args:
        model: the model; its metrics hold the state to start from.
        function: the `StepFunction` whose results are added.
    """

    def __init__(self, model: keras.Model, function: StepFunction) -> None:
        self._model = model
        self._function = function
        self._totals = [v.storage.numpy() for v in function.metrics]
        self._counters = fetch([v.storage.read_value() for v in function.counters])
        self._last_logs: dict[str, Any] = {}
        self.steps = 0

    def add(self, result: ExecutionResult) -> None:
        """Adds the states of one execution."""
        self.steps += result.steps
        self._totals = [total + state for total, state in zip(self._totals, result.metrics, strict=True)]
        self._counters = [total + added for total, added in zip(self._counters, result.counters, strict=True)]
        self._last_logs = result.logs

    def logs(self) -> dict[str, Any]:
        """Writes the sums to the metrics and returns the logs as they stand now."""
        for variable, total in zip(self._function.metrics, self._totals, strict=True):
            variable.storage.assign(total)
        if not self._function.logs_are_metrics:
            return dict(self._last_logs)
        # `result` may return a variable itself. A callback that reads one has the steps in flight end first.
        results: dict[str, Any] = dict(self._model.get_metrics_result())
        results = keras.tree.map_structure(lambda value: value.value if isinstance(value, keras.Variable) else value, results)
        return results

    def correct_counters(self) -> None:
        """Sets the counters on the ps to what succeeded; a lost worker may have pushed a part that was then run again."""
        for variable, total in zip(self._function.counters, self._counters, strict=True):
            variable.storage.assign(total)


class BatchCallbacks:
    """Calls the batch-level callbacks as results come back.

    Every execution where a callback listens to batches; where only the progress bar does, as often as it draws.

    Args:
        callbacks: the `keras.callbacks.CallbackList`.
        mode: `"train"`, `"test"` or `"predict"`.
        totals: what the logs come from.
        before_access: what is called before a callback first touches a variable on a ps, which must be at rest then.
    """

    def __init__(self, callbacks: Any, mode: str, totals: MetricTotals, before_access: Callable[[], None]) -> None:
        self._begin = getattr(callbacks, f"on_{mode}_batch_begin")
        self._end = getattr(callbacks, f"on_{mode}_batch_end")
        self._predicts = mode == "predict"
        self._totals = totals
        self._before_access = before_access
        self._every_execution = listen_to_batches(callbacks, mode)
        self._next_call = 0.0
        self._pending: tuple[int, int, ExecutionResult] | None = None

    def add(self, first: int, last: int, result: ExecutionResult) -> None:
        """Takes note that the steps `first` to `last` of the epoch are done, and of what they brought back."""
        self._pending = (first, last, result)
        if self._every_execution or time.monotonic() >= self._next_call:
            self.flush()

    def flush(self) -> None:
        """Reports what was not reported yet."""
        if self._pending is None:
            return
        first, last, result = self._pending
        self._pending = None
        self._next_call = time.monotonic() + _PROGRESS_INTERVAL_S
        logs = {"outputs": concatenated(result.outputs)} if self._predicts else self._totals.logs()
        with variables.before_access(self._before_access):
            self._begin(first)
            self._end(last, logs)


def concatenated(outputs: Sequence[Any]) -> Any:
    """What several steps predicted, as one."""
    first, *_ = outputs
    columns = zip(*(tf.nest.flatten(step) for step in outputs), strict=True)
    leaves = [list(parts) for parts in columns]
    return tf.nest.pack_sequence_as(first, [_concatenate(parts) for parts in leaves])


def _concatenate(parts: list[Any]) -> Any:
    if len(parts) > 1 and isinstance(parts[0], np.ndarray) and len({part.shape[1:] for part in parts}) == 1 and parts[0].ndim:
        return np.concatenate(parts)
    # Of arrays whose rows differ in shape it makes a ragged tensor, and wants tensors for that.
    joined = _compat.potentially_ragged_concat([tf.convert_to_tensor(p) if isinstance(p, np.ndarray) else p for p in parts])
    return np.asarray(joined) if isinstance(joined, tf.Tensor) else joined


def listen_to_batches(callbacks: keras.callbacks.CallbackList, mode: str) -> bool:
    """Whether a callback wants to hear of every execution; a progress bar does not."""
    return any(_listens_to_batches(callback, mode) for callback in callbacks.callbacks)


def _listens_to_batches(callback: keras.callbacks.Callback, mode: str) -> bool:
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    names = [f"on_{mode}_batch_begin", f"on_{mode}_batch_end"]
    names += ["on_batch_begin", "on_batch_end"] if mode == "train" else []
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, n), "__func__", None) is not getattr(base, n) for n in names)


def merge_once(model: keras.Model, function: StepFunction, result: ExecutionResult) -> dict[str, Any]:
    """The logs after one execution, merged into the model's metrics."""
    totals = MetricTotals(model, function)
    totals.add(result)
    return totals.logs()
