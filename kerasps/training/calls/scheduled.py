"""Functions that users schedule on the `ClusterCoordinator`: their calls, each counted once.

A *call* is TensorFlow's closure: a scheduled function with its arguments, for one worker. Each
worker pushes in two lanes (see `variables.Fences`), which are closed when a call fails because the
worker is lost. Then each ps returns how many of the call's pushes it has applied. Another worker
retries the call with a twin of the function, which leaves out as many pushes. So each update is
applied once.

Functions whose calls make a known number of pushes use the first lane: the ps counts all pushes,
and the coordinator subtracts those of calls that are done. A variable on the worker holds this
lane, since sending a value with each call costs a millisecond. Functions that loop use the second
lane: the number of the call is sent, each push carries it, and the ps counts the pushes of the last
call.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.errors import WorkerLostError
from kerasps.runtime.devices import COORDINATOR_CPU, ps_device, ps_index
from kerasps.runtime.errors import absent_ps_error
from kerasps.runtime.supervision import tell_supervisor
from kerasps.step.running.replica_run import CallTicket, PushCounts
from kerasps.training.calls.worker_recovery import WorkerAbsent
from kerasps.training.contract.host import HostOfWorkers
from kerasps.variables import LookupTables, anonymous_handle
from kerasps.variables.lanes.fences import OPEN_LANE
from kerasps.variables.lanes.flights import worker_timeout
from kerasps.variables.lanes.phase import OutsideReplicaError, outside_replica

# After this many calls a worker gets new lanes, since the number of a call is sent as an int32.
_CALLS_PER_LANE = 2**30
# The interval at which a wait checks for lost tasks; the end of all calls ends it at once.
_POLL_S = 0.5


@dataclass(frozen=True)
class _Call:
    """A call on a worker."""

    closure: weakref.ref[Any]  # TensorFlow's object, while it exists
    lanes: _WorkerLanes  # the lanes of the worker
    number: int  # its number in the lane of functions that loop
    pushes: tuple[int, ...]  # for each ps, how many pushes it makes in the other lane
    applied: tuple[int, ...]  # for each ps, how many of its pushes were applied before this call


class _WorkerLanes:
    """The lanes of a worker, from when it is ready for calls until one of them fails.

    Args:
        counted: the lane of functions that make a known number of pushes.
        numbered: the lane of functions that loop.
    """

    def __init__(self, worker: int, counted: int, numbered: int, num_ps: int) -> None:
        self.worker = worker
        self.counted = counted
        self.numbered = numbered
        self.number = 0  # the number of the last call
        # For each ps, how many pushes in the first lane belong to calls that are done.
        self.done = [0] * num_ps
        # The variable on the worker that holds the first lane; None before its first use.
        self.handle: tf.Tensor | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of a closure."""

    function: Any  # the function that was scheduled
    manager: Any  # the cancellation manager
    args: Any  # the function's arguments
    kwargs: Any  # its keyword arguments

    def make(self, closure: Any) -> None:
        """Construct a closure, as TensorFlow does."""
        _compat.Closure.__init__(closure, self.function, self.manager, self.args, self.kwargs)


class _ThreadState(threading.local):
    call: _Call | None = None
    redone: PushCounts | None = None


class ScheduledCall(_compat.base_class("Closure")):  # type: ignore[misc]
    """A closure of TensorFlow, whose pushes are applied once."""

    def __init__(self, calls: ScheduledCalls, parts: Parts) -> None:
        self._calls = calls
        calls.make(self, parts)

    def execute_on(self, worker: Any) -> None:
        """Note the call that begins, and make it. Thread: a worker's."""
        self._calls.begin(self, worker.worker_index)
        super().execute_on(worker)


