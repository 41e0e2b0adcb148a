"""Keeps executions of an epoch in flight, in sessions of the `ClusterCoordinator`.

The coordinator schedules a *session* per worker and flight. It carries out the commands of the
epoch's state until the flight is over, so an execution costs the coordinator just one call. When a
worker is lost, its session fails, the state sends its executions to others, and the session starts
again when the worker is back.

Three kinds of thread use the epoch's state. `fit`'s thread asks for steps and waits for reports
(`Dispatcher`). The flight's thread starts sessions and waits until all have ended
(`SessionFlights`). Each worker has a thread for its session (`SessionRunner`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kerasps.errors import KeraspsError
from kerasps.training.calls.coordinator_port import CoordinatorPort
from kerasps.training.contract.dispatching import Dispatching
from kerasps.training.contract.host import HostOfWorkers, LoopSteps
from kerasps.training.contract.metrics import MetricTotals
from kerasps.training.epoch.admission import choose_admission
from kerasps.training.epoch.epoch_events import (
    EpochBegan,
    Execution,
    PassBegan,
    Report,
    SplitPosition,
    StepsAsked,
)
from kerasps.training.epoch.epoch_state import EpochState
from kerasps.training.epoch.worker_state import WorkerActivity
from kerasps.training.sessions.channel import EpochChannel
from kerasps.training.sessions.report_wait import ReportWait
from kerasps.training.sessions.session import CollectingSession, ReturningSession
from kerasps.training.sessions.session_flights import SessionFlights
from kerasps.training.sessions.session_runner import SessionRunner
from kerasps.training.sessions.worker_lanes import WorkerLanes
from kerasps.variables.storage.names import NAMES


class Dispatcher(Dispatching):
    """Sends executions to workers and reports their results (see `Dispatching`)."""

    def __init__(self, host: HostOfWorkers, steps: LoopSteps) -> None:
        self._host = host
        self._membership = host.membership
        self._function = function = steps.function
        self._inputs = inputs = steps.inputs
        port = CoordinatorPort(host.coordinator)
        kind = CollectingSession if steps.collect_interval > 0 else ReturningSession
        self._state = EpochState(
            port.num_workers,
            # A worker that was lost before cannot read its split of the input.
            lost=self._membership.absent_workers & {*range(port.num_workers)},
            executions_ahead=kind.executions_ahead,
            collect_interval=steps.collect_interval,
            admission=choose_admission(function.rule.admission(function.plans.batches_per_step)),
        )
        self._channel = EpochChannel(self._state)
        lanes = WorkerLanes(
            host.extended.fences,
            function.devices,
            host.staleness_meter,
            on_close=function.rule.stop_waiting_for,
        )
        self._runner = SessionRunner(
            host,
            channel=self._channel,
            function=function,
            inputs=inputs,
            lanes=lanes,
            kind=kind,
        )
        self._flights = SessionFlights(
            host,
            port=port,
            channel=self._channel,
            function=function,
            lanes=lanes,
            runner=self._runner,
        )
        self._reports = ReportWait(self._channel, self._membership)
        self._is_suspended = self._is_suspending = False
        self._backlog: deque[Report] = deque()

    @property
    def num_workers(self) -> int:
        return int(self._membership.num_workers)

    @property
    def may_send_more(self) -> bool:
        if not self._function.devices:
            return True  # steps that change nothing
        # Longer executions of several workers overlap more, which makes updates staler. Users ask
        # for that by `steps_per_execution`.
        is_alone = self.num_workers == 1 and not self._function.rule.waits
        return is_alone and self._host.options.max_staleness is None

    @property
    def num_in_flight(self) -> int:
        return self._channel.num_in_flight

    @property
    def is_at_end(self) -> bool:
        return self._state.splits.all_given_out

    @property
    def positions(self) -> list[SplitPosition]:
        return self._state.splits.positions

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    @property
    def is_dealt_evenly(self) -> bool:
        return self._channel.is_dealt_evenly

    def activities(self) -> dict[int, WorkerActivity]:
        return self._channel.activities()

    # Epochs

    def make_sources(self, epoch: int, *, must_end: bool) -> None:
        self._inputs.start_pass(epoch, must_end=must_end)
        self.begin_resumed(())

    def begin_resumed(self, positions: Sequence[SplitPosition]) -> None:
        self._channel.post(PassBegan(self._inputs.num_splits, tuple(positions)))
        self._flights.begin_pass()

    def hold(self) -> threading.Lock:
        """Return a lock to hold, in a `with` statement, from `start_epoch` to the epoch's end.

        Steps run only while it is held. Python releases it when `fit` ends in any way.
        """
        return self._flights.hold()

    def start_epoch(self) -> None:
        """Start the workers' sessions."""
        self._channel.post(EpochBegan())
        self._runner.begin_epoch()
        self._backlog.clear()
        self._take_off()

    def send(self, execution: Execution) -> None:
        """Queue an execution for any worker, and start the sessions again after `suspend`."""
        self._check_suspended()
        self._fly_again()
        self._channel.post(StepsAsked(execution))

    def finish_if_done(self, *, all_asked: bool) -> bool:
        self._check_suspended()
        return not self._backlog and self._channel.finish_if_done(all_asked=all_asked)

    def wait(self) -> Report:
        """Return the next report.

        Raises:
            PSLostError: a ps is lost, and with it its variables.
            WorkerLostError: no worker has answered for KERASPS_WORKER_TIMEOUT seconds (600).
            Exception: the error of `train_step` or of the input pipeline on a worker.
        """
        self._check_suspended()
        if self._backlog:
            return self._backlog.popleft()
        self._fly_again()
        return self._next_report()

    def suspend(self) -> None:
        """Wait for what is in flight and end the sessions, so that no step changes variables.

        `wait` returns the reports of this time later. The next `send` starts the sessions again,
        and so does the next `wait` that has no report.
        """
        # After an interrupt at the end of a callback, `fit` may have ended before this call.
        if self._is_suspended or not self._flights.is_held:
            return
        self._is_suspending = True
        while not self._channel.finish_if_done(all_asked=True):
            self._backlog.append(self._next_report())
        self._flights.land()
        self._is_suspended = True
        self._is_suspending = False

    def finish_epoch(self, totals: MetricTotals) -> None:
        """End the sessions; executions that no worker could do are dropped."""
        del totals  # they include the results of all workers already
        self._flights.land()

    def abandon(self) -> None:
        NAMES.retire()
        self._flights.abandon()

    def _check_suspended(self) -> None:
        if self._is_suspending:
            raise KeraspsError(
                "A callback caught what interrupted it while the steps in flight were waited for, "
                "so it is not known which of them are done. Expected: an interrupt that ends "
                "`fit`. Received: a callback that goes on. Let it through."
            )

    def _next_report(self) -> Report:
        return self._reports.next(self._look)

    def _look(self) -> None:
        """Raise the error of the flight, and make the traces that its sessions wait for."""
        self._flights.check()
        self._function.plans.trace_awaited()

    def _fly_again(self) -> None:
        if self._is_suspended:
            self._take_off()

    def _take_off(self) -> None:
        self._is_suspended = False
        self._flights.take_off()
