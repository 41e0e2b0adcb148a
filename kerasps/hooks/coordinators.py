"""The replacements of methods of TensorFlow's `ClusterCoordinator`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.hooks.in_place import Original
from kerasps.hooks.thread_state import left_as_found
from kerasps.inputs import per_worker_dataset, quickly_deleted
from kerasps.runtime.connected import check_not_closed, connected_host, connected_strategy
from kerasps.runtime.errors import translated_errors
from kerasps.training.calls.scheduled import Parts, ScheduledCalls
from kerasps.variables import wait_for_steps


def schedule(
    original: Original,
    self: tf.distribute.coordinator.ClusterCoordinator,
    *args: object,
    **kwargs: object,
) -> Any:
    """`ClusterCoordinator.schedule`: in a callback, wait for the steps of `fit` in flight first."""
    check_not_closed("`ClusterCoordinator.schedule`")
    wait_for_steps()
    with translated_errors(connected_host()), left_as_found():
        return original(self, *args, **kwargs)


def join(original: Original, self: tf.distribute.coordinator.ClusterCoordinator) -> None:
    """`ClusterCoordinator.join`: wait for scheduled functions, but not for lost tasks."""
    calls = _scheduled_calls()
    if calls is None:
        original(self)
        return
    check_not_closed("`ClusterCoordinator.join`")
    with translated_errors(connected_host()):
        calls.join(lambda timeout: self._cluster.closure_queue.wait(timeout=timeout))


def _scheduled_calls() -> ScheduledCalls | None:
    """Return the calls of functions that users have scheduled; None if users cannot schedule."""
    strategy = connected_strategy()
    if strategy is None:
        return None
    calls: ScheduledCalls | None = strategy.extended.host.scheduled_calls
    return calls


def create_per_worker_dataset(
    original: Original, self: tf.distribute.coordinator.ClusterCoordinator, dataset_fn: object
) -> Any:
    """`ClusterCoordinator.create_per_worker_dataset`: make iterators that are deleted quickly."""
    check_not_closed("`ClusterCoordinator.create_per_worker_dataset`")
    if connected_strategy() is not None:
        dataset_fn = per_worker_dataset(dataset_fn)
    return original(self, dataset_fn)


def create_device_dataset(original: Original, *args: object, **kwargs: object) -> Any:
    """`_create_device_dataset`: do the same for a distributed iterator's dataset on each device."""
    made = original(*args, **kwargs)
    return made if connected_strategy() is None else quickly_deleted(made)


def make_closure(
    original: Original,
    self: object,
    function: object,
    cancellation_mgr: object,
    args: object = None,
    kwargs: object = None,
) -> None:
    """`Closure.__init__`: trace a function as a step if any part of it trains."""
    parts = Parts(original, function, cancellation_mgr, args, kwargs)
    calls = _scheduled_calls()
    if calls is None or type(self) is not _compat.Closure:
        parts.make(self)
    else:
        calls.make(self, parts)


def execute(original: Original, self: Any, worker: Any) -> None:
    """`Closure.execute_on`: note the call that begins, so that its pushes are applied once."""
    calls = _scheduled_calls()
    if calls is not None and type(self) is _compat.Closure:
        calls.begin(self, worker.worker_index)
    original(self, worker)
