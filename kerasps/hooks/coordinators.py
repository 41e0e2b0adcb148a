"""What is called in place of the methods of TensorFlow's `ClusterCoordinator`."""

from __future__ import annotations

from typing import Any

from kerasps import _compat, training
from kerasps.hooks.thread_state import left_as_found
from kerasps.inputs import per_worker_dataset, quickly_deleted
from kerasps.runtime.connected import check_not_closed, connected_strategy
from kerasps.runtime.errors import translated_errors
from kerasps.variables import come_to_rest


def schedule(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ClusterCoordinator.schedule`: wait for the steps of `fit` that a callback runs beside."""
    check_not_closed("`ClusterCoordinator.schedule`")
    come_to_rest()
    with translated_errors(connected_strategy()), left_as_found():
        return original(self, *args, **kwargs)


def join(original: Any, self: Any) -> None:
    """`ClusterCoordinator.join`: wait for what is scheduled, and not for tasks that are gone."""
    strategy = connected_strategy()
    if strategy is None:
        original(self)
        return
    check_not_closed("`ClusterCoordinator.join`")
    with translated_errors(strategy):
        strategy._scheduled_calls.join(
            lambda timeout: self._cluster.closure_queue.wait(timeout=timeout)
        )


def create_per_worker_dataset(original: Any, self: Any, dataset_fn: Any) -> Any:
    """`ClusterCoordinator.create_per_worker_dataset`: no worker waits for an iterator to go."""
    check_not_closed("`ClusterCoordinator.create_per_worker_dataset`")
    if connected_strategy() is not None:
        dataset_fn = per_worker_dataset(dataset_fn)
    return original(self, dataset_fn)


def create_device_dataset(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`_create_device_dataset`: the same of what a distributed iterator has on each device."""
    made = original(*args, **kwargs)
    return made if connected_strategy() is None else quickly_deleted(made)


def make_closure(
    original: Any,
    self: Any,
    function: Any,
    cancellation_mgr: Any,
    args: Any = None,
    kwargs: Any = None,
) -> None:
    """`Closure.__init__`: trace a function that trains, wherever in it, as a step."""
    parts = training.Parts(original, function, cancellation_mgr, args, kwargs)
    strategy = connected_strategy()
    if strategy is None or type(self) is not _compat.Closure:
        parts.make(self)
    else:
        strategy._scheduled_calls.make(self, parts)


def execute(original: Any, self: Any, worker: Any) -> None:
    """`Closure.execute_on`: note which call this is, for what it pushes."""
    strategy = connected_strategy()
    if strategy is not None and type(self) is _compat.Closure:
        strategy._scheduled_calls.begin(self, worker.worker_index)
    original(self, worker)
