"""Keeps executions of an epoch in flight, in sessions of the `ClusterCoordinator`.

What the coordinator schedules is a *session*: one per worker and flight, which carries out the
commands of the epoch's state until the flight is over. So an execution costs the coordinator a call
and nothing beside it. When a worker is lost, its session fails, the state sends its executions to
others, and the session is started again when the worker is back.

Three kinds of thread meet here: `fit`'s, which asks for steps and waits for reports; the flight's,
which starts sessions and sees to it that none is left; and one per worker, for its session.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.errors import ClusterClosedError, KeraspsError, PSLostError, WorkerLostError
from kerasps.inputs import Input
from kerasps.runtime.errors import absent_ps_error, comes_from, lost_ps, translated_errors
from kerasps.runtime.supervision import tell_supervisor
from kerasps.step import TracedStep
from kerasps.training.calls.coordinator_port import CoordinatorPort
from kerasps.training.calls.session_failures import SessionFailures, Verdict, in_short, may_be_loss
from kerasps.training.calls.worker_recovery import TryAgain, WorkerAway
from kerasps.training.contract.host import HostOfWorkers
from kerasps.training.contract.metrics import MetricTotals
from kerasps.training.epoch.admission import choose_admission
from kerasps.training.epoch.epoch_events import (
    EpochBegan,
    Execution,
    PassBegan,
    Report,
    SessionBegan,
    SessionEnded,
    SplitPosition,
    StepsAsked,
    WorkerEnd,
    WorkerEnded,
)
from kerasps.training.epoch.epoch_state import EpochState
from kerasps.training.sessions.channel import EpochChannel, Mailbox, Sessions
from kerasps.training.sessions.session import (
    EXECUTIONS_AHEAD,
    Session,
    WorkerSource,
    drain,
    first_error,
    sending_through,
)
from kerasps.training.sessions.worker_lanes import WorkerLanes
from kerasps.training.sessions.worker_watch import Tending
from kerasps.variables.flights import Flight, aboard, worker_timeout
from kerasps.variables.names import NAMES

_LOGGER = logging.getLogger("kerasps")

# How often a wait looks whether the coordinator has failed; only failures wait for it, results do
# not.
_POLL_S = 0.1
_WARN_AFTER_S = 10.0
# When nothing has come back for so long though something is out, one line says what; the next says
# it after twice the time.
_SAY_AFTER_S = 30.0
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
        host: of the strategy whose workers do them.
        function: the step that executions do.
        inputs: the data.
        collect_interval: seconds for which a worker may hold what its executions add up to. 0 has
            each execution return its own result, which costs as much as a small execution itself.
    """

    def __init__(
        self,
        host: HostOfWorkers,
        function: TracedStep,
        inputs: Input,
        *,
        collect_interval: float,
    ) -> None:
        self._host = host
        self._port = CoordinatorPort(host.coordinator)
        self._membership = host.membership
        self._function = function
        self._inputs = inputs
        self._keeps_totals = collect_interval > 0
        max_ahead = None
        max_staleness = host.options.max_staleness
        if max_staleness and function.devices:
            max_ahead = max_staleness * function.plans.batches_per_step
        self._state = EpochState(
            self._port.num_workers,
            # A worker that was lost before is not there to read its split of the input.
            lost=self._membership.absent_workers & {*range(self._port.num_workers)},
            # Where each result is waited for, there is nothing to send ahead.
            executions_ahead=EXECUTIONS_PER_WORKER if self._keeps_totals else 1,
            collect_interval=collect_interval,
            # Who changes nothing waits for nobody.
            admission=choose_admission(
                max_ahead=max_ahead, joins=function.joins, num_backups=function.num_backups
            ),
        )
        self._channel = EpochChannel(self._state)
        self._sessions = Sessions(self._channel, self._name_of)
        self._failures = SessionFailures(self._membership)
        self._lanes = WorkerLanes(
            host.extended.fences,
            function.devices,
            host.staleness_meter,
            on_close=function.leave,
        )
        self._owner = threading.Lock()
        self._flight: Flight | None = None
        self._is_suspended = self._is_suspending = False
        self._backlog: deque[Report] = deque()
        self._timeout = worker_timeout()
        # What each worker has open, in the pass that there is.
        self._sources: dict[int, WorkerSource] = {}

    @property
    def num_workers(self) -> int:
        """The workers that executions are for."""
        return int(self._membership.num_workers)

    @property
    def may_send_more(self) -> bool:
        """Whether an execution may have more steps than the model is compiled for."""
        if not self._function.devices:
            return True  # steps that change nothing
        # Steps of several workers that follow each other faster overlap more, and so are staler:
        # that is for `steps_per_execution` to ask for.
        is_alone = self.num_workers == 1 and not self._function.joins
        return is_alone and self._host.options.max_staleness is None

    @property
    def num_in_flight(self) -> int:
        """The executions that were sent and are not done."""
        return self._channel.num_in_flight

    @property
    def is_at_end(self) -> bool:
        """Whether data of known length were read to their end: the next epoch needs a new pass."""
        return self._state.splits.all_given_out

    @property
    def positions(self) -> list[SplitPosition]:
        """Where each split of the input stands, and each part of one. Call when suspended."""
        return self._state.splits.positions

    @property
    def has_backlog(self) -> bool:
        """Whether there are reports that `suspend` has kept for `wait`."""
        return bool(self._backlog)

    @property
    def is_dealt_evenly(self) -> bool:
        """Whether each worker has its part of the next synchronous updates, and no more is due."""
        return self._channel.is_dealt_evenly

    # Epochs

    def make_sources(self, epoch: int, *, must_end: bool) -> None:
        """Begin a pass over the data with `epoch`.

        Args:
            epoch: the number of the epoch.
            must_end: whether data that never end are an error.
        """
        self._inputs.start_pass(epoch, must_end=must_end)
        self.begin_resumed(())

    def begin_resumed(self, positions: Sequence[SplitPosition]) -> None:
        """Begin where the pass of the input stands, which `Input.resume_pass` was called for.

        Args:
            positions: what `positions` was before.
        """
        self._channel.post(PassBegan(self._inputs.num_splits, tuple(positions)))
        self._sources = {}

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
        self._fly_again()
        self._channel.post(StepsAsked(execution))

    def settle(self, *, all_asked: bool) -> bool:
        """Return whether `wait` would wait in vain, since nothing that was sent is still due."""
        self._check_suspended()
        return not self._backlog and self._channel.settle(all_asked=all_asked)

    def wait(self) -> Report:
        """Return the next report.

        Raises:
            PSLostError: a ps is gone, and with it the variables on it.
            WorkerLostError: no worker has been there for KERASPS_WORKER_TIMEOUT seconds (600).
            Exception: what `train_step` or the input pipeline raised on a worker.
        """
        self._check_suspended()
        if self._backlog:
            return self._backlog.popleft()
        self._fly_again()
        return self._next_report()

    def suspend(self) -> None:
        """Wait for what is in flight and end the sessions: the variables rest, workers are free.

        What comes back meanwhile waits for `wait`. The next `send` starts the sessions again, and
        so does the next `wait` that waits.
        """
        # After an interrupt at the end of a callback, this may be called when `fit` is gone.
        if self._is_suspended or not self._owner.locked():
            return
        self._is_suspending = True
        while not self._channel.settle(all_asked=True):
            self._backlog.append(self._next_report())
        self._land()
        self._is_suspended = True
        self._is_suspending = False

    def finish_epoch(self, totals: MetricTotals) -> None:
        """End the sessions; executions that no worker could do are dropped."""
        del totals  # of all workers already
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
        began = waiting_since = time.monotonic()
        has_warned = False
        say_after = _SAY_AFTER_S
        while True:
            with contextlib.suppress(queue.Empty):
                return self._channel.reports.get(timeout=_POLL_S)
            self._check_flight()
            self._function.plans.trace_awaited()
            lost = self._channel.lost_workers | self._membership.absent_workers
            # Nothing can come while all workers are gone.
            if len(lost) < self._membership.num_workers:
                waiting_since = time.monotonic()
                if waiting_since - began > say_after:
                    say_after *= 2
                    _LOGGER.warning(self._out_text(waiting_since - began))
                    if _LOGGER.isEnabledFor(logging.DEBUG):  # the text is long
                        _LOGGER.debug(self._channel.history())
                continue
            waited = time.monotonic() - waiting_since
            if waited > _WARN_AFTER_S and not has_warned:
                has_warned = True
                warnings.warn(self._waiting_text(waited), stacklevel=2)
            if waited > self._timeout:
                tell_supervisor("lost", "worker", min(lost))
                raise WorkerLostError(self._waiting_text(waited))

    def _waiting_text(self, waited: float) -> str:
        lost = self._channel.lost_workers | self._membership.absent_workers
        gone = ", ".join(f"worker {i}" for i in sorted(lost))
        return (
            f"No worker has taken a step for {waited:.0f} s: {gone} went away and did not come "
            f"back. Expected: at least one worker that answers within {self._timeout:.0f} s. "
            "Restart a worker at its address (it goes on by itself), or set KERASPS_WORKER_TIMEOUT "
            "to wait longer."
        )

    def _out_text(self, waited: float) -> str:
        out = "; ".join(
            f"{self._name_of(worker)}: {len(executions)} executions of "
            f"{sum(e.num_steps for e in executions)} steps"
            for worker, executions in self._channel.running.items()
        )
        return (
            f"Nothing has come back for {waited:.0f} s. Out: {out or 'what workers hold'}. All "
            "tasks answer, so these steps may just be long, or wait for something."
        )

    def _name_of(self, worker: int) -> str:
        return f"worker {worker} at {self._membership.address(('worker', worker))}"

    # Flights

    def _fly_again(self) -> None:
        if self._is_suspended:
            self._take_off()

    def _take_off(self) -> None:
        self._is_suspended = False
        self._sessions = Sessions(self._channel, self._name_of)
        fly = functools.partial(self._fly, self._sessions, self._sources)
        self._flight = Flight(self._owner, fly, self._sessions.holders)
        self._flight.start()

    def _land(self) -> None:
        """End the flight, and raise what it ended in."""
        if self._flight is not None:
            self._flight.end()
            self._flight.wait()
            if self._flight.error is not None:
                with translated_errors(self._host):
                    raise self._flight.error

    def _check_flight(self) -> None:
        """Raise what the flight ended in.

        One that landed without an error, though nobody ended it, is followed by another: the state
        still knows what is due.
        """
        if self._flight is None:
            return
        if self._flight.has_landed or self._sessions.error is not None:
            self._land()
            self._take_off()

    def _fly(self, sessions: Sessions, sources: dict[int, WorkerSource], flight: Flight) -> None:
        """Have sessions run until the flight is over, and none is left. Thread: the flight's."""
        sessions.wake = flight.wake
        # Bound, since the coordinator makes a copy of an argument that is a dictionary.
        session = functools.partial(self._session, sources, sessions)
        start = functools.partial(self._port.start, session)
        tending = Tending(
            self._port, self._membership, self._channel, sessions, self._lanes, start=start
        )
        self._function.load()
        try:
            with self._port.cancellable_calls() as cancellation, self._membership.in_use():
                try:
                    tending.start_all()
                    flight.wait_until_over(
                        lambda: self._look_after(sessions, tending),
                        lambda: sessions.has_failed,
                    )
                finally:
                    sessions.end()
                    self._wait_until_idle(sessions, tending, cancellation)
        finally:
            try:
                # What is set aside on a ps is applied, whoever was still waited for.
                for lane in self._lanes.all:
                    self._function.leave(lane)
                self._function.store()
            except tf.errors.OpError:
                # What it fails of is told already.
                if sessions.error is None:
                    raise
        if sessions.error is not None:
            raise sessions.error

    def _look_after(self, sessions: Sessions, tending: Tending) -> None:
        """See to workers that come and go; have the flight fail when a ps is lost."""
        tending.tend()
        if self._membership.lost_ps is not None and not sessions.has_failed:
            sessions.fail(absent_ps_error(self._host, self._membership.lost_ps))

    def _wait_until_idle(self, sessions: Sessions, tending: Tending, cancellation: Any) -> None:
        """Wait for what is on the workers; where something failed, cancel it in the end."""
        failed_at: float | None = None
        while not sessions.wait_until_idle(_POLL_S):
            self._look_after(sessions, tending)
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
                    # A worker does not cancel what waits for a ps that hangs.
                    tending.give_up_all()

    # Sessions

    def _session(self, sources: dict[int, WorkerSource], sessions: Sessions) -> None:
        """Carry out the state's commands on one worker. Thread: that worker's, on its device."""
        worker = self._port.worker_index()
        if sessions.is_over:
            return
        if not self._membership.has_worker(worker):
            raise WorkerAway
        source = sources.setdefault(worker, WorkerSource())
        source.belongs_to(self._membership.generation(worker))
        ended: WorkerEnded | None = None
        if not source.is_open and self._channel.holds_results(worker):
            ended = self._lanes.end(worker, WorkerEnd.RESTARTED)
        source.devices = self._host.devices_of(worker)
        self._function.plans.await_trace(source.devices, lambda: sessions.is_over)
        replicas = self._function.plans.num_replicas(source.devices)
        mailbox = sessions.enter(SessionBegan(worker, source.is_open, ended, replicas))
        if mailbox is None:
            return
        post = functools.partial(sessions.post, mailbox)
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
                post=post,
                on_success=self._failures.forget,
            )
            with aboard(), sending_through(executor):
                session.run(mailbox, lambda: sessions.is_over)
        except BaseException as exc:
            error = first_error(executor, exc)
            self._end_failed(worker, source, sessions, mailbox, executor, error)
        else:
            try:
                post(SessionEnded(worker))
            finally:
                sessions.leave(mailbox)
            if not sessions.is_over:
                raise WorkerAway  # it has left

    def _end_failed(
        self,
        worker: int,
        source: WorkerSource,
        sessions: Sessions,
        mailbox: Mailbox,
        executor: Any,
        error: BaseException,
    ) -> None:
        """End a session that failed. Raises what has it started again, where that may help."""
        NAMES.retire()  # what was sent to the worker may still run there

        def leave() -> None:
            if executor is not None:
                drain(executor)
            sessions.leave(mailbox)

        # Whatever failed, what the worker holds cannot be told from what it is about to do again.
        source.close()
        is_loss = may_be_loss(error)
        try:
            # Before the session leaves: the flight may land then, and with it the epoch.
            if is_loss:
                sessions.post(mailbox, self._lanes.end(worker, WorkerEnd.FAILED))
            else:
                with contextlib.suppress(tf.errors.OpError):  # a ps is lost, and all with it
                    self._function.leave(self._lanes.lane(worker))
                self._fail(worker, sessions, error)
        finally:
            threading.Thread(target=leave, daemon=True).start()
        if not is_loss:
            return
        match self._failures.verdict(error, worker):
            case Verdict.FAIL:
                self._fail(worker, sessions, error)
            case Verdict.TRY_AGAIN:
                _LOGGER.warning(
                    f"{self._name_of(worker)} failed and is there: it begins again "
                    f"({in_short(error)})."
                )
                if not sessions.is_over:  # else nothing is missed
                    raise TryAgain from None
            case Verdict.WORKER_IS_AWAY:
                raise WorkerAway from None

    def _fail(self, worker: int, sessions: Sessions, error: BaseException) -> None:
        if self._membership.lost_ps is not None:
            error = absent_ps_error(self._host, self._membership.lost_ps)
        error = self._function.error(error)
        comes_from(error, worker)
        sessions.fail(error)
