"""The end of calls on workers whose cluster is closed."""

from __future__ import annotations

import queue
from typing import Any, NoReturn

import tensorflow as tf

from kerasps import _compat
from kerasps.errors import ClusterClosedError
from kerasps.runtime.connected import check_not_closed, closed_error


class ClosedCallError(ClusterClosedError, tf.errors.CancelledError):
    """The error of a scheduled function that is not done when the cluster is closed.

    It is a `CancelledError`, since TensorFlow logs every other error of a call.
    """

    def __init__(self) -> None:
        received = "a scheduled function that was not done"
        tf.errors.CancelledError.__init__(self, None, None, str(closed_error(received)))


class ClosedQueue:
    """Replaces the queue of TensorFlow's coordinator, with the methods that it calls.

    The coordinator's threads find no further calls and end. All calls, in flight or pending, end in
    a `ClosedCallError`.
    """

    def __init__(self) -> None:
        self._cancellation_mgr = _compat.CancellationManager()

    def take_over(self, before: Any) -> None:
        """End the queue `before`, and all pending calls in it."""
        before.stop()
        for waiting in (before._queue, *before._tagged_queue.values()):
            while True:
                try:
                    self.put(waiting.get_nowait())
                except queue.Empty:
                    break

    def put(self, closure: Any, tag: int | None = None) -> None:
        """End a closure in an error."""
        closure.maybe_call_with_output_remote_value(
            lambda remote_value: remote_value._set_error(ClosedCallError())
        )

    def put_back(self, closure: Any) -> None:
        """End a closure in an error."""
        self.put(closure)

    def get(self, timeout: float | None = None, tag: int | None = None) -> None:
        """Return None, which ends a worker's thread."""

    def mark_finished(self) -> None:
        """Do nothing, since no thread waits for it."""

    def mark_failed(self, e: BaseException) -> None:
        """Do nothing, since the closure has the error already."""

    def clear_tag_unlocked(self, tag: int) -> None:
        """Do nothing, since no call is pending."""

    def stop(self) -> None:
        """Do nothing, since no call is pending."""

    def wait(self, timeout: float | None = None) -> NoReturn:
        """Raise ClusterClosedError."""
        check_not_closed("a wait for scheduled functions")
        raise AssertionError

    def done(self) -> NoReturn:
        """Raise ClusterClosedError."""
        self.wait()
