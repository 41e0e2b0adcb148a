"""The state machine of an epoch: events in, commands out, no TensorFlow and no threads.

An *execution* is the order to do so-and-so many steps. It waits in a queue, is sent to a worker,
is done there, and its result is fetched, alone or added up with those of others. Whatever happens
to the worker on the way, each step that was asked for is counted once, or reported as missing
because the data ended. `EpochState` keeps that promise; `EpochChannel` brings it the events from
all threads, one at a time, and hands its commands to the threads that carry them out.

    fit's thread            EpochState                       session of worker 1
    StepsAsked     ----->   queued, sent     Send    ----->  runs the step graph
    Report         <-----   done             <-----          ExecutionsDone
                            results due      Collect ----->  fetches what the worker holds
    Report(result) <-----   counted          <-----          ResultCollected
                            queued again     <-----          WorkerEnded
                            sent elsewhere   Send    ----->  (session of worker 0)

The class is modelled on `dask.distributed`'s `WorkerState`.
"""

from __future__ import annotations

from collections.abc import Iterable

from kerasps.training.epoch.admission import Admission, Free
from kerasps.training.epoch.dealer import Dealer
from kerasps.training.epoch.epoch_events import (
    AllAsked,
    Collect,
    Command,
    EpochBegan,
    Event,
    ExecutionsDone,
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
    WorkerJoined,
    WorkerLeaves,
    WorkersJoined,
)
from kerasps.training.epoch.epoch_log import EpochLog
from kerasps.training.epoch.epoch_workers import EpochWorkers
from kerasps.training.epoch.splits import SplitLedger
from kerasps.training.epoch.worker_state import WorkerStatus

# Who takes over half of what another has left gets at least so many executions.
_MIN_EXECUTIONS = 4
# An error carries so many of the last events.
_NUM_NOTED = 30


