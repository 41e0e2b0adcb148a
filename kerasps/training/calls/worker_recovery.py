"""The recovery of a call that fails in a worker's thread of a `ClusterCoordinator`.

TensorFlow's handler takes lost workers back only when all of them answer again, some ten seconds
later. This one replaces it. It relies on `Membership`, so each worker is taken back independently.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.members.membership import Membership
from kerasps.errors import WorkerLostError
from kerasps.runtime.connected import connected_host
from kerasps.runtime.errors import answers, lost_ps, ps_is_there
from kerasps.training.calls.closed_calls import ClosedCallError
from kerasps.training.calls.session_failures import (
    MAX_LOSSES,
    SessionFailures,
    in_short,
    may_be_loss,
)


class FailingCalls(Protocol):
    """The calls of functions that users schedule."""

    def fail(self) -> int:
        """Count the applied pushes of this thread's failed call; return how often it failed."""


# The pause before a call is retried on a worker that answers. A loss is noticed meanwhile.
_PAUSE_S = 0.5


class WorkerAbsent(Exception):
    """Raised in a worker's thread: the worker is lost, and the thread must wait for it."""


class TryAgain(Exception):
    """Raised in a worker's thread: the worker answers, and the thread must try again."""


class _Decision(enum.Enum):
    """The decision about a call that failed."""

    RETRY_AT_ONCE = "its worker runs it again"
    RECOVER = "it runs again when its worker is back, or another is free"
    FAIL = "its error is that of the call"


class WorkerRecovery:
    """Replaces `WorkerPreemptionHandler`, with the methods that TensorFlow calls."""

    def __init__(self, cluster: Any, membership: Membership, calls: FailingCalls) -> None:
        self._cluster = cluster
        self._membership = membership
        self._calls = calls
        self._failures = SessionFailures(membership)

    def stop(self) -> None:
        """Do nothing, since there is no thread to end."""

    @contextlib.contextmanager
    def wait_on_failure(
        self,
        on_failure_fn: Callable[[BaseException], None] | None = None,
        on_transient_failure_fn: Callable[[], None] | None = None,
        on_recovery_fn: Callable[[], None] | None = None,
        worker_device_name: str = "(unknown)",
    ) -> Iterator[None]:
        """Handle the loss of a worker within this context, and wait until it is back."""
        worker = tf.DeviceSpec.from_string(worker_device_name).task
        try:
            with self._ended_with_cluster():
                yield
        except ClosedCallError:
            raise
        except TryAgain:
            if on_transient_failure_fn is not None:
                on_transient_failure_fn()
        except WorkerAbsent as exc:
            self._calls.fail()
            self._recover(worker, exc, on_failure_fn, on_recovery_fn)
        except (
            tf.errors.OpError,
            _compat.ClosureInputError,
            _compat.ClosureAbortedError,
            TypeError,
        ) as exc:
            # A call by code that uses the coordinator directly.
            match self._decision(worker, worker_device_name, exc, self._calls.fail()):
                case _Decision.RETRY_AT_ONCE:
                    if on_transient_failure_fn is not None:
                        on_transient_failure_fn()
                case _Decision.RECOVER:
                    self._recover(worker, exc, on_failure_fn, on_recovery_fn)
                case _Decision.FAIL:
                    raise
        except Exception:
            # For example an error of the call's arguments: the call may have pushed or not.
            self._calls.fail()
            raise
        else:
            self._failures.forget(worker)

    @contextlib.contextmanager
    def _ended_with_cluster(self) -> Iterator[None]:
        """Turn errors within this context into `ClosedCallError`s if the cluster is closed."""
        try:
            yield
        except Exception as exc:
            if self._membership.is_closed:
                raise ClosedCallError from exc
            raise

    def _recover(
        self,
        worker: int,
        error: BaseException,
        on_failure_fn: Callable[[BaseException], None] | None,
        on_recovery_fn: Callable[[], None] | None,
    ) -> None:
        if on_failure_fn is not None:
            on_failure_fn(error)
        self._membership.wait_until_there(worker)
        if on_recovery_fn is not None:
            on_recovery_fn()

    def _decision(self, worker: int, device: str, error: BaseException, times: int) -> _Decision:
        """Decide about a call that failed for the `times`-th time; 0 if that is not known.

        Raises WorkerLostError if the call has lost too many workers.
        """
        ps, host = lost_ps(error), connected_host()
        if ps is not None and host is not None and not ps_is_there(host, ps):
            return _Decision.FAIL
        if times < MAX_LOSSES and self._is_transient(error):
            return _Decision.RETRY_AT_ONCE
        if self._is_lost(worker, device, error):
            if times >= MAX_LOSSES:
                raise _loses_workers_error(self._membership.name_of(worker), error) from error
            return _Decision.RECOVER
        if not may_be_loss(error) or times >= MAX_LOSSES:
            return _Decision.FAIL
        if not self._failures.may_try_again(error, worker):
            return _Decision.FAIL
        # The worker was lost, and came back before anyone noticed.
        time.sleep(_PAUSE_S)
        return _Decision.RECOVER

    def _is_lost(self, worker: int, device: str, error: BaseException) -> bool:
        """Return whether a call failed because its worker is lost; ask it, if the error may."""
        aborted = isinstance(error, (_compat.ClosureInputError, _compat.ClosureAbortedError))
        if not (aborted or may_be_loss(error)):
            return False
        if self._membership.has_worker(worker) and not answers(device):
            self._membership.lose(worker, in_short(error))
        return not self._membership.has_worker(worker)

    def _is_transient(self, error: BaseException) -> bool:
        """Return whether TensorFlow's handler would retry the call at once."""
        if self._cluster._record_and_ignore_transient_ps_failure(error):
            return True
        if self._cluster._record_and_ignore_transient_timeouts(error):
            return True
        return isinstance(error, tf.errors.CancelledError) and "/job:" in str(error)


def _loses_workers_error(name: str, error: BaseException) -> WorkerLostError:
    return WorkerLostError(
        f"{MAX_LOSSES} workers in a row were lost while they ran the same scheduled function; the "
        f"last was {name}. Expected: a function that a worker survives. Received: "
        f"{in_short(error)}. It may need more memory than a worker has, or crash it: look at the "
        "end of the worker's log, and at the kernel's for an out-of-memory kill.",
        task_type="worker",
    )
