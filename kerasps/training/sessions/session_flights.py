"""The flights of an epoch, in which one session runs for each worker."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import tensorflow as tf

from kerasps.errors import ClusterClosedError, PSLostError
from kerasps.runtime.errors import absent_ps_error, lost_ps, translated_errors
from kerasps.step import TracedStep
from kerasps.training.calls.coordinator_port import CoordinatorPort
from kerasps.training.contract.host import HostOfWorkers
from kerasps.training.sessions.channel import EpochChannel, Sessions
from kerasps.training.sessions.session import WorkerSource
from kerasps.training.sessions.session_runner import SessionRunner
from kerasps.training.sessions.worker_lanes import WorkerLanes
from kerasps.training.sessions.worker_watch import WorkerWatch
from kerasps.variables.lanes.flights import Flight

# The interval at which an ending flight checks for lost tasks; the end of a session wakes it.
_POLL_S = 0.1
# When an epoch ends in an error, it waits this long for running executions. Afterwards, they are
# given up: none of their updates is applied any more.
_ABANDON_S = 10.0
# When a worker has failed, the executions of others get this long before they are cancelled: a
# cancelled one may have pushed to one ps and not to another.
_DRAIN_S = 2.0


class SessionFlights:
    """Begins and ends the flights of an epoch, one at a time, and keeps the workers' iterators.

    In its thread, a flight copies small variables to where steps use them and starts a session for
    each worker, also for one that joins later. When it is over, it waits until no session has
    anything in flight on a worker, and copies the variables back. It fails if a ps is lost.

    Contract: call `hold` and `take_off`, then `check` repeatedly, then `land` or `abandon`.
    Thread: `fit`'s.
    """

    def __init__(
        self,
        host: HostOfWorkers,
        *,
        port: CoordinatorPort,
        channel: EpochChannel,
        function: TracedStep,
        lanes: WorkerLanes,
        runner: SessionRunner,
    ) -> None:
        self._host = host
        self._membership = host.membership
        self._port = port
        self._channel = channel
        self._function = function
        self._lanes = lanes
        self._runner = runner
        self._owner = threading.Lock()
        self._flight: Flight | None = None
        self._sessions = Sessions(channel, host.membership)
        # The open iterators of each worker in the current pass.
        self._sources: dict[int, WorkerSource] = {}

    def hold(self) -> threading.Lock:
        """Return a lock to hold, in a `with` statement, for as long as there are flights.

        Steps run only while it is held. Python releases it when `fit` ends in any way.
        """
        self._owner = threading.Lock()
        return self._owner

    @property
    def is_held(self) -> bool:
        """True while the lock that `hold` returned last is held."""
        return self._owner.locked()

    def begin_pass(self) -> None:
        """Drop the workers' iterators, since a new pass over the data begins.

        Sessions that run keep theirs, and the results beside them, until they open the next.
        """
        if not self.is_held:
            self._sources = {}

    def take_off(self) -> None:
        """Begin a flight. Call while the lock that `hold` returned is held."""
        self._sessions = Sessions(self._channel, self._membership)
        fly = functools.partial(self._fly, self._sessions, self._sources)
        self._flight = Flight(self._owner, fly, self._sessions.holders)
        self._flight.start()

    def land(self) -> None:
        """End the flight, wait until it has landed, and raise its error, if it has one."""
        if self._flight is not None:
            self._flight.end()
            self._flight.wait()
            if self._flight.error is not None:
                with translated_errors(self._host):
                    raise self._flight.error

    def check(self) -> None:
        """Raise the error of the flight, if it has one.

        If the flight landed without an error, though nobody ended it, start another: executions
        are pending in the state.
        """
        if self._flight is None:
            return
        if self._flight.has_landed or self._sessions.error is not None:
            self.land()
            self.take_off()

    def abandon(self) -> None:
        """End the flight after an error of the epoch. Later errors are ignored."""
        if self._flight is not None:
            self._flight.end()
            # Errors from now on add nothing to the one that ended the epoch.
            self._flight.wait(_ABANDON_S)

    def _fly(self, sessions: Sessions, sources: dict[int, WorkerSource], flight: Flight) -> None:
        """Run sessions until the flight is over and all have ended. Thread: the flight's."""
        sessions.wake = flight.wake
        # Bound, since the coordinator would copy an argument that is a dictionary.
        session = functools.partial(self._runner.run, sources, sessions)
        self._function.load()
        try:
            with self._port.cancellable_calls() as cancellation, self._membership.in_use():
                start = functools.partial(
                    self._port.start, self._port.cancellable(cancellation, session)
                )
                watch = WorkerWatch(
                    self._port, self._membership, self._channel, sessions, self._lanes, start=start
                )
                try:
                    watch.start_all()
                    flight.wait_until_over(
                        lambda: self._watch(sessions, watch),
                        lambda: sessions.has_failed,
                    )
                finally:
                    sessions.end()
                    self._wait_until_idle(flight, sessions, watch, cancellation)
        finally:
            try:
                # Each ps applies its buffered pushes without waiting for missing ones.
                for lane in self._lanes.all:
                    self._function.rule.stop_waiting_for(lane)
                self._function.store()
            except tf.errors.OpError:
                # `sessions.error` is the cause, and is raised below.
                if sessions.error is None:
                    raise
        if sessions.error is not None:
            raise sessions.error

    def _watch(self, sessions: Sessions, watch: WorkerWatch) -> None:
        """Act on workers that join, are lost or leave; fail the flight when a ps is lost."""
        watch.update()
        if self._membership.lost_ps is not None and not sessions.has_failed:
            sessions.fail(absent_ps_error(self._host, self._membership.lost_ps))

    def _wait_until_idle(
        self, flight: Flight, sessions: Sessions, watch: WorkerWatch, cancellation: Any
    ) -> None:
        """Wait until nothing is in flight on workers; cancel it some time after a failure."""
        ended_at, failed_at = time.monotonic(), None
        while not sessions.wait_until_idle(_POLL_S):
            self._watch(sessions, watch)
            if sessions.has_failed:
                failed_at = failed_at or time.monotonic()
                assert sessions.error is not None
                is_ps_lost = (
                    isinstance(sessions.error, PSLostError | ClusterClosedError)
                    or lost_ps(sessions.error) is not None
                )
                is_late = time.monotonic() > failed_at + _DRAIN_S
                if is_ps_lost or is_late:
                    cancellation.start_cancel()
                if is_late and self._membership.lost_ps is not None:
                    # A worker does not cancel calls that wait for a ps that hangs.
                    watch.give_up_all()
            elif flight.is_abandoned and time.monotonic() > ended_at + _ABANDON_S:
                # With closed lanes, a cancelled execution cannot push to one ps and not to another.
                watch.close_lanes()
                cancellation.start_cancel()
                if not sessions.wait_until_idle(_DRAIN_S):
                    watch.give_up_all()
