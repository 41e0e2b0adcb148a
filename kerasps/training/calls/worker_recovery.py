"""The recovery of a call that fails in a worker's thread of a `ClusterCoordinator`.

TensorFlow's handler takes lost workers back only when all of them answer again, some ten seconds
later. This one replaces it. It relies on `Membership`, so each worker is taken back independently.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.members.membership import Membership
from kerasps.runtime.connected import connected_host
from kerasps.runtime.errors import answers, lost_ps, ps_is_there
from kerasps.training.calls.closed_calls import ClosedCallError
from kerasps.training.calls.session_failures import SessionFailures, in_short, may_be_loss


class FailingCalls(Protocol):
    """The calls of functions that users schedule."""

    def fail(self) -> None:
        """Count the applied pushes of this thread's failed call."""


# The pause before a call is retried on a worker that answers. A loss is noticed meanwhile.
_PAUSE_S = 0.5


class WorkerAbsent(Exception):
    """Raised in a worker's thread: the worker is lost, and the thread must wait for it."""


class TryAgain(Exception):
    """Raised in a worker's thread: the worker answers, and the thread must try again."""


class WorkerRecovery:
    """Replaces `WorkerPreemptionHandler`, with the methods that TensorFlow calls.

    Args:
        cluster: the coordinator's `Cluster`.
        membership: knows which tasks answer.
        calls: the calls of functions that users schedule.
    """

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
        """Handle the loss of a worker within this context, and wait until it is back.

        Args:
            on_failure_fn: called when the worker is lost.
            on_transient_failure_fn: called when it is not lost, and a retry may help.
            on_recovery_fn: called when it is back.
            worker_device_name: the worker's device.
        """
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
            self._calls.fail()
            ps = lost_ps(exc)
            host = connected_host()
            if ps is not None and host is not None and not ps_is_there(host, ps):
                raise
            if self._is_transient(exc):
                if on_transient_failure_fn is not None:
                    on_transient_failure_fn()
                return
            if self._is_lost(worker, worker_device_name, exc):
                self._recover(worker, exc, on_failure_fn, on_recovery_fn)
            elif may_be_loss(exc) and self._failures.may_try_again(exc, worker):
                # The worker was lost, and came back before anyone noticed.
                time.sleep(_PAUSE_S)
                self._recover(worker, exc, on_failure_fn, on_recovery_fn)
            else:
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
