"""What an epoch knows, as a state machine: events in, commands out, no TensorFlow and no threads.

An *execution* is the order to do so-and-so many steps. It waits in a queue, is sent to a worker,
is done there, and its result is fetched, alone or added up with those of others. Whatever happens
to the worker on the way, each step that was asked for is counted once, or reported as missing
because the data ended. `EpochState` keeps that promise; `dispatcher.py` brings it the events from
its threads, one at a time, and hands its commands to the threads that carry them out.

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

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kerasps.training.admission import Admission, Free
from kerasps.training.epoch_events import (
    AllAsked,
    Collect,
    Command,
    EpochBegan,
    Event,
    Execution,
    ExecutionsDone,
    Open,
    PassBegan,
    Report,
    ResultCollected,
    ResultReturned,
    ResultsWanted,
    Send,
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
from kerasps.training.splits import SplitLedger, SplitStatus
from kerasps.training.worker_state import WorkerState, WorkerStatus

# Who takes over half of what another has left gets at least so many executions.
_MIN_EXECUTIONS = 4


class EpochState:
    """Executions, results, splits and workers of one loop, an epoch after the other.

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
        self._workers = [WorkerState() for _ in range(num_workers)]
        self._lost = set(lost)
        self._executions_ahead = executions_ahead
        self._collect_interval = collect_interval
        self._queue: deque[Execution] = deque()
        # The steps of the execution that was asked for last.
        self._execution_steps = 1
        self._splits = SplitLedger(0)
        self._admission = admission or Free()
        # What its progress was when it was looked at last.
        self._progress = self._admission.progress
        self._all_asked = False
        for worker in self._lost:
            self._workers[worker].status = WorkerStatus.LOST

    # What others may know

    @property
    def splits(self) -> SplitLedger:
        """The splits of the pass that goes on."""
        return self._splits

    @property
    def num_in_flight(self) -> int:
        """The executions that were asked for and are not done."""
        waiting = len(self._queue) + self._splits.num_unfinished
        return waiting + sum(len(worker.running) for worker in self._workers)

    @property
    def is_dealt_evenly(self) -> bool:
        """Whether synchronous updates wait for nobody who was given fewer steps than others."""
        if self._queue or self._splits.num_unfinished:
            return False
        return self._admission.is_even(self._readers())

    @property
    def has_results_due(self) -> bool:
        """Whether a worker holds results."""
        return any(worker.uncollected for worker in self._workers)

    def holds_results(self, worker: int) -> bool:
        """Whether a worker holds results."""
        return bool(self._workers[worker].uncollected)

    @property
    def num_workers(self) -> int:
        """The workers, with those that are lost."""
        return len(self._workers)

    @property
    def running(self) -> dict[int, list[Execution]]:
        """What was sent to each worker and is not known to be done."""
        return {i: [*worker.running] for i, worker in enumerate(self._workers) if worker.running}

    def has_let_go(self, worker: int) -> bool:
        """Whether a worker that is about to leave holds nothing any more."""
        leaving = self._workers[worker]
        return leaving.is_leaving and leaving.status is WorkerStatus.LOST

    def awaits(self, worker: int) -> bool:
        """Whether the session of a worker has not begun, and it is not known to be lost."""
        return self._workers[worker].status is WorkerStatus.AWAITED

    @property
    def is_exhausted(self) -> bool:
        """Whether all data are read: no worker can do anything that is still asked for."""
        nobody_reads = all(w.status in (WorkerStatus.DRY, WorkerStatus.LOST) for w in self._workers)
        return nobody_reads and self._splits.all_read

    @property
    def lost_workers(self) -> frozenset[int]:
        """The workers that were lost and have done nothing since."""
        return frozenset(self._lost)

    # What happens

    def handle(self, event: Event) -> list[Command]:
        """Take note of an event; return what must be done because of it, in that order."""
        commands = [*self._handle(event), *self._finish_unfinished()]
        leaves = self._part_with_idle()
        before, self._progress = self._progress, self._admission.progress
        if before != self._progress:
            commands += self._send_queued()
        # Whoever leaves does so before it opens what it is to read next, which may take long.
        return [*leaves, *commands]

    def _handle(self, event: Event) -> list[Command]:
        match event:
            case PassBegan():
                return self._begin_pass(event)
            case EpochBegan():
                self._queue.clear()
                self._splits.forget_unfinished()
                return []
            case AllAsked():
                self._all_asked = True
                return []
            case StepsAsked():
                self._all_asked = False
                self._execution_steps = event.execution.num_steps
                self._queue.append(event.execution)
                return self._send_queued()
            case ResultsWanted():
                return [c for i in range(len(self._workers)) for c in self._collect(i)]
            case SessionBegan():
                return self._begin_session(event)
            case SplitOpened():
                return self._begin_reading(event)
            case WorkerJoined():
                return self._begin_joint(event.worker)
            case ExecutionsDone():
                return self._finish_executions(event)
            case ResultReturned():
                return self._count_returned(event)
            case ResultCollected():
                return self._count_collected(event)
            case WorkerEnded():
                return self._end(event)
            case WorkersJoined():
                new = event.num_workers - len(self._workers)
                fewest = min(worker.num_given for worker in self._workers)
                self._workers += [WorkerState(num_given=fewest) for _ in range(new)]
                return []
            case WorkerLeaves():
                return self._begin_to_leave(event.worker)
            case SessionEnded():
                return self._end_session(event.worker)

    def _begin_pass(self, event: PassBegan) -> list[Command]:
        self._splits = SplitLedger(event.num_splits, event.positions)
        for index, worker in enumerate(self._workers):
            worker.split, worker.num_given = None, 0
            worker.shares = worker.is_exhausted = False
            if index in self._lost:
                # Should it come back first, it may take its own split; until then, others may.
                self._release_own(index)
        # The others wait for those that are about to begin.
        there = [i for i in range(len(self._workers)) if i not in self._lost]
        self._admission.begin(there)
        return []

    def _begin_session(self, event: SessionBegan) -> list[Command]:
        index, worker = event.worker, self._workers[event.worker]
        worker.replicas = event.replicas
        # Whoever was about to leave has left, and this is another at its place.
        worker.is_leaving = worker.is_leaving and event.is_open
        # One that has read its splits to their ends has a dataset open too, with nothing in it.
        if event.is_open and (worker.split is not None or not len(self._splits)):
            worker.status = WorkerStatus.READING
            return [*self._collect(index), *self._go_on(index)]
        if not event.is_open:
            # A dataset that was open here went with the worker, between two sessions.
            self._end(event.ended or WorkerEnded(index, WorkerEnd.RESTARTED))
        return [*self._seek(index), *self._wake_dry(), *self._send_queued()]

    def _begin_reading(self, event: SplitOpened) -> list[Command]:
        worker = self._workers[event.worker]
        worker.status = WorkerStatus.READING
        if not worker.is_leaving:
            self._admission.set_ready(event.worker)
        if worker.split is not None:
            self._splits.open(
                worker.split, event.left, is_endless=event.is_endless, has_order=event.has_order
            )
        commands = self._go_on(event.worker)
        # Who has found no split may take over half of this one, or share it.
        return [*commands, *self._wake_dry()]

    def _begin_joint(self, index: int) -> list[Command]:
        if self._workers[index].status not in (WorkerStatus.AWAITED, WorkerStatus.LOST):
            # One that has left its split meanwhile leaves these updates too.
            is_late = any(self._workers[member].running for member in self._admission.members)
            self._admission.join(index, is_late=is_late)
        # All wait for it: more may have to be asked for.
        return [Report(), *self._send_queued()]

    def _finish_executions(self, event: ExecutionsDone) -> list[Command]:
        worker = self._workers[event.worker]
        self._lost.discard(event.worker)
        for _ in range(event.count):
            execution = worker.running.popleft()
            self._admission.finish(event.worker, execution.num_steps)
            worker.uncollected.append(execution)
        commands: list[Command] = [Report()]
        if event.at >= worker.collect_at:
            commands += self._collect(event.worker)
        return [*commands, *self._go_on(event.worker)]

    def _count_returned(self, event: ResultReturned) -> list[Command]:
        worker = self._workers[event.worker]
        self._lost.discard(event.worker)
        execution = worker.running.popleft()
        self._admission.finish(event.worker, execution.num_steps)
        pushes = worker.count([execution], event.steps)
        missing = execution.num_steps - event.steps
        worker.is_exhausted = worker.is_exhausted or missing > 0
        first = execution.first_batch
        if worker.split is not None:
            first += self._splits.confirm(worker.split, event.steps)
        source = None if worker.split is None else self._splits.source(worker.split)
        report = Report(missing, event.result, source, first, pushes)
        return [report, *self._go_on(event.worker)]

    def _count_collected(self, event: ResultCollected) -> list[Command]:
        worker = self._workers[event.worker]
        # Where only reading finds the end of the data, steps beyond it have done nothing.
        missing = sum(execution.num_steps for execution in worker.uncollected) - event.steps
        worker.is_exhausted = worker.is_exhausted or missing > 0
        pushes = worker.count(worker.uncollected, event.steps)
        worker.uncollected.clear()
        worker.is_collecting = False
        worker.collect_at = event.at + self._collect_interval
        if worker.split is not None:
            self._splits.confirm(worker.split, event.steps)
        report = Report(missing, event.result, pushes=pushes)
        return [report, *self._go_on(event.worker)]

    def _begin_to_leave(self, index: int) -> list[Command]:
        worker = self._workers[index]
        worker.is_leaving = True
        self._admission.set_idle(index)
        if worker.status is WorkerStatus.DRY:
            return self._let_go(index)
        return self._go_on(index)

    def _end(self, event: WorkerEnded) -> list[Command]:
        """Have others do what a worker held, and read on where it was."""
        index, worker = event.worker, self._workers[event.worker]
        match event.why:
            case WorkerEnd.RESTARTED:
                self._take_back(index, event.applied)
                return []  # its session, which begins, is the first to look for a split
            case WorkerEnd.DIED if worker.status is not WorkerStatus.AWAITED:
                return []  # its session is there, or has told of it
            case WorkerEnd.LEFT if not worker.is_leaving or worker.status is WorkerStatus.LOST:
                return []  # noted when it held nothing any more
        leaves = self._admission.leave(index)
        self._lost.add(index)
        self._take_back(index, event.applied)
        # It may be that it has not come to its own split.
        self._release_own(index)
        worker.status = WorkerStatus.LOST
        # Who leaves is there to say so to the ps; of the others the ps know it by their lanes.
        told = leaves if event.why is WorkerEnd.LEFT else []
        return [*told, Report(), *self._wake_dry(), *self._send_queued()]

    def _end_session(self, index: int) -> list[Command]:
        worker = self._workers[index]
        if worker.status is WorkerStatus.OPENING:
            self._release(index)
        # What the session was given and did not run: its batches are still there to be read.
        for execution in worker.running:
            self._admission.take_back(index, execution.num_steps)
            worker.num_given -= 1
            if worker.split is not None:
                self._splits.give_out(worker.split, -execution.num_steps)
        self._put_back(worker.split, worker.running)
        worker.running.clear()
        worker.is_collecting = False
        worker.status = WorkerStatus.AWAITED
        self._admission.end_session(index, returns=not worker.is_leaving)
        return []

    # What follows

    def _go_on(self, index: int) -> list[Command]:
        """Send a worker what it can do next; where its data have ended, have it look for others."""
        worker = self._workers[index]
        if worker.status is not WorkerStatus.READING:
            return []
        if self._has_data(worker) and not worker.is_leaving:
            return self._send_queued()
        if worker.running:
            return []  # which will be done, or do nothing
        if worker.uncollected:
            return self._collect(index)
        if worker.is_leaving:
            return self._let_go(index)
        if worker.split is not None and not worker.shares:
            self._splits.finish(worker.split)
        self._admission.set_idle(index)
        return self._seek(index)

    def _let_go(self, index: int) -> list[Command]:
        """Do without a worker that is leaving and holds nothing any more."""
        return self._end(WorkerEnded(index, WorkerEnd.LEFT))

    def _seek(self, index: int) -> list[Command]:
        """Give a worker a split to open, if there is one for it."""
        worker = self._workers[index]
        worker.is_exhausted = worker.shares = False
        worker.split = None if worker.is_leaving else self._splits.take(index)
        is_guest = not self._splits.has_own(index) and not worker.is_leaving
        if worker.split is None and is_guest:
            worker.split = self._splits.divide(_MIN_EXECUTIONS * self._execution_steps)
        if worker.split is None and is_guest:
            worker.split = self._splits.share(index)
            worker.shares = worker.split is not None
        if worker.split is None and worker.is_leaving:
            return self._let_go(index)
        if worker.split is None and len(self._splits):
            worker.status = WorkerStatus.DRY
            self._lost.discard(index)
            return [*self._admission.leave(index), Report()]
        worker.status = WorkerStatus.OPENING
        if worker.split is None:
            return [Open(index, None, 0)]
        split = worker.split
        return [Open(index, self._splits.source(split), self._splits.confirmed(split))]

    def _wake_dry(self) -> list[Command]:
        """Have workers without data look whether a split was released."""
        commands: list[Command] = []
        for index, worker in enumerate(self._workers):
            if worker.status is WorkerStatus.DRY:
                found = self._seek(index)
                commands += [command for command in found if isinstance(command, Open)]
        return commands

    def _send_queued(self) -> list[Command]:
        """Send executions that wait to workers that can take them, the least busy first.

        Of those that are equally busy, the one that has had the fewest.
        """
        commands = self._admission.take_in(self._employable())
        for index, worker in enumerate(self._workers):
            while worker.split is not None and self._has_room(worker):
                unfinished = self._unfinished(worker)
                if unfinished is None or not self._may_begin(index, unfinished):
                    break
                commands += self._send(index, self._splits.take_unfinished(worker.split))
        while self._queue:
            steps = self._queue[0].num_steps
            readers = self._readers()
            free = [
                worker.turn(index)
                for index in readers
                if self._has_room(worker := self._workers[index])
                and self._unfinished(worker) is None
                and self._allows(index, steps, readers)
            ]
            if not free or self._num_awaited_before(min(free)) >= len(self._queue):
                break
            commands += self._send(min(free)[-1], self._queue.popleft())
        return commands

    def _num_awaited_before(self, turn: tuple[int, int, int]) -> int:
        """Return how many workers have their turn before `turn`, and a session that begins soon.

        What waits is theirs, or the worker whose session begins first would do all that is asked
        for one by one, where each execution has a flight to itself.
        """
        return sum(
            worker.split is not None
            and not worker.is_leaving
            and self._has_data(worker, WorkerStatus.AWAITED)
            and worker.turn(index) < turn
            for index, worker in enumerate(self._workers)
        )

    def _may_begin(self, index: int, unfinished: Execution) -> bool:
        """Return whether a worker may do what it alone can, and others may have nothing to do."""
        steps, readers = unfinished.num_steps, self._readers()
        if not self._allows(index, steps, readers) and not self._queue:
            for other, worker in enumerate(self._workers):
                if other != index and worker.status is WorkerStatus.READING and not worker.running:
                    self._admission.set_idle(other)
        return self._allows(index, steps, readers)

    def _allows(self, index: int, steps: int, readers: list[int]) -> bool:
        is_idle = not self._workers[index].running
        return self._admission.allows(index, steps, is_idle=is_idle, readers=readers)

    def _employable(self) -> Iterator[int]:
        """Find the workers that could do what waits."""
        for index, worker in enumerate(self._workers):
            has_work = bool(self._queue) or self._unfinished(worker) is not None
            if has_work and self._has_room(worker):
                yield index

    def _part_with_idle(self) -> list[Command]:
        """Have no synchronous update wait for workers that have nothing to bring."""
        commands: list[Command] = []
        for index in self._admission.members:
            worker = self._workers[index]
            has_work = bool(self._queue) or not self._all_asked
            if not worker.running and not (has_work and self._has_room(worker)):
                commands += self._admission.leave(index)
        return commands

    def _unfinished(self, worker: WorkerState) -> Execution | None:
        """Return what a worker must do before anything else: it is for the next of its batches."""
        return None if worker.split is None else self._splits.next_unfinished(worker.split)

    def _has_room(self, worker: WorkerState) -> bool:
        if worker.is_leaving:
            return False
        return len(worker.running) < self._executions_ahead and self._has_data(worker)

    def _finish_unfinished(self) -> list[Command]:
        """Have a worker leave its split for one with unfinished executions, if none else is left.

        Otherwise who lost it, or somebody whose data have ended, comes to it sooner.
        """
        is_time = self._splits.has_abandoned and not self._queue
        if not is_time or any(w.running or w.status is WorkerStatus.OPENING for w in self._workers):
            return []
        for index, worker in enumerate(self._workers):
            if worker.status is WorkerStatus.READING:
                if worker.uncollected:
                    return self._collect(index)
                self._release(index)
                return self._seek(index)
        return []

    def _send(self, index: int, execution: Execution) -> list[Command]:
        worker = self._workers[index]
        split = worker.split
        left = None if split is None else self._splits.left(split)
        if left is None or left >= execution.num_steps:
            return [self._give(index, execution)]
        # The rest has no data here, but may have elsewhere.
        missing = Report(missing_steps=execution.num_steps - left)
        return [missing, *(self._give(index, part) for part in execution.cut(left))]

    def _give(self, index: int, execution: Execution) -> Send:
        worker = self._workers[index]
        if worker.split is not None:
            self._splits.give_out(worker.split, execution.num_steps)
        if execution.replicas != worker.replicas and not any(execution.applied):
            # What was done in part is done again in the same steps.
            execution = replace(execution, replicas=worker.replicas)
        self._admission.give(index, execution.num_steps)
        worker.running.append(execution)
        worker.num_given += 1
        return Send(index, execution)

    def _has_data(self, worker: WorkerState, status: WorkerStatus = WorkerStatus.READING) -> bool:
        """Return whether a worker is in `status`, and has a batch that no execution has, maybe."""
        if worker.status is not status or worker.is_exhausted:
            return False
        return worker.split is None or self._splits.left(worker.split) != 0

    def _readers(self) -> list[int]:
        """Return the workers that have data."""
        return [i for i, worker in enumerate(self._workers) if self._has_data(worker)]

    def _collect(self, index: int) -> list[Command]:
        worker = self._workers[index]
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
        worker = self._workers[index]
        self._put_back(worker.split, worker.take_back(applied))
        self._release(index)

    def _put_back(self, split: int | None, executions: Iterable[Execution]) -> None:
        """Put executions before what waits.

        Those whose steps are partly applied are for the batches that they were applied with. Where
        batches never end, or travel, any will do.
        """
        executions = [*executions]
        bound = []
        if split is not None and not self._splits.is_endless(split):
            bound = [execution for execution in executions if any(execution.applied)]
            executions = executions[len(bound) :]  # they are the first
            self._splits.put_back(split, bound)
        self._queue.extendleft(reversed(executions))

    def _release(self, index: int) -> None:
        """Let others read on in the split that a worker had."""
        worker = self._workers[index]
        if worker.split is not None and not worker.shares:
            self._splits.release(worker.split)
        worker.split, worker.shares = None, False

    def _release_own(self, index: int) -> None:
        """Let others read the split that is reserved for a worker."""
        if index < len(self._splits) and self._splits.status(index) is SplitStatus.RESERVED:
            self._splits.release(index)
