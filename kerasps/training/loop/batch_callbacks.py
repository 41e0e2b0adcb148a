"""Calls the batch-level callbacks as results come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from kerasps.training.contract.metrics import MetricTotals
from kerasps.training.loop.outputs import concatenated
from kerasps.variables.lanes.phase import before_access, num_assignments

# Keras's progress bar draws at most every 50 ms. Computing metrics more often would cost the
# coordinator about as much as dispatching the execution.
_PROGRESS_INTERVAL_S = 0.05


class BatchCallbacks:
    """Calls the batch-level callbacks as results come back.

    If a callback listens to batches, all are called for each execution, in turn: for its begin
    before steps are sent, and for its end when a result is there. If only the progress bar listens,
    it is called as often as it draws. Thread: `fit`'s.

    Args:
        before_access: called before a callback first touches a variable on a ps. It must return
            only when no step is in flight.

    Attributes:
        has_begun: whether callbacks were called for the begin of an execution, and not for its end.
        has_assigned: whether they assigned to a variable at the last begin or end, or at those of
            the previous execution.
    """

    def __init__(
        self,
        callbacks: keras.callbacks.CallbackList,
        mode: str,
        totals: MetricTotals,
        before_access: Callable[[], None],
    ) -> None:
        self._begin = getattr(callbacks, f"on_{mode}_batch_begin")
        self._end = getattr(callbacks, f"on_{mode}_batch_end")
        self._predicts = mode == "predict"
        self._totals = totals
        self._before_access = before_access
        self._every_execution = listen_to_batches(callbacks, mode)
        self._next_call = 0.0
        self._pending: tuple[int, int, Sequence[Any]] | None = None
        self.has_begun = self.has_assigned = self._assigns = False

    def begin(self, first: int) -> bool:
        """Call the callbacks for the begin of the next execution, unless they were called before.

        Returns True if they were called now. They may have changed what may be sent.
        """
        if self.has_begun or not self._every_execution:
            return False
        self._call_begin(first)
        return True

    def add(self, first: int, last: int, outputs: Sequence[object] = ()) -> None:
        """Note that the steps `first` to `last` of the epoch are done."""
        self._pending = (first, last, outputs)
        if self._every_execution or time.monotonic() >= self._next_call:
            self.flush()

    def flush(self) -> None:
        """Call the callbacks for the steps that `add` kept back, if any."""
        if self._pending is None:
            return
        first, last, outputs = self._pending
        self._pending = None
        self._next_call = time.monotonic() + _PROGRESS_INTERVAL_S
        logs = {"outputs": concatenated(outputs)} if self._predicts else self._totals.logs()
        if not self.has_begun:
            self._call_begin(first)
        self.has_begun = False
        self._call(self._end, last, logs)

    def _call_begin(self, first: int) -> None:
        self.has_begun = True
        # A callback that assigns at each begin has not done so when the loop checks for room.
        self.has_assigned, self._assigns = self._assigns, False
        self._call(self._begin, first)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        before = num_assignments()
        with before_access(self._before_access):
            function(*arguments)
        if num_assignments() > before:
            self.has_assigned = self._assigns = True


def listen_to_batches(callbacks: keras.callbacks.CallbackList, mode: str) -> bool:
    """Return True if a callback must be called for every execution.

    Progress bars, backups and traces need not be.
    """
    return any(_listens_to_batches(callback, mode) for callback in callbacks.callbacks)


def _listens_to_batches(callback: keras.callbacks.Callback, mode: str) -> bool:
    if getattr(callback, "hears_now_and_then", False):
        return False
    names = [f"on_{mode}_batch_begin", f"on_{mode}_batch_end"]
    names += ["on_batch_begin", "on_batch_end"] if mode == "train" else []
    # A progress bar draws less often, and a backup after a number of batches may come a little
    # late. A method that a subclass of theirs overrides must be called each time.
    quiet = (keras.callbacks.ProgbarLogger, keras.callbacks.BackupAndRestore)
    base = next((kind for kind in quiet if isinstance(callback, kind)), keras.callbacks.Callback)
    return any(
        getattr(getattr(callback, n), "__func__", None) is not getattr(base, n) for n in names
    )
