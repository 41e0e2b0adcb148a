"""Calls the batch-level callbacks as results come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from kerasps.training.metrics import MetricTotals
from kerasps.training.outputs import concatenated
from kerasps.variables import before_access

# Keras's progress bar draws at most every 50 ms; to work out metrics that nobody looks at more
# often would cost the coordinator about as much as dispatching the execution.
_PROGRESS_INTERVAL_S = 0.05


class BatchCallbacks:
    """Calls the batch-level callbacks as results come back.

    Where a callback listens to batches it is called for each execution. Where only the progress bar
    does, it is called as often as it draws. Thread: `fit`'s.

    Args:
        callbacks: the `keras.callbacks.CallbackList`.
        mode: `"train"`, `"test"` or `"predict"`.
        totals: what the logs come from.
        before_access: called before a callback first touches a variable on a ps, which must be at
            rest then.
    """

    def __init__(
        self, callbacks: Any, mode: str, totals: MetricTotals, before_access: Callable[[], None]
    ) -> None:
        self._begin = getattr(callbacks, f"on_{mode}_batch_begin")
        self._end = getattr(callbacks, f"on_{mode}_batch_end")
        self._predicts = mode == "predict"
        self._totals = totals
        self._before_access = before_access
        self._every_execution = listen_to_batches(callbacks, mode)
        self._next_call = 0.0
        self._pending: tuple[int, int, Sequence[Any]] | None = None

    def add(self, first: int, last: int, outputs: Sequence[Any] = ()) -> None:
        """Note that the steps `first` to `last` of the epoch are done.

        Args:
            first: the number of the first step.
            last: that of the last one.
            outputs: what each step predicted.
        """
        self._pending = (first, last, outputs)
        if self._every_execution or time.monotonic() >= self._next_call:
            self.flush()

    def flush(self) -> None:
        """Call the callbacks for what they have not been told yet."""
        if self._pending is None:
            return
        first, last, outputs = self._pending
        self._pending = None
        self._next_call = time.monotonic() + _PROGRESS_INTERVAL_S
        logs = {"outputs": concatenated(outputs)} if self._predicts else self._totals.logs()
        with before_access(self._before_access):
            self._begin(first)
            self._end(last, logs)


def listen_to_batches(callbacks: keras.callbacks.CallbackList, mode: str) -> bool:
    """Return whether a callback wants to hear of every execution.

    Progress bars and backups do not.
    """
    return any(_listens_to_batches(callback, mode) for callback in callbacks.callbacks)


def _listens_to_batches(callback: keras.callbacks.Callback, mode: str) -> bool:
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    names = [f"on_{mode}_batch_begin", f"on_{mode}_batch_end"]
    names += ["on_batch_begin", "on_batch_end"] if mode == "train" else []
    # A backup every so many batches is as good a little later.
    is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
    base = keras.callbacks.BackupAndRestore if is_backup else keras.callbacks.Callback
    return any(
        getattr(getattr(callback, n), "__func__", None) is not getattr(base, n) for n in names
    )