class ScheduledCalls:
    """The calls of scheduled functions (see `step.Calls`)."""

    def __init__(self, host: HostOfWorkers) -> None:
        self._host = host
        self._num_ps = host.num_ps
        self._devices = [ps_device(ps) for ps in range(self._num_ps)]
        self._state = _ThreadState()
        self._lanes: dict[int, _WorkerLanes] = {}
        # The pushes of a call to each ps, by the function's graph.
        self._pushes: weakref.WeakKeyDictionary[Any, Sequence[int]] = weakref.WeakKeyDictionary()
        self._keep = tf.function(_keep, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.int32)
        )
        self._own_handle: tf.Tensor | None = None
        # The pushes of failed calls that each ps has applied, by closure.
        self._applied: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._num_failed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The parts of closures; None for those of concrete functions.
        self._made_of: weakref.WeakKeyDictionary[Any, Parts | None] = weakref.WeakKeyDictionary()
        self._wrapped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # The generation of each worker, as far as TensorFlow knows.
        self._generations: dict[int, int] = {}
        self._brought: dict[int, tuple[int, weakref.WeakSet[LookupTables]]] = {}

    # Tracing

    @property
    def redone(self) -> PushCounts | None:
        """The push counts of a twin while it is traced, for a retry of a call; else None."""
        return self._state.redone

    def device(self) -> tuple[str, bool]:
        """Return the device that computes functions, and whether all workers have it."""
        return self._host.device_of_calls()

    def note_push(self, graph: tf.Graph, devices: Sequence[str]) -> None:
        """Note that a call of the function with this graph pushes once to each of `devices`."""
        before = self._pushes.get(graph, (0,) * self._num_ps)
        pushed = {ps_index(device) for device in devices}
        self._pushes[graph] = [count + (ps in pushed) for ps, count in enumerate(before)]

    def make(self, closure: ScheduledCall, parts: Parts) -> None:
        """Construct a closure by TensorFlow's constructor, and note its parts.

        A function any part of which trains is traced as a step.
        """
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
                # It trains outside of `strategy.run`, so `strategy.run` gets all of it.
                self._wrapped[function] = self._run_whole(function)
        parts = replace(parts, function=self._wrapped[function])
        parts.make(closure)
        self._made_of[closure] = parts

    def _run_whole(self, function: tf.types.experimental.PolymorphicFunction) -> Any:
        """Return a function that passes the whole body to `strategy.run`."""
        body, strategy = function.python_function, self._host.strategy

        def run(*args: object, **kwargs: object) -> Any:
            return strategy.run(body, args, kwargs)

        return tf.function(run, autograph=True)

    # Waiting. Thread: any but the workers' threads.

    def join(self, wait: Callable[[float], bool]) -> None:
        """Wait until all calls are done.

        Args:
            wait: TensorFlow's wait, with a limit in seconds. Returns True if all calls are done.

        Raises:
            PSLostError: a ps does not answer any more.
            WorkerLostError: no worker has answered for KERASPS_WORKER_TIMEOUT seconds (600).
            Exception: the error of a function on a worker.
        """
        membership, timeout = self._host.membership, worker_timeout()
        there_at = time.monotonic()
        while not wait(_POLL_S):
            if membership.lost_ps is not None:
                raise absent_ps_error(self._host, membership.lost_ps)
            absent = membership.absent_workers
            if len(absent) < membership.num_workers:
                there_at = time.monotonic()
            waited = time.monotonic() - there_at
            if waited > timeout:
                tell_supervisor("lost", "worker", min(absent))
                names = ", ".join(f"worker {worker}" for worker in sorted(absent))
                raise WorkerLostError(
                    f"Scheduled functions have waited for a worker for {waited:.0f} s. Expected: "
                    f"at least one worker that answers within {timeout:.0f} s. Received: no answer "
                    f"from {names}. Restart a worker at its address, or set "
                    "KERASPS_WORKER_TIMEOUT to wait longer."
                )

    def wait_until_idle(self) -> None:
        """Wait until all calls are done, if there are any. Call before steps of `fit` begin.

        Raises the errors of `ClusterCoordinator.join`.
        """
        if len(self._made_of):
            self._host.coordinator.join()

    # Calls. Thread: a worker's.

    def begin(self, closure: Any, worker: int) -> None:
        """Note that this thread is about to make a call on a worker.

        Raises WorkerAbsent if the worker was lost since, and TensorFlow must make it ready first.
        """
        self._finish()
        if closure not in self._made_of:
            return  # not a traced function
        generation = self._host.membership.generation(worker)
        if self._generations.setdefault(worker, 0) != generation:
            # It was lost and came back while it was idle. TensorFlow makes its datasets again only
            # after a failure, so raise one.
            self._generations[worker] = generation
            if worker in self._lanes:
                self._give_back(self._lanes.pop(worker))
            raise WorkerAbsent
        nothing = (0,) * self._num_ps
        applied = self._applied.get(closure, nothing)
        pushes = self._pushes.get(closure._concrete_function.graph, nothing)
        if any(applied):
            self._use_twin(closure)
            pushes = nothing  # the twin does not push in the first lane
        lanes = self._lanes_of(worker)
        lanes.number += 1
        self._state.call = _Call(weakref.ref(closure), lanes, lanes.number, tuple(pushes), applied)

    def _lanes_of(self, worker: int) -> _WorkerLanes:
        """Return the lanes of a worker that is about to be called."""
        if worker in self._lanes and self._lanes[worker].number >= _CALLS_PER_LANE:
            self._give_back(self._lanes.pop(worker))
        if worker not in self._lanes:
            fences = self._host.extended.fences
            counted = fences.open_lane(self._devices)
            try:
                numbered = fences.open_lane(self._devices)
            except BaseException:
                fences.give_back(counted)
                raise
            self._lanes[worker] = _WorkerLanes(worker, counted, numbered, self._num_ps)
        return self._lanes[worker]

    def _give_back(self, lanes: _WorkerLanes) -> None:
        """Give back the lanes of a worker, in which no call is counted any more."""
        for lane in (lanes.counted, lanes.numbered):
            self._host.extended.fences.give_back(lane)

    def _finish(self) -> None:
        """Note that this thread's last call is done, unless it has failed."""
        call, self._state.call = self._state.call, None
        if call is not None:
            done = call.lanes.done
            done[:] = [before + more for before, more in zip(done, call.pushes, strict=True)]

    def lane(self, tables: LookupTables) -> tf.Tensor:
        """Return the variable that holds the lane of the worker of this thread's call."""
        call = self._readied(tables)
        if call is None:
            if self._own_handle is None:
                with tf.device(COORDINATOR_CPU):
                    self._own_handle = self._keep(tf.constant(OPEN_LANE))
            return self._own_handle
        if call.lanes.handle is None:
            call.lanes.handle = self._keep(tf.constant(call.lanes.counted))
        return call.lanes.handle

    def ticket(self, tables: LookupTables) -> tf.Tensor:
        """Return the packed ticket of this thread's call, and make its worker ready."""
        call = self._readied(tables)
        if call is None:
            ticket = CallTicket(OPEN_LANE, 1, (0,) * self._num_ps)
        else:
            ticket = CallTicket(call.lanes.numbered, call.number, call.applied)
        # Made here, it is sent with the call; made on the worker, it would need another request.
        with tf.device(COORDINATOR_CPU):
            return tf.constant(ticket.to_bytes())

    def _readied(self, tables: LookupTables) -> _Call | None:
        """Copy lookup tables to the worker of this thread's call, and return the call.

        On the coordinator, copy them there and return None.
        """
        call = None if _compat.get_current_dispatch_context() is None else self._state.call
        if call is None:
            tables.bring()
        else:
            self._bring(tables, call.lanes.worker)
        return call

    def _bring(self, tables: LookupTables, worker: int) -> None:
        """Fill the copies of lookup tables on a worker, once in its generation."""
        generation = self._host.membership.generation(worker)
        known = self._brought.get(worker)
        if known is None or known[0] != generation:
            known = self._brought[worker] = generation, weakref.WeakSet()
        if tables not in known[1]:
            tables.bring()
            known[1].add(tables)

    def fail(self) -> int:
        """Count the applied pushes of this thread's failed call; no more are applied from now on.

        Call when it has failed, and before it is retried. Return how often it has failed, 0 if
        that is not known.
        """
        call, self._state.call = self._state.call, None
        if call is None:
            return 0
        if self._lanes.get(call.lanes.worker) is call.lanes:
            del self._lanes[call.lanes.worker]
        try:
            self._count_applied(call)
        finally:
            self._give_back(call.lanes)
        closure = call.closure()
        if closure is None:
            return 0
        self._num_failed[closure] = self._num_failed.get(closure, 0) + 1
        return self._num_failed[closure]

    def _count_applied(self, call: _Call) -> None:
        """Close the lanes of a failed call, and note which of its pushes were applied."""
        lanes, fences = call.lanes, self._host.extended.fences
        closure = call.closure()
        # If a ps is lost, the training ends, so nothing is applied twice.
        with contextlib.suppress(tf.errors.OpError):
            in_all = fences.close_lane(lanes.counted, self._devices)
            of_call = fences.close_call(lanes.numbered, call.number, self._devices)
            # A concrete function has no twin: all of it is retried.
            if closure is not None and self._made_of[closure] is not None:
                self._applied[closure] = tuple(
                    before + counted - done + numbered
                    for before, counted, done, numbered in zip(
                        call.applied, in_all, lanes.done, of_call, strict=True
                    )
                )

    def _use_twin(self, closure: Any) -> None:
        """Make a closure call the twin of its function, which leaves out the applied pushes."""
        parts = self._made_of[closure]
        assert parts is not None
        function = parts.function
        if function not in self._twins:
            self._twins[function] = tf.function(function.python_function)
        # The closure stays the same, since users hold its `RemoteValue`.
        twin = object.__new__(_compat.Closure)
        with self._redoing(), outside_replica(), self._host.strategy.scope():
            replace(parts, function=self._twins[function]).make(twin)
        closure._function = twin._function

    @contextlib.contextmanager
    def _redoing(self) -> Iterator[None]:
        self._state.redone = PushCounts(self._num_ps)
        try:
            yield
        finally:
            self._state.redone = None


def _keep(lane: tf.Tensor) -> tf.Tensor:
    """Return the handle of a variable on the worker that holds a lane."""
    with tf.device("CPU:0"):
        handle = anonymous_handle(tf.TensorShape([]), tf.int32)
    tf.raw_ops.AssignVariableOp(resource=handle, value=lane)
    return handle
