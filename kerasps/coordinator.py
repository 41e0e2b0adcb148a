"""The `ClusterCoordinator` of a strategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasps.hooks.thread_state import left_as_found
from kerasps.inputs import per_worker_dataset
from kerasps.runtime.connected import check_not_closed, connected_host
from kerasps.runtime.errors import translated_errors
from kerasps.variables import wait_for_steps


class Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's coordinator, with calls that are each counted once.

    A strategy has one coordinator, and `tf.distribute.coordinator.ClusterCoordinator(strategy)`
    returns the one that exists. The strategy makes this one first.
    """

    def schedule(self, fn: object, args: object = None, kwargs: object = None) -> Any:
        """Schedule a function on a worker. In a callback, wait for the steps in flight first."""
        check_not_closed("`ClusterCoordinator.schedule`")
        wait_for_steps()
        with translated_errors(connected_host()), left_as_found():
            return super().schedule(fn, args, kwargs)

    def join(self) -> None:
        """Wait for scheduled functions, but not for lost tasks."""
        check_not_closed("`ClusterCoordinator.join`")
        host = self.strategy.extended.host
        with translated_errors(connected_host()):
            host.scheduled_calls.join(
                lambda timeout: self._cluster.closure_queue.wait(timeout=timeout)
            )
            # Nothing is left to wait for. A library may have wrapped it.
            super().join()

    def create_per_worker_dataset(self, dataset_fn: object) -> Any:
        """Create a dataset on each worker, with iterators that are deleted quickly."""
        check_not_closed("`ClusterCoordinator.create_per_worker_dataset`")
        return super().create_per_worker_dataset(per_worker_dataset(dataset_fn))
