"""Runs the session of a worker, and cleans up after one that failed."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.inputs import Input
from kerasps.runtime.calls import drain
from kerasps.runtime.errors import absent_ps_error, comes_from
from kerasps.step import TracedStep
from kerasps.training.calls.coordinator_port import CoordinatorPort
from kerasps.training.calls.session_failures import (
    SessionFailures,
    Verdict,
    in_short,
    loses_workers_error,
    may_be_loss,
)
from kerasps.training.calls.worker_recovery import TryAgain, WorkerAbsent
from kerasps.training.contract.host import HostOfWorkers
from kerasps.training.epoch.epoch_events import SessionBegan, SessionEnded, WorkerEnd, WorkerEnded
from kerasps.training.sessions.channel import EpochChannel, Mailbox, Sessions
from kerasps.training.sessions.session import (
    EXECUTIONS_AHEAD,
    Session,
    WorkerSource,
    first_error,
    sending_through,
)
from kerasps.training.sessions.worker_lanes import WorkerLanes
from kerasps.variables.lanes.flights import aboard
from kerasps.variables.storage.names import NAMES

_LOGGER = logging.getLogger("kerasps")


class SessionRunner:
    """Runs sessions, each from its beginning to its end, in its worker's thread.

    When a session fails and the error may mean a loss, the runner closes its lane and tells the
    state. After other errors it calls `stop_waiting_for` of the update rule. Then it asks for a new
    session if that may help; otherwise the flight ends in the session's error.
    """

    def __init__(
        self,
        host: HostOfWorkers,
        *,
        channel: EpochChannel,
        function: TracedStep,
        inputs: Input,
        lanes: WorkerLanes,
        kind: type[Session],
    ) -> None:
        self._host = host
        self._membership = host.membership
        self._failures = SessionFailures(host.membership)
        self._channel = channel
        self._function = function
        self._inputs = inputs
        self._lanes = lanes
        self._kind = kind

    def begin_epoch(self) -> None:
        """Forget the failures of earlier epochs."""
        self._failures.begin_epoch()

    @aboard()  # to the end: what follows a failure calls tasks, too
    def run(self, sources: dict[int, WorkerSource], sessions: Sessions) -> None:
        """Carry out the state's commands on one worker. Thread: that worker's, on its device.

        Args:
            sources: the open iterators of each worker; an entry for this worker is added if there
                is none.

        Raises:
            WorkerAbsent: the worker is lost, or has left.
            TryAgain: the session failed, and the worker answers.
        """
        worker = CoordinatorPort.worker_index()
        if sessions.is_over:
            return
        if not self._membership.has_worker(worker):
            raise WorkerAbsent
        source = WorkerSource.of(sources, worker, self._membership.generation(worker))
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
                self._kind.executions_ahead > 1, in_flight_nodes_limit=EXECUTIONS_AHEAD
            )
            session = self._kind(
                worker,
                source,
                self._function,
                self._inputs,
                executor=executor,
                lanes=self._lanes,
                post=post,
                on_success=self._failures.forget,
            )
            with sending_through(executor):
                session.run(mailbox, lambda: sessions.is_over)
        except BaseException as exc:
            error = first_error(executor, exc)
            self._end_failed(worker, source, sessions, mailbox, executor, error)
        else:
            try:
                post(SessionEnded(worker))
            finally:
                sessions.remove_session(mailbox)
            if not sessions.is_over:
                raise WorkerAbsent  # the worker has left

    def _end_failed(
        self,
        worker: int,
        source: WorkerSource,
        sessions: Sessions,
        mailbox: Mailbox,
        executor: Any,
        error: BaseException,
    ) -> None:
        """End a session that failed. Raise what makes it start again, if that may help."""
        NAMES.retire()  # calls that were sent to the worker may still run there

        def drain_and_remove() -> None:
            with aboard():
                if executor is not None:
                    drain(executor)
                sessions.remove_session(mailbox)

        # After any error, the results on the worker may be those of executions to retry.
        source.close()
        if not sessions.is_at_work(mailbox):
            # Abandoned, since its call did not return: lane and executions are its successor's.
            threading.Thread(target=drain_and_remove, daemon=True).start()
            return
        executions = self._channel.running.get(worker, [])
        is_loss = may_be_loss(error)
        try:
            # Before the session leaves, since the flight, and with it the epoch, may end then.
            if is_loss:
                sessions.post(mailbox, self._lanes.end(worker, WorkerEnd.FAILED))
            else:
                with contextlib.suppress(tf.errors.OpError):  # a ps is lost, and the flight fails
                    self._function.rule.stop_waiting_for(self._lanes.lane(worker))
                self._fail(worker, sessions, error)
        finally:
            threading.Thread(target=drain_and_remove, daemon=True).start()
        if not is_loss:
            return
        match self._failures.verdict(error, worker, executions):
            case Verdict.FAIL:
                self._fail(worker, sessions, error)
            # A flight that is over, or ends in an error, needs no session.
            case Verdict.TRY_AGAIN if not (sessions.is_over or sessions.has_failed):
                _LOGGER.warning(
                    f"{self._membership.name_of(worker)} failed but answers: its session starts "
                    f"again ({in_short(error)})."
                )
                raise TryAgain from None
            case Verdict.LOSES_WORKERS:
                name = self._membership.name_of(worker)
                sessions.fail(loses_workers_error(name, executions, in_short(error)))
                raise WorkerAbsent from None
            case Verdict.WORKER_IS_ABSENT:
                raise WorkerAbsent from None

    def _fail(self, worker: int, sessions: Sessions, error: BaseException) -> None:
        if self._membership.lost_ps is not None:
            error = absent_ps_error(self._host, self._membership.lost_ps)
        comes_from(error, worker)
        sessions.fail(error)
