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
                            queued again     <-----          WorkerLost
                            sent elsewhere   Send    ----->  (session of worker 0)

The class is modelled on `dask.distributed`'s `WorkerState`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kerasps.training.epoch_events import (
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
    WorkerGone,
    WorkerLost,
)
from kerasps.training.splits import SplitLedger, SplitStatus


class _Status(enum.Enum):
    AWAITED = "its session has not begun"
    OPENING = "it was told to open a split"
    READING = "it may have data"
    DRY = "it waits for data"
    LOST = "it is gone"


@dataclass
class _Worker:
    status: _Status = _Status.AWAITED
    split: int | None = None
    # Only reading found that its data have ended.
    is_exhausted: bool = False
    # Sent, and not known to be done.
    running: deque[Execution] = field(default_factory=deque)
    # Done, while the worker holds the results.
    uncollected: list[Execution] = field(default_factory=list)
    is_collecting: bool = False
    collect_at: float = 0.0


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
    """

    def __init__(
        self,
        num_workers: int,
        *,
        lost: Iterable[int] = (),
        executions_ahead: int,
        collect_interval: float,
    ) -> None:
        self._workers = [_Worker() for _ in range(num_workers)]
        self._lost = set(lost)
        self._executions_ahead = executions_ahead
        self._collect_interval = collect_interval
        self._queue: deque[Execution] = deque()
        self._splits = SplitLedger(0)
        self._num_failures = 0
        for worker in self._lost:
            self._workers[worker].status = _Status.LOST

    # What others may know

    @property
    def splits(self) -> SplitLedger:
        """The splits of the pass that goes on."""
        return self._splits

    @property
    def num_in_flight(self) -> int:
        """The executions that were asked for and are not done."""
        return len(self._queue) + sum(len(worker.running) for worker in self._workers)

    @property
    def has_results_due(self) -> bool:
        """Whether a worker holds results."""
        return any(worker.uncollected for worker in self._workers)

    @property
    def is_exhausted(self) -> bool:
        """Whether all data are read: no worker can do anything that is still asked for."""
        nobody_reads = all(w.status in (_Status.DRY, _Status.LOST) for w in self._workers)
        return nobody_reads and self._splits.all_read

    @property
    def lost_workers(self) -> frozenset[int]:
        """The workers that were lost and have done nothing since."""
        return frozenset(self._lost)

    @property
    def num_failures(self) -> int:
        """How often a worker was lost."""
        return self._num_failures

    # What happens

    def handle(self, event: Event) -> list[Command]:
        """Take note of an event; return what must be done because of it, in that order."""
        match event:
            case PassBegan():
                return self._begin_pass(event.num_splits)
            case EpochBegan():
                self._queue.clear()
                return []
            case StepsAsked():
                self._queue.append(event.execution)
                return self._send_queued()
            case ResultsWanted():
                return [c for i in range(len(self._workers)) for c in self._collect(i)]
            case SessionBegan():
                return self._begin_session(event.worker, event.is_open)
            case SplitOpened():
                return self._begin_reading(event.worker, event.left)
            case ExecutionsDone():
                return self._finish_executions(event)
            case ResultReturned():
                return self._count_returned(event)
            case ResultCollected():
                return self._count_collected(event)
            case WorkerLost():
                self._num_failures += 1
                return self._lose(event.worker)
            case WorkerGone():
                return self._lose_awaited(event.worker)
            case SessionEnded():
                return self._end_session(event.worker)

    def _begin_pass(self, num_splits: int) -> list[Command]:
        self._splits = SplitLedger(num_splits)
        for index, worker in enumerate(self._workers):
            worker.split, worker.is_exhausted = None, False
            if index in self._lost:
                # Should it come back first, it may take its own split; until then, others may.
                self._release_own(index)
        return []

    def _begin_session(self, index: int, is_open: bool) -> list[Command]:
        worker = self._workers[index]
        # One that has read its splits to their ends has a dataset open too, with nothing in it.
        if is_open and (worker.split is not None or not len(self._splits)):
            worker.status = _Status.READING
            return [*self._collect(index), *self._go_on(index)]
        # A dataset that was open here went with the worker, between two sessions.
        self._requeue(index)
        self._release(index)
        return [*self._seek(index), *self._wake_dry(), *self._send_queued()]

    def _begin_reading(self, index: int, left: int | None) -> list[Command]:
        worker = self._workers[index]
        worker.status = _Status.READING
        if worker.split is not None:
            self._splits.open(worker.split, left)
        return self._go_on(index)

    def _finish_executions(self, event: ExecutionsDone) -> list[Command]:
        worker = self._workers[event.worker]
        self._lost.discard(event.worker)
        for _ in range(event.count):
            worker.uncollected.append(worker.running.popleft())
        commands: list[Command] = [Report()]
        if event.at >= worker.collect_at:
            commands += self._collect(event.worker)
        return [*commands, *self._go_on(event.worker)]

    def _count_returned(self, event: ResultReturned) -> list[Command]:
        worker = self._workers[event.worker]
        self._lost.discard(event.worker)
        execution = worker.running.popleft()
        missing = execution.num_steps - event.steps
        worker.is_exhausted = worker.is_exhausted or missing > 0
        first = execution.first_batch
        if worker.split is not None:
            first += self._splits.confirm(worker.split, event.steps)
        report = Report(missing, event.result, worker.split, first)
        return [report, *self._go_on(event.worker)]

    def _count_collected(self, event: ResultCollected) -> list[Command]:
        worker = self._workers[event.worker]
        # Where only reading finds the end of the data, steps beyond it have done nothing.
        missing = sum(execution.num_steps for execution in worker.uncollected) - event.steps
        worker.is_exhausted = worker.is_exhausted or missing > 0
        worker.uncollected.clear()
        worker.is_collecting = False
        worker.collect_at = event.at + self._collect_interval
        if worker.split is not None:
            self._splits.confirm(worker.split, event.steps)
        return [Report(missing, event.result), *self._go_on(event.worker)]

    def _lose(self, index: int) -> list[Command]:
        self._lost.add(index)
        self._requeue(index)
        self._release(index)
        # It may be that it has not come to its own split.
        self._release_own(index)
        self._workers[index].status = _Status.LOST
        return [Report(), *self._wake_dry(), *self._send_queued()]

    def _lose_awaited(self, index: int) -> list[Command]:
        """Do without a worker that was lost while it had no session: there may never be one."""
        worker = self._workers[index]
        if worker.status is not _Status.AWAITED:
            return []  # its session is there, or has said so
        if worker.uncollected:
            self._num_failures += 1  # what it did will be done again
        return self._lose(index)

    def _end_session(self, index: int) -> list[Command]:
        worker = self._workers[index]
        if worker.status is _Status.OPENING:
            self._release(index)
        # What the session was given and did not run: its batches are still there to be read.
        for execution in worker.running:
            if worker.split is not None:
                self._splits.give_out(worker.split, -execution.num_steps)
        self._queue.extendleft(reversed(worker.running))
        worker.running.clear()
        worker.is_collecting = False
        worker.status = _Status.AWAITED
        return []

    # What follows

    def _go_on(self, index: int) -> list[Command]:
        """Send a worker what it can do next; where its data have ended, have it look for others."""
        worker = self._workers[index]
        if worker.status is not _Status.READING:
            return []
        if self._has_data(worker):
            return self._send_queued()
        if worker.running:
            return []  # which will be done, or do nothing
        if worker.uncollected:
            return self._collect(index)
        if worker.split is not None:
            self._splits.finish(worker.split)
        return self._seek(index)

    def _seek(self, index: int) -> list[Command]:
        """Give a worker a split to open, if there is one for it."""
        worker = self._workers[index]
        worker.is_exhausted = False
        worker.split = self._splits.take(index)
        if worker.split is None and len(self._splits):
            worker.status = _Status.DRY
            self._lost.discard(index)
            return [Report()]
        worker.status = _Status.OPENING
        skip = 0 if worker.split is None else self._splits.confirmed(worker.split)
        return [Open(index, worker.split, skip)]

    def _wake_dry(self) -> list[Command]:
        """Have workers without data look whether a split was released."""
        commands: list[Command] = []
        for index, worker in enumerate(self._workers):
            if worker.status is _Status.DRY:
                found = self._seek(index)
                commands += [command for command in found if isinstance(command, Open)]
        return commands

    def _send_queued(self) -> list[Command]:
        """Send executions that wait to workers that can take them, the least busy first."""
        commands: list[Command] = []
        while self._queue:
            free = [
                (len(worker.running), index)
                for index, worker in enumerate(self._workers)
                if len(worker.running) < self._executions_ahead and self._has_data(worker)
            ]
            if not free:
                break
            commands += self._send(min(free)[1], self._queue.popleft())
        return commands

    def _send(self, index: int, execution: Execution) -> list[Command]:
        worker = self._workers[index]
        commands: list[Command] = []
        if worker.split is not None:
            left = self._splits.left(worker.split)
            if left is not None and left < execution.num_steps:
                # The rest has no data here, but may have elsewhere.
                commands.append(Report(missing_steps=execution.num_steps - left))
                execution = replace(execution, num_steps=left)
            self._splits.give_out(worker.split, execution.num_steps)
        worker.running.append(execution)
        return [*commands, Send(index, execution)]

    def _has_data(self, worker: _Worker) -> bool:
        """Return whether a worker is reading, and there may be a batch that no execution has."""
        if worker.status is not _Status.READING or worker.is_exhausted:
            return False
        return worker.split is None or self._splits.left(worker.split) != 0

    def _collect(self, index: int) -> list[Command]:
        worker = self._workers[index]
        if worker.status is not _Status.READING:
            return []  # nobody is there to do it; asked again when its session begins
        if worker.is_collecting or not worker.uncollected:
            return []
        worker.is_collecting = True
        return [Collect(index)]

    def _requeue(self, index: int) -> None:
        """Put what a worker had not reported before what waits, in the order of its steps."""
        worker = self._workers[index]
        self._queue.extendleft(reversed([*worker.uncollected, *worker.running]))
        worker.uncollected.clear()
        worker.running.clear()
        worker.is_collecting = False

    def _release(self, index: int) -> None:
        """Let others read on in the split that a worker had."""
        worker = self._workers[index]
        if worker.split is not None:
            self._splits.release(worker.split)
        worker.split = None

    def _release_own(self, index: int) -> None:
        """Let others read the split that is reserved for a worker."""
        if len(self._splits) and self._splits.status(index) is SplitStatus.RESERVED:
            self._splits.release(index)
