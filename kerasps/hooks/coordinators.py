"""What is called in place of the methods of TensorFlow's `ClusterCoordinator`."""

from __future__ import annotations

from typing import Any

from kerasps import _compat, training
from kerasps.cluster import connected_strategy, translated_errors
from kerasps.hooks.thread_state import left_as_found
from kerasps.variables import come_to_rest


def schedule(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ClusterCoordinator.schedule`: wait for the steps of `fit` that a callback runs beside."""
    come_to_rest()
    with translated_errors(connected_strategy()), left_as_found():
        return original(self, *args, **kwargs)


def join(original: Any, self: Any) -> None:
    """`ClusterCoordinator.join`: wait for what is scheduled, and not for tasks that are gone."""
    strategy = connected_strategy()
    if strategy is None:
        original(self)
        return
    with translated_errors(strategy):
        strategy._scheduled_calls.join(
            lambda timeout: self._cluster.closure_queue.wait(timeout=timeout)
        )


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
