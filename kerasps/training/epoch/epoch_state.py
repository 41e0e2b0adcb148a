"""The state machine of an epoch: events in, commands out, no TensorFlow and no threads.

An *execution* is the order to do a number of steps. It waits in a queue, is sent to a worker, runs
there, and its result is fetched, alone or as a part of a sum. `EpochState` counts each requested
step once, or reports it as missing because the data ended, even if workers are lost meanwhile.
`EpochChannel` passes it the events from all threads, one at a time, and hands its commands to the
threads that carry them out.

    fit's thread            EpochState                       session of worker 1
    StepsAsked     ----->   queued, sent     Send    ----->  runs the step graph
    Report         <-----   done             <-----          ExecutionsDone
                            results due      Collect ----->  fetches what the worker holds
    Report(result) <-----   counted          <-----          ResultCollected
                            queued again     <-----          WorkerEnded
                            sent again       Send    ----->  (session of worker 0)

The class is modelled on `dask.distributed`'s `WorkerState`.
"""

from __future__ import annotations

from collections.abc import Iterable

from kerasps.training.epoch.admission import Admission, Free
from kerasps.training.epoch.dealer import Dealer
from kerasps.training.epoch.epoch_events import (
    AllAsked,
    ClusterGrew,
    Collect,
    Command,
    EpochBegan,
    Event,
    ExecutionsDone,
    JoinedUpdates,
    Open,
    PassBegan,
    Report,
    ResultCollected,
    ResultReturned,
    ResultsWanted,
    SessionBegan,
    SessionEnded,
    SplitOpened,
    StepsAsked,
    WorkerEnd,
    WorkerEnded,
    WorkerLeaves,
)
from kerasps.training.epoch.epoch_log import EpochLog
from kerasps.training.epoch.epoch_workers import EpochWorkers
from kerasps.training.epoch.splits import SplitLedger
from kerasps.training.epoch.worker_state import WorkerStatus

# A split is divided only if each half has the batches of this many executions.
_MIN_EXECUTIONS = 4
# The number of last events that an error carries.
_NUM_NOTED = 30


