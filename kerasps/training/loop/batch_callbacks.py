"""Calls the batch-level callbacks as results come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from kerasps.training.contract.metrics import MetricTotals
from kerasps.training.loop.outputs import concatenated
from kerasps.variables.phase import before_access, num_assignments

# Keras's progress bar draws at most every 50 ms; to work out metrics that nobody looks at more
# often would cost the coordinator about as much as dispatching the execution.
_PROGRESS_INTERVAL_S = 0.05


class BatchCallbacks:
    """Calls the batch-level callbacks as results come back.

    Where a callback listens to batches it is called for each execution: at its begin before steps
    are sent, and at its end when a result has come back, in turn. Where only the progress bar
    listens, it is called as often as it draws. Thread: `fit`'s.

    Args:
        callbacks: the `keras.callbacks.CallbackList`.
        mode: `"train"`, `"test"` or `"predict"`.
        totals: what the logs come from.
        before_access: called before a callback first touches a variable on a ps, which must be at
            rest then.

    Attributes:
        has_begun: whether callbacks were told of the begin of an execution, and not of its end.
        has_assigned: whether they assigned to a variable at the last begin or end, or at those of
            the execution before.
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
        """Call the callbacks for the begin of the next execution, unless they have been.

        Args:
            first: the number of its first step in the epoch.

        Returns:
            Whether they were called now. What they did may change what is to be sent.
        """
        if self.has_begun or not self._every_execution:
            return False
        self._call_begin(first)
        return True

    def add(self, first: int, last: int, outputs: Sequence[object] = ()) -> None:
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
        if not self.has_begun:
            self._call_begin(first)
        self.has_begun = False
        self._call(self._end, last, logs)

    def _call_begin(self, first: int) -> None:
        self.has_begun = True
        # Who assigns at each begin has not come to it yet when there is room for an execution.
        self.has_assigned, self._assigns = self._assigns, False
        self._call(self._begin, first)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        before = num_assignments()
        with before_access(self._before_access):
            function(*arguments)
        if num_assignments() > before:
            self.has_assigned = self._assigns = True


def listen_to_batches(callbacks: keras.callbacks.CallbackList, mode: str) -> bool:
    """Return whether a callback wants to hear of every execution.

    Progress bars, backups and traces do not.
    """
    return any(_listens_to_batches(callback, mode) for callback in callbacks.callbacks)


def _listens_to_batches(callback: keras.callbacks.Callback, mode: str) -> bool:
    if getattr(callback, "hears_now_and_then", False):
        return False
    names = [f"on_{mode}_batch_begin", f"on_{mode}_batch_end"]
    names += ["on_batch_begin", "on_batch_end"] if mode == "train" else []
    # A progress bar draws less often, and a backup every so many batches is as good a little later.
    # What a subclass of theirs does of its own is neither.
    quiet = (keras.callbacks.ProgbarLogger, keras.callbacks.BackupAndRestore)
    base = next((kind for kind in quiet if isinstance(callback, kind)), keras.callbacks.Callback)
    return any(
        getattr(getattr(callback, n), "__func__", None) is not getattr(base, n) for n in names
    )
