"""Which failed sessions are worth another try: those whose worker is lost."""

from __future__ import annotations

import re
import threading

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster import answers, lost_ps


class SessionFailures:
    """Tells a session that failed because its worker is lost from one that fails for what it does.

    TensorFlow's coordinator goes by the words of an error: what is called unavailable and names a
    worker is a lost worker, and the session is started again when the worker is back, for ever.
    Here the worker is asked. One that answers, and knows us, is not lost; where it meets the same
    error several times in a row, that is the error of what it does.
    """

    _MAX_TRIES = 3

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: dict[int, tuple[str, int]] = {}

    def may_be_loss(self, error: BaseException) -> bool:
        """Return whether `error` may say that a task is lost, rather than what a step did wrong."""
        kinds = (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
            tf.errors.DeadlineExceededError,
            tf.errors.InternalError,
            tf.errors.UnknownError,
        )
        if (
            getattr(error, "original_exception", None) is not None
            or isinstance(error, kinds)
            or _is_between(error)
        ):
            return True
        return bool(_compat.is_worker_failure(error)) or lost_ps(error) is not None

    def retry(self, error: BaseException, worker: int) -> BaseException | None:
        """Return what to raise so that TensorFlow's coordinator starts the session again.

        None where another try would not help. Thread: that of the worker's session.
        """
        ps = lost_ps(error)
        if ps is not None:
            return error if answers(f"/job:ps/replica:0/task:{ps}") else None
        device = f"/job:worker/replica:0/task:{worker}"
        is_known = bool(_compat.is_worker_failure(error))
        if not answers(device):
            self.forget(worker)
            # Some ways to be lost are none that TensorFlow knows.
            return (
                error
                if is_known
                else tf.errors.AbortedError(None, None, f"{device} is lost: {error}")
            )
        if (
            not is_known
            and not isinstance(error, tf.errors.CancelledError)
            and not _is_between(error)
        ):
            return None
        what = type(error).__name__ + re.sub(r"[0-9]+", "", (str(error).splitlines() or [""])[0])
        with self._lock:
            before, times = self._met.get(worker, ("", 0))
            times = times + 1 if what == before else 1
            self._met[worker] = (what, times)
        if times >= self._MAX_TRIES:
            return None
        # TensorFlow retries what it knows, and what was cancelled and names a task; that may not
        # say where it was.
        is_named = isinstance(error, tf.errors.CancelledError) and "/job:" in str(error)
        return (
            error
            if is_known or is_named
            else tf.errors.CancelledError(None, None, f"{device}: {error}")
        )

    def forget(self, worker: int) -> None:
        """Forget what a worker met: it has done something since, or is a new one."""
        if worker in self._met:
            with self._lock:
                self._met.pop(worker, None)


def _is_between(error: BaseException) -> bool:
    """Return whether a call met TensorFlow while it took a worker back.

    For a moment TensorFlow has forgotten where workers are then.
    """
    return (
        isinstance(error, tf.errors.InvalidArgumentError)
        and "Primary device is not remote" in error.message
    )
