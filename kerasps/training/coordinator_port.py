"""All that kerasps asks of TensorFlow's `ClusterCoordinator` beyond its public methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kerasps import _compat


class CoordinatorPort:
    """The coordinator's internals, behind one class.

    `ClusterCoordinator.schedule` takes `tf.function`s alone, whose every call the coordinator
    traces, queues and waits for. A session is Python that runs in a worker's thread for a whole
    flight, so it goes in one level below. What is relied on is behaviour, which no look at names
    can check: `tests/processes/test_coordinator_port.py` does.

    Args:
        coordinator: the `tf.distribute.coordinator.ClusterCoordinator`.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._tf_cluster = coordinator._cluster

    def start(self, session: Callable[..., None], *args: Any) -> None:
        """Run `session` in the thread of the next free worker, on that worker's device.

        If it raises what TensorFlow takes for a lost worker, it is called again when a worker is
        back. Of `args`, what `create_per_worker` returned is replaced by the worker's own.
        """
        self._tf_cluster.schedule(session, args=args, kwargs=None)

    def create_per_worker(self, create: Callable[[], Any]) -> Any:
        """Call `create` for each worker, and again for one that comes back; return all results."""
        return self._coordinator._create_per_worker_resources(create)

    @staticmethod
    def worker_index() -> int:
        """Return the index of the worker whose thread this is. Thread: that of a session."""
        return int(_compat.get_current_dispatch_context().worker_index)

    @property
    def lost_workers(self) -> set[int]:
        """The workers that the coordinator has found dead and not taken back."""
        workers = enumerate(self._tf_cluster.workers)
        return {index for index, worker in workers if worker._is_dead_with_error}

    @property
    def has_failed(self) -> bool:
        """Whether a session ended in an error that no retry mends, or a ps was reported lost."""
        return self._tf_cluster.closure_queue._error is not None

    def raise_error(self) -> None:
        """Raise the error that the coordinator has, if any; it is ready for new sessions then."""
        if self.has_failed:
            self._coordinator.done()

    def forget_ps_reports(self) -> None:
        """Count reports of lost ps anew.

        TensorFlow adds them up over the life of a job, and gives up after a few. Call when an
        execution has succeeded: what was reported before was a blip.
        """
        counts = self._tf_cluster._potential_ps_failures_count
        counts[:] = [0] * len(counts)

    @staticmethod
    @contextlib.contextmanager
    def cancellable_calls() -> Iterator[Any]:
        """In this context, calls of any thread end when the yielded manager's `start_cancel` runs.

        Executions that wait for a lost ps end in no other way. TensorFlow keeps the context for the
        whole process: leave it when no thread is about to make a call.
        """
        manager = _compat.CancellationManager()
        _compat.CancellationManagerContext(manager).__enter__()
        try:
            yield manager
        finally:
            _compat.CancellationManagerContext(None).__enter__()