class EpochState:
    """Executions, results, splits and workers of one loop, an epoch after the other.

    `EpochWorkers` knows what each worker holds and which split it reads, `Dealer` what waits and
    who is given it; this class takes in what happens.

    Contract: call `handle` with one event at a time (the caller has a lock), and see that each
    command is carried out, for one worker in the given order. The state changes in no other way.

    Invariant: the steps asked for in an epoch are those counted, those reported as missing, and
    those in `queued`, running or uncollected.

    Args:
        num_workers: the workers of the cluster.
        lost: those that are gone before it begins.
        executions_ahead: how many executions a worker is given at a time.
        collect_interval: seconds for which a worker may hold results. 0: each execution returns its
            own, so `ResultReturned` takes the place of `ExecutionsDone` and `ResultCollected`.
        admission: says which workers may be given steps. Default: all.
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
        """The splits of the pass that goes on."""
        return self.workers.splits

    @property
    def num_in_flight(self) -> int:
        """The executions that were asked for and are not done."""
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

        Each execution waits in the queue, waits with a split, or is held by one worker. The steps
        asked for are those counted, those reported as missing, and those of these executions.
        Each batch of a split whose length is known is counted, held, or not given out. A split has
        one reader while it is taken, else none. A worker that is lost or without data holds
        nothing. What each ps has applied of an execution is a part of its pushes. The admission
        knows which steps run, and allows them.

        Raises:
            AssertionError: one of these does not hold. The last events are its note.
        """
        try:
            self.workers.validate()
            self._dealer.validate()
        except AssertionError as exc:
            exc.add_note(self._log.text(_NUM_NOTED))
            raise

    # What happens

    def handle(self, event: Event) -> list[Command]:
        """Take note of an event; return what must be done because of it, in that order.

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
        # Whoever leaves does so before it opens what it is to read next, which may take long.
        commands = [*leaves, *commands]
        self._log.add_commands(commands)
        return commands

    def _handle(self, event: Event) -> list[Command]:
        match event:
            # The frequent ones first.
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
            case WorkerJoined():
                return self._begin_joint(event.worker)
            case PassBegan():
                there = self.workers.begin_pass(event.num_splits, event.positions)
                # The others wait for those that are about to begin.
                self._admission.begin(there)
                return []
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
            case WorkersJoined():
                self.workers.grow(event.num_workers)
                return []
            case WorkerLeaves():
                return self._begin_to_leave(event.worker)
            case SessionEnded():
                return self._end_session(event.worker)

    def _begin_session(self, event: SessionBegan) -> list[Command]:
        index, worker = event.worker, self.workers[event.worker]
        worker.replicas = event.replicas
        # Whoever was about to leave has left, and this is another at its place.
        worker.is_leaving = worker.is_leaving and event.is_open
        # One that has read its splits to their ends has a dataset open too, with nothing in it.
        if event.is_open and (worker.split is not None or not len(self.splits)):
            worker.status = WorkerStatus.READING
            return [*self._collect(index), *self._go_on(index)]
        if not event.is_open:
            # A dataset that was open here went with the worker, between two sessions.
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
        # Who has found no split may take over half of this one, or share it.
        return [*commands, *self._wake_dry()]

    def _begin_joint(self, index: int) -> list[Command]:
        if self.workers[index].status not in (WorkerStatus.AWAITED, WorkerStatus.LOST):
            # One that has left its split meanwhile leaves these updates too.
            is_late = any(self.workers[member].running for member in self._admission.members)
            self._admission.join(index, is_late=is_late)
        # All wait for it: more may have to be asked for.
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
        self._dealer.settle(execution.num_steps)
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
        # Where only reading finds the end of the data, steps beyond it have done nothing.
        held = sum(execution.num_steps for execution in worker.uncollected)
        self._dealer.settle(held)
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
            return self._let_go(index)
        return self._go_on(index)

    def _end(self, event: WorkerEnded) -> list[Command]:
        """Give what a worker held to others, which read on where it was."""
        index, worker = event.worker, self.workers[event.worker]
        match event.why:
            case WorkerEnd.RESTARTED:
                self._take_back(index, event.applied)
                return []  # its session, which begins, is the first to look for a split
            case WorkerEnd.DIED if worker.status is not WorkerStatus.AWAITED:
                return []  # its session is there, or has told of it
            case WorkerEnd.LEFT if not worker.is_leaving or worker.status is WorkerStatus.LOST:
                return []  # noted when it held nothing any more
        leaves = self._admission.leave(index)
        self._take_back(index, event.applied)
        self.workers.lose(index)
        # Who leaves is there to say so to the ps; of the others the ps know it by their lanes.
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

    # What follows

    def _go_on(self, index: int) -> list[Command]:
        """Send a worker what it can do next; where its data have ended, have it look for others."""
        worker = self.workers[index]
        if worker.status is not WorkerStatus.READING:
            return []
        if self.workers.has_data(worker) and not worker.is_leaving:
            return self._dealer.deal()
        if worker.running:
            return []  # which will be done, or do nothing
        if worker.uncollected:
            return self._collect(index)
        if worker.is_leaving:
            return self._let_go(index)
        if worker.split is not None and not worker.shares:
            self.splits[worker.split].finish()
        self._admission.set_idle(index)
        return self._seek(index)

    def _let_go(self, index: int) -> list[Command]:
        """Do without a worker that is leaving and holds nothing any more."""
        return self._end(WorkerEnded(index, WorkerEnd.LEFT))

    def _seek(self, index: int) -> list[Command]:
        """Give a worker a split to open, if there is one for it."""
        self.workers.assign(index, _MIN_EXECUTIONS * self._execution_steps)
        worker = self.workers[index]
        if worker.split is None and worker.is_leaving:
            return self._let_go(index)
        if worker.split is None and len(self.splits):
            worker.status = WorkerStatus.DRY
            self.workers.note_alive(index)
            return [*self._admission.leave(index), Report()]
        worker.status = WorkerStatus.OPENING
        return [self.workers.open(index)]

    def _wake_dry(self) -> list[Command]:
        """Give workers without data a split that was released, if there is one."""
        commands: list[Command] = []
        for index, worker in enumerate(self.workers.states):
            if worker.status is WorkerStatus.DRY:
                found = self._seek(index)
                commands += [command for command in found if isinstance(command, Open)]
        return commands

    def _finish_unfinished(self) -> list[Command]:
        """Move a worker from its split to one with unfinished executions, if none else is left.

        Otherwise who lost it, or somebody whose data have ended, comes to it sooner.
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
            return []  # nobody is there to do it; asked again when its session begins
        if worker.is_collecting or not worker.uncollected:
            return []
        worker.is_collecting = True
        return [Collect(index)]

    def _take_back(self, index: int, applied: tuple[int, ...]) -> None:
        """Put what a worker had not reported before what waits, and let others read its split.

        What of it was applied is not to be applied again, on the ps where it was.
        """
        worker = self.workers[index]
        self._dealer.put_back(worker.split, worker.take_back(applied))
        self.workers.release(index)
