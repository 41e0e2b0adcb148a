"""Decides whether a session failed because its worker is lost, or because of its work."""

from __future__ import annotations

import enum
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.members.membership import Membership
from kerasps.errors import WorkerLostError
from kerasps.runtime.connected import connected_host
from kerasps.runtime.errors import answers, cleaned, lost_ps, ps_is_there
from kerasps.training.epoch.epoch_events import Execution

# gRPC's answer to a request that it could not read, and that TensorFlow has not received. Seen once
# in hundreds of runs, after a chief had ended and its cluster had another.
_NOT_READ = "Unable to parse request"


# An error that comes from outside, such as a broken connection, does not come so often.
MAX_TRIES = 3
# More than of an error: long steps may lose some workers in a row to a scheduler that takes them.
MAX_LOSSES = 5

# The number of an execution's first step, or a worker.
_Key = int | str


class Verdict(enum.Enum):
    """The decision about a session that failed."""

    WORKER_IS_ABSENT = "it goes on when the worker is back"
    LOSES_WORKERS = "its steps have lost too many workers, and the flight ends"
    TRY_AGAIN = "it is started again at once"
    FAIL = "its error is that of the flight"


class SessionFailures:
    """Decides about a session that failed: its worker is lost, a retry may help, or neither.

    The text of an error does not tell: the loss of a worker appears as unavailable, aborted,
    cancelled and more, and the error may name another task. So this class asks the worker. A worker
    that takes no new connections is leaving, and is given up. A worker that answers, and knows this
    process, is not lost. If the same steps meet the same error three times, they are at fault,
    whichever workers they ran on. So they are if each of five workers that got them was lost.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._lock = threading.Lock()
        # How often each error came, for each execution in flight, or for a worker without any.
        self._met: dict[_Key, Counter[str]] = {}

    def begin_epoch(self) -> None:
        """Forget all errors, since the executions of the epoch before are done or dropped."""
        with self._lock:
            self._met.clear()

    def verdict(
        self, error: BaseException, worker: int, executions: Iterable[Execution] = ()
    ) -> Verdict:
        """Return the decision about a session that failed. Thread: the session's."""
        steps = [int(execution.header.first_step) for execution in executions]
        if not self._membership.has_worker(worker):
            return self._lost(worker, steps)
        if self._membership.give_up_leaving(worker, in_short(error)):
            self.forget(worker)
            return Verdict.WORKER_IS_ABSENT
        ps = lost_ps(error)
        if ps is not None:
            host = connected_host()
            if host is None or self._membership.lost_ps is not None or not ps_is_there(host, ps):
                return Verdict.FAIL
            return self._tried(error, worker, steps)
        if not answers(f"/job:worker/replica:0/task:{worker}"):
            self._membership.lose(worker, in_short(error))
            return self._lost(worker, steps)
        is_known = bool(_compat.is_worker_failure(error))
        did_not_arrive = isinstance(error, tf.errors.InternalError) and _NOT_READ in error.message
        cancelled = isinstance(error, tf.errors.CancelledError)
        if is_known or did_not_arrive or cancelled or _is_between(error):
            return self._tried(error, worker, steps)
        return Verdict.FAIL

    def may_try_again(self, error: BaseException, worker: int) -> bool:
        """Note an error of a worker; return True unless it came three times."""
        return self._tried(error, worker, []) is Verdict.TRY_AGAIN

    def _lost(self, worker: int, steps: Sequence[int]) -> Verdict:
        self.forget(worker)
        if steps and self._count(steps, "") >= MAX_LOSSES:
            return Verdict.LOSES_WORKERS
        return Verdict.WORKER_IS_ABSENT

    def _tried(self, error: BaseException, worker: int, steps: Sequence[int]) -> Verdict:
        what = type(error).__name__ + re.sub(r"[0-9]+", "", (str(error).splitlines() or [""])[0])
        times = self._count(steps or [_of_worker(worker)], what)
        if times < MAX_TRIES:
            return Verdict.TRY_AGAIN
        if steps:
            error.add_note(
                f"This error came {times} times for the same steps (from step {steps[0]} on), and "
                "the worker answered each time. So they are not tried again."
            )
        return Verdict.FAIL

    def _count(self, keys: Iterable[_Key], what: str) -> int:
        """Count an error for each of `keys`; return how often it came for one of them."""
        with self._lock:
            counters = [self._met.setdefault(key, Counter()) for key in keys]
            for counter in counters:
                counter[what] += 1
            return max(counter[what] for counter in counters)

    def forget(self, worker: int) -> None:
        """Forget the errors of a worker without executions: it has done a call, or is a new one."""
        if self._met:
            with self._lock:
                self._met.pop(_of_worker(worker), None)


def loses_workers_error(name: str, executions: Sequence[Execution], reason: str) -> WorkerLostError:
    """Return the error for steps that have lost too many workers."""
    first = int(executions[0].header.first_step)
    steps = sum(execution.num_steps for execution in executions)
    return WorkerLostError(
        f"{MAX_LOSSES} workers in a row were lost while they had the same steps (the {steps} from "
        f"step {first} on); the last was {name}. Expected: steps that a worker survives. Received: "
        f"{reason}. The steps, or a batch of theirs, may need more memory than a worker has, or "
        "crash it: look at the end of the worker's log, and at the kernel's for an "
        "out-of-memory kill.",
        task_type="worker",
    )


def _of_worker(worker: int) -> str:
    return f"worker {worker}"


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
