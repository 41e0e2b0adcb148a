"""Keeps executions of an epoch in flight, in sessions of the `ClusterCoordinator`.

What the coordinator schedules is a *session*: one per worker and flight, which carries out the
commands of the epoch's state until the flight is over. So an execution costs the coordinator a call
and nothing beside it. When a worker is lost, its session fails, the state sends its executions to
others, and TensorFlow's coordinator starts the session again when the worker is back.

Three kinds of thread meet here: `fit`'s, which asks for steps and waits for reports; the flight's,
which starts sessions and sees to it that none is left; and one per worker, for its session.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster import comes_from, lost_ps, translated_errors
from kerasps.errors import KeraspsError, WorkerLostError
from kerasps.inputs import Input
from kerasps.step import TracedStep
from kerasps.training.channel import EpochChannel, Sessions
from kerasps.training.coordinator_port import CoordinatorPort
from kerasps.training.epoch_events import (
    EpochBegan,
    Execution,
    PassBegan,
    Report,
    SessionEnded,
    StepsAsked,
    WorkerGone,
    WorkerLost,
)
from kerasps.training.epoch_state import EpochState
from kerasps.training.lanes import WorkerLanes
from kerasps.training.session import (
    EXECUTIONS_AHEAD,
    Session,
    WorkerSource,
    drain,
    sending_through,
)
from kerasps.training.session_failures import SessionFailures
from kerasps.variables import NAMES, Flight, aboard, uninterrupted, worker_timeout

# How often a wait looks whether the coordinator has failed; only failures wait for it, results do
# not.
_POLL_S = 0.1
_WARN_AFTER_S = 10.0
# When an epoch ends in an error, this long is waited for executions that run; afterwards, whoever
# looks at a variable waits.
_ABANDON_S = 10.0
# When a worker has failed, the executions of others get this long before they are cancelled: cut
# off, one has pushed to one ps and not to another.
_DRAIN_S = 2.0
# Executions in flight per worker: those that it has, and one that is sent when one of them is done.
EXECUTIONS_PER_WORKER = EXECUTIONS_AHEAD + 1


class Dispatcher:
    """Sends executions to workers and reports what comes back, an epoch after the other.

    Contract: `make_sources` before the first epoch of a pass; then, for each epoch, `hold`,
    `start_epoch`, any number of `send` and `wait`, and `finish_epoch`, or `abandon` after an error.
    Thread: `fit`'s.

    Args:
        strategy: the `ParameterServerStrategy`.
        function: the step that executions do.
        inputs: the data.
        collect_interval: seconds for which a worker may hold what its executions add up to. 0 has
            each execution return its own result, which costs as much as a small execution itself.
    """

    def __init__(
        self,
        strategy: Any,
        function: TracedStep,
        inputs: Input,
        *,
        collect_interval: float,
    ) -> None:
        self._strategy = strategy
        self._port = CoordinatorPort(strategy.coordinator)
        self._function = function
        self._inputs = inputs
        self._addresses = strategy.description.jobs["worker"]
        self._keeps_totals = collect_interval > 0
        self._state = EpochState(
            strategy.num_workers,
            # A worker that was lost before is not there to read its split of the input.
            lost=self._port.lost_workers,
            # Where each result is waited for, there is nothing to send ahead.
            executions_ahead=EXECUTIONS_PER_WORKER if self._keeps_totals else 1,
            collect_interval=collect_interval,
        )
        self._channel = EpochChannel(self._state)
        self._sessions = Sessions(self._channel, self._addresses)
        self._failures = SessionFailures()
        self._lanes = WorkerLanes(strategy.extended.fences, function.devices)
        self._owner = threading.Lock()
        self._flight: Flight | None = None
        self._is_suspended = self._is_suspending = False
        self._backlog: deque[Report] = deque()
        self._timeout = worker_timeout()
        self._sources: Any = None

    @property
    def num_in_flight(self) -> int:
        """The executions that were sent and are not done."""
        return self._channel.num_in_flight

    @property
    def is_at_end(self) -> bool:
        """Whether data of known length were read to their end: the next epoch needs a new pass."""
        return self._state.splits.all_given_out

    @property
    def confirmed(self) -> list[int]:
        """Of each split of the input, the batches that were counted. Call when suspended."""
        splits = self._state.splits
        return [splits.confirmed(split) for split in range(len(splits))]

    @property
    def has_backlog(self) -> bool:
        """Whether there are reports that `suspend` has kept for `wait`."""
        return bool(self._backlog)

    # Epochs

    def make_sources(self, epoch: int, *, must_end: bool) -> None:
        """Begin a pass over the data with `epoch`.

        Args:
            epoch: the number of the epoch.
            must_end: whether data that never end are an error.
        """
        self._inputs.start_pass(epoch, must_end=must_end)
        self.begin_resumed(())

    def begin_resumed(self, confirmed: Sequence[int]) -> None:
        """Begin where the pass of the input stands, which `Input.resume_pass` was called for.

        Args:
            confirmed: of each split, the batches that were counted before.
        """
        self._channel.post(PassBegan(self._inputs.num_splits, tuple(confirmed)))
        # An interrupt within TensorFlow's queues leaves them locked.
        self._sources = uninterrupted(lambda: self._port.create_per_worker(_new_source))

    def hold(self) -> threading.Lock:
        """Return a lock to hold, in a `with` statement, from `start_epoch` to the epoch's end.

        Steps run only while it is held: when `fit` is gone, however that came, so is the lock.
        """
        self._owner = threading.Lock()
        return self._owner

    def start_epoch(self) -> None:
        """Start the workers' sessions."""
        self._channel.post(EpochBegan())
        self._backlog.clear()
        self._take_off()

    def send(self, execution: Execution) -> None:
        """Put an execution into flight."""
        self._check_suspended()
        if self._is_suspended:
            self._take_off()
        self._channel.post(StepsAsked(execution))

    def settle(self) -> bool:
        """Return whether `wait` would wait in vain, since nothing that was sent is still due."""
        self._check_suspended()
        return not self._backlog and self._channel.settle()

    def wait(self) -> Report:
        """Return the next report.

        Raises:
            PSLostError: a ps is gone, and with it the variables on it.
            WorkerLostError: no worker has been there for KERASPS_WORKER_TIMEOUT seconds (600).
            Exception: what `train_step` or the input pipeline raised on a worker.
        """
        self._check_suspended()
        return self._backlog.popleft() if self._backlog else self._next_report()

    def suspend(self) -> None:
        """Wait for what is in flight and end the sessions: the variables rest, workers are free.

        What comes back meanwhile waits for `wait`. The next `send` starts the sessions again.
        """
        # After an interrupt at the end of a callback, this may be called when `fit` is gone.
        if self._is_suspended or not self._owner.locked():
            return
        self._is_suspending = True
        while not self._channel.settle():
            self._backlog.append(self._next_report())
        self._land()
        self._is_suspended = True
        self._is_suspending = False

    def finish_epoch(self) -> None:
        """End the sessions; executions that no worker could do are dropped."""
        self._land()

    def abandon(self) -> None:
        """End what is in flight, after an error of the epoch."""
        NAMES.retire()
        if self._flight is not None:
            self._flight.end()
            # What fails now says nothing that the error which ended the epoch does not.
            self._flight.wait(_ABANDON_S)

    def _check_suspended(self) -> None:
        if self._is_suspending:
            raise KeraspsError(
                "A callback caught what interrupted it while the steps in flight were waited for, "
                "so it is not known which of them are done. Expected: an interrupt that ends "
                "`fit`. Received: a callback that goes on. Let it through."
            )

    def _next_report(self) -> Report:
        waiting_since = time.monotonic()
        has_warned = False
        while True:
            with contextlib.suppress(queue.Empty):
                return self._channel.reports.get(timeout=_POLL_S)
            self._check_flight()
            self._note_lost_workers()
            lost = self._channel.lost_workers
            # Nothing can come while all workers are gone.
            if len(lost) < self._strategy.num_workers:
                waiting_since = time.monotonic()
                continue
            waited = time.monotonic() - waiting_since
            if waited > _WARN_AFTER_S and not has_warned:
                has_warned = True
                warnings.warn(self._waiting_text(waited), stacklevel=2)
            if waited > self._timeout:
                raise WorkerLostError(self._waiting_text(waited))

    def _note_lost_workers(self) -> None:
        """Tell the state of workers that were lost to others, such as an `evaluate` in between."""
        for worker in self._port.lost_workers:
            # This lane, and no other that a session may open meanwhile.
            lane = self._lanes.lane(worker)
            if self._channel.awaits(worker):
                self._channel.post(WorkerGone(worker, self._close(lane)))

    def _waiting_text(self, waited: float) -> str:
        gone = ", ".join(f"worker {i}" for i in sorted(self._channel.lost_workers))
        return (
            f"No worker has taken a step for {waited:.0f} s: {gone} went away and did not come "
            f"back. Expected: at least one worker that answers within {self._timeout:.0f} s. "
            "Restart a worker at its address (it goes on by itself), or set KERASPS_WORKER_TIMEOUT "
            "to wait longer."
        )

    # Flights

    def _take_off(self) -> None:
        self._is_suspended = False
        self._note_lost_workers()
        self._sessions = Sessions(self._channel, self._addresses)
        fly = functools.partial(self._fly, self._sessions, self._sources)
        self._flight = Flight(self._owner, fly, self._sessions.holders)
        self._flight.start()

    def _land(self) -> None:
        """End the flight, and raise what it ended in."""
        if self._flight is not None:
            self._flight.end()
            self._flight.wait()
            if self._flight.error is not None:
                with translated_errors(self._strategy):
                    raise self._flight.error

    def _check_flight(self) -> None:
        """Raise what the flight ended in.

        One that landed without an error, though nobody ended it, is followed by another: the state
        still knows what is due.
        """
        if self._flight is None:
            return
        if self._flight.has_landed or self._has_failed(self._sessions):
            self._land()
            self._take_off()

    def _has_failed(self, sessions: Sessions) -> bool:
        return sessions.error is not None or self._port.has_failed

    def _fly(self, sessions: Sessions, sources: Any, flight: Flight) -> None:
        """Have sessions run until the flight is over, and none is left. Thread: the flight's."""
        sessions.wake = flight.wake
        self._function.load()
        try:
            with self._port.cancellable_calls() as cancellation:
                try:
                    for _ in range(self._strategy.num_workers):
                        self._port.start(self._session, sources, sessions)
                    flight.wait_until_over(lambda: self._has_failed(sessions))
                finally:
                    sessions.end()
                    self._wait_until_idle(sessions, cancellation)
        finally:
            self._function.store()
        if sessions.error is not None:
            raise sessions.error

    def _wait_until_idle(self, sessions: Sessions, cancellation: Any) -> None:
        """Wait for what is on the workers; where something failed, cancel it in the end."""
        failed_at: float | None = None
        while not sessions.wait_until_idle(_POLL_S):
            if self._has_failed(sessions):
                failed_at = failed_at or time.monotonic()
                is_ps_lost = sessions.error is None or lost_ps(sessions.error) is not None
                if is_ps_lost or time.monotonic() > failed_at + _DRAIN_S:
                    cancellation.start_cancel()
        try:
            self._port.raise_error()
        except Exception as exc:
            sessions.error = sessions.error or exc

    # Sessions

    def _session(self, source: WorkerSource, sessions: Sessions) -> None:
        """Carry out the state's commands on one worker. Thread: that worker's, on its device."""
        worker = self._port.worker_index()
        applied: tuple[int, ...] = ()
        if not source.is_open and self._channel.holds_results(worker):
            applied = self._close(self._lanes.lane(worker))
        mailbox = sessions.enter(worker, is_open=source.is_open, applied=applied)
        if mailbox is None:
            return
        executor: Any = None
        try:
            executor = _compat.new_executor(
                self._keeps_totals, in_flight_nodes_limit=EXECUTIONS_AHEAD
            )
            session = Session(
                worker,
                source,
                self._function,
                self._inputs,
                executor=executor,
                keeps_totals=self._keeps_totals,
                lanes=self._lanes,
                post=self._channel.post,
                on_success=self._note_success,
            )
            with aboard(), sending_through(executor):
                session.run(mailbox, lambda: sessions.is_over)
        except BaseException as exc:
            self._end_failed(worker, source, sessions, executor, exc)
        else:
            try:
                self._channel.post(SessionEnded(worker))
            finally:
                sessions.leave(worker)

    def _end_failed(
        self,
        worker: int,
        source: WorkerSource,
        sessions: Sessions,
        executor: Any,
        error: BaseException,
    ) -> None:
        """End a session that failed. Raises what has TensorFlow's coordinator start it again."""
        NAMES.retire()  # what was sent to the worker may still run there

        def leave() -> None:
            if executor is not None:
                drain(executor)
            sessions.leave(worker)

        # Whatever failed, what the worker holds cannot be told from what it is about to do again.
        source.close()
        is_loss = self._failures.may_be_loss(error)
        try:
            # Before the session leaves: the flight may land then, and with it the epoch.
            if is_loss:
                self._channel.post(WorkerLost(worker, self._close(self._lanes.lane(worker))))
            else:
                self._fail(worker, sessions, error)
        finally:
            threading.Thread(target=leave, daemon=True).start()
        if not is_loss:
            return
        retry = self._failures.retry(error, worker)
        if retry is None:
            self._fail(worker, sessions, error)
        elif not sessions.is_over:  # else nothing is missed
            raise retry from None

    def _close(self, lane: int) -> tuple[int, ...]:
        """Close a lane; return what was applied in it; () where a ps is lost, and all with it."""
        try:
            return self._lanes.close(lane)
        except tf.errors.OpError:
            return ()

    def _fail(self, worker: int, sessions: Sessions, error: BaseException) -> None:
        comes_from(error, worker)
        sessions.fail(error)

    def _note_success(self, worker: int) -> None:
        self._failures.forget(worker)
        self._port.forget_ps_reports()


def _new_source() -> WorkerSource:
    # Only the session opens a split: TensorFlow calls this for each pass that there was when a
    # worker comes back, also where none goes on.
    return WorkerSource()
