"""Functions that users schedule on the `ClusterCoordinator`: their calls, each counted once.

A *call* is what TensorFlow names a closure: a scheduled function with its arguments, on its way to
a worker. Each worker pushes in a lane of its own (see `variables.Fences`), and a push carries the
number of its call in that lane. When a call fails because its worker is lost, the lane is closed,
and each ps says how many of the call's pushes it has applied. Another worker then makes the call
with a twin of the function that leaves as many out, so that each update is applied once.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster import COORDINATOR_CPU, hung_ps_error, ps_device, tell_supervisor
from kerasps.errors import WorkerLostError
from kerasps.step import CallTicket, PushCounts
from kerasps.training.worker_recovery import WorkerAway
from kerasps.variables import (
    OPEN_LANE,
    LookupTables,
    OutsideReplicaError,
    outside_replica,
    worker_timeout,
)

# How often a wait looks whether anybody is there; what is done it hears of at once.
_POLL_S = 0.5


@dataclass
class _Call:
    """A call on a worker.

    Attributes:
        closure: TensorFlow's object, while it is there.
        worker: the index of the worker.
        lane: the lane in which it pushes.
        number: its number in the lane.
        applied: of each ps, how many of its pushes were applied before it came here.
        tells: whether it was found out how many were applied here.
    """

    closure: weakref.ref[Any]
    worker: int
    lane: int
    number: int
    applied: tuple[int, ...]
    tells: bool = False


@dataclass(frozen=True)
class Parts:
    """What a closure is made of.

    Attributes:
        constructor: TensorFlow's constructor.
        function: the function that was scheduled.
        manager: the cancellation manager.
        args: the function's arguments.
        kwargs: its keyword arguments.
    """

    constructor: Any
    function: Any
    manager: Any
    args: Any
    kwargs: Any

    def make(self, closure: Any) -> None:
        """Have TensorFlow make a closure."""
        self.constructor(closure, self.function, self.manager, args=self.args, kwargs=self.kwargs)


class _ThreadState(threading.local):
    call: _Call | None = None
    redone: PushCounts | None = None


class ScheduledCalls:
    """The calls of scheduled functions (see `step.Calls`).

    Args:
        strategy: the `ParameterServerStrategy`.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = weakref.proxy(strategy)
        self._num_ps = strategy.num_ps
        self._devices = [ps_device(ps) for ps in range(self._num_ps)]
        self._state = _ThreadState()
        self._lock = threading.Lock()
        # Of each worker, its lane and the number of its last call in it.
        self._lanes: dict[int, tuple[int, int]] = {}
        # What each ps has applied of calls that were begun and are to be made again.
        self._applied: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        # What closures were made of, but those of fixed functions.
        self._made_of: weakref.WeakKeyDictionary[Any, Parts | None] = weakref.WeakKeyDictionary()
        self._wrapped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # How often each worker was taken back, as far as TensorFlow knows.
        self._generations: dict[int, int] = {}
        self._brought: dict[int, tuple[int, weakref.WeakSet[LookupTables]]] = {}

    # Tracing

    @property
    def redone(self) -> PushCounts | None:
        """The counts of a function that is traced to do again what was done in part, else None."""
        return self._state.redone

    def make(self, closure: Any, parts: Parts) -> None:
        """Make a closure, of which TensorFlow's constructor makes the rest."""
        function = parts.function
        if not isinstance(function, tf.types.experimental.PolymorphicFunction):
            parts.make(closure)
            if isinstance(function, tf.types.experimental.ConcreteFunction):
                self._made_of[closure] = None
            return
        if function not in self._wrapped:
            try:
                with outside_replica():
                    parts.make(closure)
                self._made_of[closure] = parts
                return
            except OutsideReplicaError:
                # It trains outside of `strategy.run`: so all of it is what runs there.
                self._wrapped[function] = self._run_whole(function)
        parts = replace(parts, function=self._wrapped[function])
        parts.make(closure)
        self._made_of[closure] = parts

    def _run_whole(self, function: Any) -> Any:
        """Return a function whose whole body is what `strategy.run` is given."""
        body, strategy = function.python_function, self._strategy

        def run(*args: Any, **kwargs: Any) -> Any:
            return strategy.run(body, args, kwargs)

        return tf.function(run, autograph=True)

    # Waiting. Thread: any but those of workers.

    def join(self, wait: Callable[[float], bool]) -> None:
        """Wait until all calls are made.

        Args:
            wait: TensorFlow's wait: for so many seconds at most; returns whether all are made.

        Raises:
            PSLostError: a ps does not answer any more.
            WorkerLostError: no worker has been there for KERASPS_WORKER_TIMEOUT seconds (600).
            Exception: what a function raised on a worker.
        """
        membership, timeout = self._strategy._membership, worker_timeout()
        there_at = time.monotonic()
        while not wait(_POLL_S):
            if membership.lost_ps is not None:
                raise hung_ps_error(self._strategy, membership.lost_ps)
            absent = membership.absent_workers
            if len(absent) < membership.num_workers:
                there_at = time.monotonic()
            waited = time.monotonic() - there_at
            if waited > timeout:
                tell_supervisor("lost", "worker", min(absent))
                names = ", ".join(f"worker {worker}" for worker in sorted(absent))
                raise WorkerLostError(
                    f"Scheduled functions wait for a worker, and none has been there for "
                    f"{waited:.0f} s: {names} went away and did not come back. Expected: at least "
                    f"one worker that answers within {timeout:.0f} s. Restart a worker at its "
                    "address, or set KERASPS_WORKER_TIMEOUT to wait longer."
                )

    def settle(self) -> None:
        """Wait until all calls are made, where there are any. Call before steps of `fit` begin.

        Raises what `ClusterCoordinator.join` raises.
        """
        if len(self._made_of):
            self._strategy.coordinator.join()

    # Calls. Thread: that of a worker.

    def begin(self, closure: Any, worker: int) -> None:
        """Note that this thread is about to make a call on a worker.

        Raises WorkerAway where the worker was lost since, and is to be readied first.
        """
        self._state.call = None
        if closure not in self._made_of:
            return  # no function that was traced
        generation = self._strategy._membership.generation(worker)
        if self._generations.setdefault(worker, 0) != generation:
            # It was lost and came back while it had nothing to do. What it had of datasets is gone,
            # and made again only where TensorFlow hears of a loss.
            self._generations[worker] = generation
            raise WorkerAway
        applied = self._applied.get(closure, (0,) * self._num_ps)
        if any(applied):
            self._have_redone(closure)
        with self._lock:
            lane, number = self._lanes.get(worker, (OPEN_LANE, 0))
        if lane == OPEN_LANE:
            lane = self._strategy.extended.fences.open_lane(self._devices)
        with self._lock:
            self._lanes[worker] = lane, number + 1
        self._state.call = _Call(weakref.ref(closure), worker, lane, number + 1, applied)

    def ticket(self, tables: LookupTables) -> tf.Tensor:
        """Return the packed ticket of the call that this thread makes, and ready its worker.

        Args:
            tables: the lookup tables that the worker needs copies of.
        """
        call = self._state.call
        if call is None or _compat.get_current_dispatch_context() is None:  # on the coordinator
            tables.bring()
            ticket = CallTicket(OPEN_LANE, 1, (0,) * self._num_ps)
        else:
            self._bring(tables, call.worker)
            ticket = CallTicket(call.lane, call.number, call.applied)
        # Made here, it goes to the worker with the call; made there, in a request of its own.
        with tf.device(COORDINATOR_CPU):
            return tf.constant(ticket.to_bytes())

    def _bring(self, tables: LookupTables, worker: int) -> None:
        """Fill the copies of lookup tables on a worker, once while it is there."""
        generation = self._strategy._membership.generation(worker)
        known = self._brought.get(worker)
        if known is None or known[0] != generation:
            known = self._brought[worker] = generation, weakref.WeakSet()
        if tables not in known[1]:
            tables.bring()
            known[1].add(tables)

    def fail(self) -> None:
        """Find out what the call that this thread was making has changed; nothing does from here.

        Call when it has failed, and may be made again.
        """
        call = self._state.call
        closure = None if call is None else call.closure()
        if call is None or call.tells or closure is None:
            return
        call.tells = True
        with self._lock:
            if self._lanes.get(call.worker, (OPEN_LANE, 0))[0] == call.lane:
                del self._lanes[call.worker]
        # Where a ps is lost, nothing is left that could be counted twice.
        with contextlib.suppress(tf.errors.OpError):
            here = self._strategy.extended.fences.close_call(call.lane, call.number, self._devices)
            self._applied[closure] = tuple(map(sum, zip(call.applied, here, strict=True)))

    def _have_redone(self, closure: Any) -> None:
        """Have a closure call the twin of its function, which leaves out what was applied."""
        parts = self._made_of[closure]
        if parts is None:
            return
        function = parts.function
        if function not in self._twins:
            self._twins[function] = tf.function(function.python_function)
        # The closure stays, with what was promised for it.
        twin = object.__new__(_compat.Closure)
        with self._redoing(), self._strategy.scope():
            replace(parts, function=self._twins[function]).make(twin)
        closure._function = twin._function

    @contextlib.contextmanager
    def _redoing(self) -> Iterator[None]:
        self._state.redone = PushCounts(self._num_ps)
        try:
            yield
        finally:
            self._state.redone = None
