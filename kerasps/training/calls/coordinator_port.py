"""All uses of TensorFlow's `ClusterCoordinator` beyond its public methods."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.members.membership import Membership
from kerasps.training.calls.closed_calls import ClosedQueue
from kerasps.training.calls.scheduled import Parts, ScheduledCall, ScheduledCalls
from kerasps.training.calls.worker_recovery import WorkerRecovery

_Returned = TypeVar("_Returned")
_ADDING = threading.Lock()
# TensorFlow's name of the thread of its failure handler, which logs that it ends.
_HANDLER_THREAD = "WorkerPreemptionHandler"
_HANDLER_S = 2.0


class CoordinatorPort:
    """The coordinator's internals, behind one class.

    `ClusterCoordinator.schedule` takes only `tf.function`s; it traces, queues and waits for each
    call. A session is Python code that runs in a worker's thread for a whole flight, so it enters
    one level below. This class relies on behaviour, not only on names:
    `tests/processes/test_coordinator_port.py` checks it.
    """

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
        self._tf_cluster = coordinator._cluster

    def take_over(self, membership: Membership, calls: ScheduledCalls) -> None:
        """Count calls, and hand failures to `WorkerRecovery`. Call before anything is scheduled."""
        self._tf_cluster.schedule = functools.partial(_schedule, self._tf_cluster, calls)
        self._tf_cluster.failure_handler.stop()
        for thread in threading.enumerate():
            if thread.name == _HANDLER_THREAD:
                thread.join(_HANDLER_S)
        handler = WorkerRecovery(self._tf_cluster, membership, calls)
        for owner in (self._tf_cluster, *self._tf_cluster.workers):
            owner.failure_handler = handler

    def add_workers(self, num_workers: int) -> None:
        """Start threads for workers that have joined, until there are `num_workers`."""
        with _ADDING:
            workers = self._tf_cluster.workers
            while len(workers) < num_workers:
                index = len(workers)
                device = f"/job:worker/replica:0/task:{index}"
                workers.append(_compat.CoordinatorWorker(index, device, self._tf_cluster))
                self._tf_cluster._num_workers = len(workers)

    def renew_worker(self, worker: int) -> None:
        """Give a worker another thread, since its present one waits for a call that never ends."""
        with _ADDING:
            workers = self._tf_cluster.workers
            workers[worker].stop()
            device = f"/job:worker/replica:0/task:{worker}"
            workers[worker] = _compat.CoordinatorWorker(worker, device, self._tf_cluster)

    def close(self) -> None:
        """End the threads of workers and their calls. Call when the cluster is marked as closed.

        Do not wait for the threads: each ends with its call, which is cancelled.
        """
        with _ADDING:
            before, closed = self._tf_cluster.closure_queue, ClosedQueue()
            self._tf_cluster.closure_queue = closed
            for worker in self._tf_cluster.workers:
                worker.stop()
            closed.take_over(before)

    @property
    def num_workers(self) -> int:
        """The number of workers that have a thread."""
        return len(self._tf_cluster.workers)

    def start(self, session: Callable[..., None], *args: object) -> None:
        """Run `session` in the thread of the next free worker, on that worker's device.

        If it raises `WorkerAbsent`, it runs again when the worker is back, or another one is free.
        If it raises `TryAgain`, it runs again at once.
        """
        self._tf_cluster.schedule(session, args=args, kwargs=None)

    @staticmethod
    def worker_index() -> int:
        """Return the index of this thread's worker. Thread: a session's."""
        return int(_compat.get_current_dispatch_context().worker_index)

    @staticmethod
    @contextlib.contextmanager
    def cancellable_calls() -> Iterator[Any]:
        """Let the yielded manager's `start_cancel` end the calls within this context.

        They are those of this thread, and of functions that `cancellable` returns. Nothing else
        ends executions that wait for a lost ps. TensorFlow 2.21 keeps the context for the whole
        process: leave it when no thread is about to make a call.
        """
        manager = _compat.CancellationManager()
        with _compat.CancellationManagerContext(manager):
            yield manager

    @staticmethod
    def cancellable(
        manager: object, function: Callable[..., _Returned]
    ) -> Callable[..., _Returned]:
        """Return a function whose calls the manager of `cancellable_calls` ends in any thread."""

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> _Returned:
            # TensorFlow 2.23 keeps a context for each thread.
            if _compat.cancellation_context() is manager:
                return function(*args, **kwargs)
            with _compat.CancellationManagerContext(manager):
                return function(*args, **kwargs)

        return call


def _schedule(
    cluster: Any, calls: ScheduledCalls, function: object, args: object, kwargs: object
) -> Any:
    """Do what TensorFlow's `Cluster.schedule` does, with a call that is counted."""
    queue = cluster.closure_queue
    call = ScheduledCall(calls, Parts(function, queue._cancellation_mgr, args, kwargs))
    result = call.build_output_remote_value()
    queue.put(call)
    return result
