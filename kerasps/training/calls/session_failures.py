"""Decides whether a session failed because its worker is lost, or because of its work."""

from __future__ import annotations

import enum
import re
import threading

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.members.membership import Membership
from kerasps.runtime.connected import connected_host
from kerasps.runtime.errors import answers, cleaned, lost_ps, ps_is_there

# gRPC's answer to a request that it could not read, and that TensorFlow has not received. Seen once
# in hundreds of runs, after a chief had ended and its cluster had another.
_NOT_READ = "Unable to parse request"


class Verdict(enum.Enum):
    """The decision about a session that failed."""

    WORKER_IS_ABSENT = "it goes on when the worker is back"
    TRY_AGAIN = "it is started again at once"
    FAIL = "its error is that of the flight"


class SessionFailures:
    """Decides about a session that failed: its worker is lost, a retry may help, or neither.

    The text of an error does not tell: the loss of a worker appears as unavailable, aborted,
    cancelled and more, and the error may name another task. So this class asks the worker. A worker
    that takes no new connections is leaving, and is given up. A worker that answers, and knows this
    process, is not lost. If it meets the same error three times in a row, its work is at fault.

    Args:
        membership: knows which tasks answer.
    """

    _MAX_TRIES = 3

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._lock = threading.Lock()
        self._met: dict[int, tuple[str, int]] = {}

    def verdict(self, error: BaseException, worker: int) -> Verdict:
        """Return the decision about a session that failed. Thread: the session's."""
        if not self._membership.has_worker(worker):
            self.forget(worker)
            return Verdict.WORKER_IS_ABSENT
        if self._membership.give_up_leaving(worker, in_short(error)):
            self.forget(worker)
            return Verdict.WORKER_IS_ABSENT
        ps = lost_ps(error)
        if ps is not None:
            host = connected_host()
            if host is None or self._membership.lost_ps is not None or not ps_is_there(host, ps):
                return Verdict.FAIL
            return self._tried(error, worker)
        if not answers(f"/job:worker/replica:0/task:{worker}"):
            self.forget(worker)
            self._membership.lose(worker, in_short(error))
            return Verdict.WORKER_IS_ABSENT
        is_known = bool(_compat.is_worker_failure(error))
        did_not_arrive = isinstance(error, tf.errors.InternalError) and _NOT_READ in error.message
        cancelled = isinstance(error, tf.errors.CancelledError)
        if is_known or did_not_arrive or cancelled or _is_between(error):
            return self._tried(error, worker)
        return Verdict.FAIL

    def may_try_again(self, error: BaseException, worker: int) -> bool:
        """Note an error of a worker; return True unless it is the third such error in a row."""
        return self._tried(error, worker) is Verdict.TRY_AGAIN

    def _tried(self, error: BaseException, worker: int) -> Verdict:
        what = type(error).__name__ + re.sub(r"[0-9]+", "", (str(error).splitlines() or [""])[0])
        with self._lock:
            before, times = self._met.get(worker, ("", 0))
            times = times + 1 if what == before else 1
            self._met[worker] = (what, times)
        return Verdict.FAIL if times >= self._MAX_TRIES else Verdict.TRY_AGAIN

    def forget(self, worker: int) -> None:
        """Forget the errors of a worker, since it has done a call, or is a new one."""
        if worker in self._met:
            with self._lock:
                self._met.pop(worker, None)


def may_be_loss(error: BaseException) -> bool:
    """Return True if `error` may come from the loss of a task, and not from the step."""
    kinds = (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
        tf.errors.InternalError,
        tf.errors.UnknownError,
    )
    if isinstance(error, kinds) or _is_between(error):
        return True
    return bool(_compat.is_worker_failure(error)) or lost_ps(error) is not None


def in_short(error: BaseException) -> str:
    """Return the beginning of an error's message, without the path that TensorFlow adds."""
    return (str(cleaned(error)).splitlines() or [""])[0][:80] or type(error).__name__


def _is_between(error: BaseException) -> bool:
    """Return True if a call was made while TensorFlow removed or added a worker.

    At that moment TensorFlow does not know the devices of workers.
    """
    return isinstance(error, tf.errors.InvalidArgumentError) and (
        "Primary device is not remote" in error.message or "unknown device" in error.message
    )