class EpochState:
    """Executions, results, splits and workers of one loop, one epoch after the other.

    This class handles the events. `EpochWorkers` knows the executions, results and split of each
    worker. `Dealer` keeps the pending executions and chooses the worker for each.

    Contract: call `handle` with one event at a time (the caller has a lock), and carry out each
    command that it returns, those for one worker in the given order. Only `handle` changes the
    state.

    Invariant: each step that was asked for in an epoch is counted, reported as missing, pending,
    running or uncollected.

    Args:
        collect_interval: seconds for which a worker may hold results. 0: each execution returns its
            result, so `ResultReturned` replaces `ExecutionsDone` and `ResultCollected`.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        lost: Iterable[int] = (),
        executions_ahead: int,
        collect_interval: float,
        admission: Admission | None = None,
    ) -> None:
        self.workers = EpochWorkers(num_workers, lost)
        self._admission = admission or Free()
        self._dealer = Dealer(self.workers, self._admission, executions_ahead=executions_ahead)
        self._collect_interval = collect_interval
        # The steps of the execution that was asked for last.
        self._execution_steps = 1
        self._log = EpochLog()

    @property
    def splits(self) -> SplitLedger:
        """The splits of the current pass."""
        return self.workers.splits

    @property
    def num_in_flight(self) -> int:
        """The number of executions that were asked for and are not done."""
        return self._dealer.num_waiting + sum(len(w.running) for w in self.workers.states)

    @property
    def is_dealt_evenly(self) -> bool:
        """True if synchronous updates wait for no worker that was given fewer steps than others."""
        return self._dealer.is_even

    def history(self) -> str:
        """Return the last 1000 events as text, with the commands that followed each."""
        return self._log.text()

    def validate(self) -> None:
        """Check that the state does not contradict itself. For tests: it is slow.

        Each execution is pending in the queue, pending with a split, or held by one worker. The
        steps that were asked for are those counted, those reported as missing, and those of these
        executions. Each batch of a split of known length is counted, held, or not given out. A
        split has one reader while it is taken, else none. A worker that is lost or without data
        holds nothing. A ps has applied at most all pushes of an execution. The admission knows
        which steps run, and allows them. Raises AssertionError if one of these does not hold. The
        error has the last events as a note.
        """
        try:
            self.workers.validate()
            self._dealer.validate()
        except AssertionError as exc:
            exc.add_note(self._log.text(_NUM_NOTED))
            raise

    # Events

    def handle(self, event: Event) -> list[Command]:
        """Handle an event, and return the commands that follow from it, in their order.

        An error carries the last events as a note.
        """
        self._log.add_event(event)
        try:
            commands = [*self._handle(event), *self._finish_unfinished()]
            leaves = self._dealer.take_out_idle()
            commands += self._dealer.deal_after_progress()
        except Exception as exc:
            exc.add_note(self._log.text(_NUM_NOTED))
            raise
        # A worker leaves before it opens its next split, since opening may take long.
        commands = [*leaves, *commands]
        self._log.add_commands(commands)
        return commands

    def _handle(self, event: Event) -> list[Command]:
        match event:
            # The frequent events come first.
            case StepsAsked():
                self._execution_steps = event.execution.num_steps
                self._dealer.ask(event.execution)
                return self._dealer.deal()
            case ExecutionsDone():
                return self._finish_executions(event)
            case ResultReturned():
                return self._count_returned(event)
            case ResultCollected():
                return self._count_collected(event)
            case SessionBegan():
                return self._begin_session(event)
            case SplitOpened():
                return self._begin_reading(event)
            case JoinedUpdates():
                return self._begin_joint(event.worker)
            case PassBegan():
                there = self.workers.begin_pass(event.num_splits, event.positions)
                # The other workers wait for those that are about to begin.
                self._admission.begin(there)
                # Within an epoch, all workers are without data.
                return self._wake_dry()
            case EpochBegan():
                self._dealer.forget()
                return []
            case AllAsked():
                self._dealer.ask_no_more()
                return []
            case ResultsWanted():
                return [c for i in range(len(self.workers)) for c in self._collect(i)]
            case WorkerEnded():
                return self._end(event)
            case ClusterGrew():
                self.workers.grow(event.num_workers)
                return []
            case WorkerLeaves():
                return self._begin_to_leave(event.worker)
            case SessionEnded():
                return self._end_session(event.worker)

    def _begin_session(self, event: SessionBegan) -> list[Command]:
        index, worker = event.worker, self.workers[event.worker]
        worker.replicas = event.replicas
        # If the dataset is lost, the leaving worker is gone and a new one has its index.
        worker.is_leaving = worker.is_leaving and event.is_open
        # A worker that has read all its splits has a dataset open too, but an empty one.
        if event.is_open and (worker.split is not None or not len(self.splits)):
            worker.status = WorkerStatus.READING
            return [*self._collect(index), *self._go_on(index)]
        if not event.is_open:
            # A dataset that was open here was lost with the worker, between two sessions.
            self._end(event.ended or WorkerEnded(index, WorkerEnd.RESTARTED))
        return [*self._seek(index), *self._wake_dry(), *self._dealer.deal()]

    def _begin_reading(self, event: SplitOpened) -> list[Command]:
        worker = self.workers[event.worker]
        worker.status = WorkerStatus.READING
        if not worker.is_leaving:
            self._admission.set_ready(event.worker)
        if worker.split is not None:
            self.splits[worker.split].open(
                event.left, is_endless=event.is_endless, has_order=event.has_order
            )
        commands = self._go_on(event.worker)
        # A worker without a split may take over half of this one, or share it.
        return [*commands, *self._wake_dry()]

    def _begin_joint(self, index: int) -> list[Command]:
        if self.workers[index].status not in (WorkerStatus.AWAITED, WorkerStatus.LOST):
            # If it has left its split meanwhile, `take_out_idle` removes it from the updates again.
            is_late = any(self.workers[member].running for member in self._admission.members)
            self._admission.join(index, is_late=is_late)
        # All updates now wait for it, so `fit` may have to ask for more.
        return [Report(), *self._dealer.deal()]

    def _finish_executions(self, event: ExecutionsDone) -> list[Command]:
        worker = self.workers[event.worker]
        self.workers.note_alive(event.worker)
        for _ in range(event.count):
            execution = worker.running.popleft()
            self._admission.finish(event.worker, execution.num_steps)
            worker.uncollected.append(execution)
        commands: list[Command] = [Report()]
        if event.at >= worker.collect_at:
            commands += self._collect(event.worker)
        return [*commands, *self._go_on(event.worker)]

    def _count_returned(self, event: ResultReturned) -> list[Command]:
        worker = self.workers[event.worker]
        self.workers.note_alive(event.worker)
        execution = worker.running.popleft()
        self._admission.finish(event.worker, execution.num_steps)
        self._dealer.confirm_steps(execution.num_steps)
        pushes = worker.count([execution], event.steps)
        missing = execution.num_steps - event.steps
        worker.is_exhausted = worker.is_exhausted or missing > 0
        first = execution.first_batch
        if worker.split is not None:
            first += self.splits[worker.split].confirm(event.steps)
        source = None if worker.split is None else self.splits[worker.split].source
        report = Report(missing, event.result, source, first, pushes, event.worker)
        return [report, *self._go_on(event.worker)]

    def _count_collected(self, event: ResultCollected) -> list[Command]:
        worker = self.workers[event.worker]
        # Where only reading finds the end of the data, steps behind the end have done nothing.
        held = sum(execution.num_steps for execution in worker.uncollected)
        self._dealer.confirm_steps(held)
        missing = held - event.steps
        worker.is_exhausted = worker.is_exhausted or missing > 0
        pushes = worker.count(worker.uncollected, event.steps)
        worker.uncollected.clear()
        worker.is_collecting = False
        worker.collect_at = event.at + self._collect_interval
        if worker.split is not None:
            self.splits[worker.split].confirm(event.steps)
        report = Report(missing, event.result, pushes=pushes, worker=event.worker)
        return [report, *self._go_on(event.worker)]

    def _begin_to_leave(self, index: int) -> list[Command]:
        worker = self.workers[index]
        worker.is_leaving = True
        self._admission.set_idle(index)
        if worker.status is WorkerStatus.DRY:
            return self._end_leaving(index)
        return self._go_on(index)

    def _end(self, event: WorkerEnded) -> list[Command]:
        """Retry a worker's unreported executions on other workers, and release its split."""
        index, worker = event.worker, self.workers[event.worker]
        match event.why:
            case WorkerEnd.RESTARTED:
                self._take_back(index, event.applied)
                return []  # the new session is the first to look for a split
            case WorkerEnd.DIED if worker.status is not WorkerStatus.AWAITED:
                return []  # its session is alive, or has reported the loss
            case WorkerEnd.LEFT if not worker.is_leaving or worker.status is WorkerStatus.LOST:
                return []  # `_end_leaving` has noted it
        leaves = self._admission.stop_waiting_for(index)
        self._take_back(index, event.applied)
        self.workers.lose(index)
        # A departing worker can tell the ps itself; closed lanes tell the ps of the others.
        told = leaves if event.why is WorkerEnd.LEFT else []
        return [*told, Report(), *self._wake_dry(), *self._dealer.deal()]

    def _end_session(self, index: int) -> list[Command]:
        worker = self.workers[index]
        if worker.status is WorkerStatus.OPENING:
            self.workers.release(index)
        self._dealer.take_back(index)
        worker.is_collecting = False
        worker.status = WorkerStatus.AWAITED
        self._admission.end_session(index, returns=not worker.is_leaving)
        return []

    # Consequences

    def _go_on(self, index: int) -> list[Command]:
        """Send a worker its next executions, or seek another split if its data have ended."""
        worker = self.workers[index]
        if worker.status is not WorkerStatus.READING:
            return []
        if self.workers.has_data(worker) and not worker.is_leaving:
            return self._dealer.deal()
        if worker.running:
            return []  # wait until these are done, or find no data
        if worker.uncollected:
            return self._collect(index)
        if worker.is_leaving:
            return self._end_leaving(index)
        if worker.split is not None and not worker.shares:
            self.splits[worker.split].finish()
        self._admission.set_idle(index)
        return self._seek(index)

    def _end_leaving(self, index: int) -> list[Command]:
        """End a worker that is leaving and holds no executions or results any more."""
        return self._end(WorkerEnded(index, WorkerEnd.LEFT))

    def _seek(self, index: int) -> list[Command]:
        """Assign a split to a worker and return the order to open it, if one is available."""
        self.workers.assign(index, _MIN_EXECUTIONS * self._execution_steps)
        worker = self.workers[index]
        if worker.split is None and worker.is_leaving:
            return self._end_leaving(index)
        if worker.split is None and len(self.splits):
            worker.status = WorkerStatus.DRY
            self.workers.note_alive(index)
            return [*self._admission.stop_waiting_for(index), Report()]
        worker.status = WorkerStatus.OPENING
        return [self.workers.open(index)]

    def _wake_dry(self) -> list[Command]:
        """Assign released splits to workers without data, if there are any."""
        commands: list[Command] = []
        for index, worker in enumerate(self.workers.states):
            if worker.status is WorkerStatus.DRY:
                found = self._seek(index)
                commands += [command for command in found if isinstance(command, Open)]
        return commands

    def _finish_unfinished(self) -> list[Command]:
        """Move a worker to a split with unfinished executions, if nothing else is pending.

        Usually the worker that lost the split, or one whose data have ended, takes it before.
        """
        workers = self.workers.states
        is_time = self.splits.has_abandoned and not self._dealer.has_queue
        if not is_time or any(w.running or w.status is WorkerStatus.OPENING for w in workers):
            return []
        for index, worker in enumerate(workers):
            if worker.status is WorkerStatus.READING:
                if worker.uncollected:
                    return self._collect(index)
                self.workers.release(index)
                return self._seek(index)
        return []

    def _collect(self, index: int) -> list[Command]:
        worker = self.workers[index]
        if worker.status is not WorkerStatus.READING:
            return []  # there is no session; `_begin_session` collects again
        if worker.is_collecting or not worker.uncollected:
            return []
        worker.is_collecting = True
        return [Collect(index)]

    def _take_back(self, index: int, applied: tuple[int, ...]) -> None:
        """Put a worker's unreported executions before the pending ones, and release its split.

        A ps that has applied some of their pushes does not apply these again.
        """
        worker = self.workers[index]
        self._dealer.put_back(worker.split, worker.take_back(applied))
        self.workers.release(index)
