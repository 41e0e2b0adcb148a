"""The phase of a step through which variables resolve in the current thread.

Outside a step, a read of a variable returns its value on a ps. While a step is traced, the tracer
enters a phase, and the phase answers the read: with a pulled tensor, rows of it, or the storage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

from kerasps.runtime.forks import check_not_forked
from kerasps.variables.lanes.flights import wait_for_ending_flights


class Phase(Protocol):
    """Answers reads and writes of variables during one phase of a training step.

    Thread: the one that traces. `entering` enters a phase, for that thread only.
    """

    # True if a variable shows no constraint, because another phase applies it.
    hides_constraints: bool

    def read(self, variable: keras.Variable) -> Any:
        """Return the value of `variable`: a tensor or a `tf.Variable`."""

    def shape(self, variable: keras.Variable) -> tf.TensorShape:
        """Return the shape of the result of `read`, without reading."""

    def source(self, variable: keras.Variable) -> Any:
        """Return the source for `GradientTape.gradient`, without reading the value."""

    def read_rows(self, variable: keras.Variable, ids: tf.Tensor, *, from_end: bool) -> tf.Tensor:
        """Return the rows `ids` of `variable`, of shape `ids.shape + variable.shape[1:]`.

        With `from_end`, negative ids count from the end.
        """

    def assign(self, variable: keras.Variable, value: tf.Tensor) -> Any:
        """Take the new value of `variable`."""

    def assign_add(self, variable: keras.Variable, value: tf.Tensor) -> Any:
        """Add `value` to `variable`."""

    def regularizer(
        self, variable: keras.Variable, regularizer: keras.regularizers.Regularizer | None
    ) -> Any:
        """Return the regularizer to show for `variable`, given the variable's regularizer."""


# Each thread traces separately, and only the thread of a callback has a `before_access`.
class _ThreadState(threading.local):
    phase: Phase | None = None
    is_outside_replica: bool = False
    num_replicas: int = 1
    before_access: Callable[[], None] | None = None
    num_assignments: int = 0
    strategy: Any = None


_STATE = _ThreadState()


def current_phase() -> Phase | None:
    """Return the phase that the current thread traces, None outside a step."""
    return _STATE.phase


@contextlib.contextmanager
def _holding(name: str, value: object) -> Iterator[None]:
    """In this context, set the thread's state `name` to `value`."""
    previous = getattr(_STATE, name)
    setattr(_STATE, name, value)
    try:
        yield
    finally:
        setattr(_STATE, name, previous)


def entering(new_phase: Phase | None) -> contextlib.AbstractContextManager[None]:
    """In this context, resolve this thread's variables through `new_phase`; None for storages."""
    return _holding("phase", new_phase)


def as_replica(num_replicas: int) -> contextlib.AbstractContextManager[None]:
    """In this context, this thread traces one of `num_replicas` replicas of a step."""
    return _holding("num_replicas", num_replicas)


def num_replicas() -> int:
    """Return the number of replicas of the step that this thread traces; 1 outside a step."""
    return _STATE.num_replicas


class OutsideReplicaError(Exception):
    """Raised in the trace of a function that does outside a replica what only a replica may do."""

    ag_pass_through = True  # else AutoGraph would raise its error instead


def outside_replica() -> contextlib.AbstractContextManager[None]:
    """In this context, this thread traces a function that will be scheduled.

    The trace raises `OutsideReplicaError` where the function, or a function that it calls, trains.
    """
    return _holding("is_outside_replica", True)


def is_outside_replica() -> bool:
    """Return whether this thread traces a function in the context of `outside_replica`."""
    return _STATE.is_outside_replica and _STATE.phase is None and not tf.executing_eagerly()


def check_replica() -> None:
    """Raise `OutsideReplicaError` in the context of `outside_replica`, unless in a phase.

    Call before an operation that needs a push.
    """
    if is_outside_replica():
        raise OutsideReplicaError


def before_access(call: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """In this context, run `call` once, just before this thread first touches a variable.

    A call of `wait_for_steps` counts as touching one. `fit` lets steps continue during a batch
    callback, and waits for them, in `call`, only if the callback needs their results.
    """
    return _holding("before_access", call)


def wait_for_steps() -> None:
    """Wait until no step is in flight, as far as this thread can know.

    Within a batch callback on `fit`'s thread it suspends the loop. In other threads it waits for
    flights that are ending, and returns at once if there are none.

    Raises:
        KeraspsError: this process was forked from a connected one.
        WorkerLostError: a worker has a step in progress and has not answered for
            KERASPS_WORKER_TIMEOUT seconds (600).
    """
    check_not_forked()
    # Cleared first: `call` touches variables too.
    call, _STATE.before_access = _STATE.before_access, None
    if call is not None:
        call()
    wait_for_ending_flights()


def note_assignment() -> None:
    """Count an assignment of this thread to a variable, outside a step."""
    _STATE.num_assignments += 1


def num_assignments() -> int:
    """Return the number of assignments of this thread to variables, outside steps."""
    return _STATE.num_assignments


def creating_under(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[None]:
    """In this context, make new variables of this thread belong to `strategy`.

    It overrides the current strategy.
    """
    return _holding("strategy", strategy)


def creating_strategy() -> Any:
    """Return the strategy that `creating_under` names in this thread, else None."""
    return _STATE.strategy


def strategy_of_new_variables() -> Any:
    """Return the strategy that new variables of this thread belong to."""
    return tf.distribute.get_strategy() if _STATE.strategy is None else _STATE.strategy
