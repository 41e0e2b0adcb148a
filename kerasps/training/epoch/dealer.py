"""Deals executions out to workers, and keeps the pending ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kerasps.training.epoch.admission import Admission
from kerasps.training.epoch.epoch_events import Command, Execution, Report, Send
from kerasps.training.epoch.epoch_workers import EpochWorkers
from kerasps.training.epoch.worker_state import WorkerState, WorkerStatus


class Dealer:
    """The queue of executions, and the rules by which workers are given them.

    An execution is pending in the queue, for any worker, or with a split (`SplitLedger.put_back`),
    for the reader of the split. The latter needs the split's next batches, and comes before the
    queue.
    """

    def __init__(
        self, workers: EpochWorkers, admission: Admission, *, executions_ahead: int
    ) -> None:
        self._workers = workers
        self._admission = admission
        self._executions_ahead = executions_ahead
        self._queue: deque[Execution] = deque()
        self._all_asked = False
        # The steps of this epoch that were asked for, and are neither counted nor missing.
        self._num_due = 0
        # The admission's progress at the last `deal_after_progress`.
        self._progress = admission.progress

    @property
    def has_queue(self) -> bool:
        """True while executions are pending that any worker may do."""
        return bool(self._queue)

    @property
    def num_waiting(self) -> int:
        """The number of executions that no worker has."""
        return len(self._queue) + self._workers.splits.num_unfinished

    @property
    def is_even(self) -> bool:
        """True if synchronous updates wait for no worker that was given fewer steps than others."""
        return not self.num_waiting and self._admission.is_even(self._workers.readers())

    def ask(self, execution: Execution) -> None:
        """Put an execution behind the pending ones."""
        self._all_asked = False
        self._num_due += execution.num_steps
        self._queue.append(execution)

    def confirm_steps(self, num_steps: int) -> None:
        """Note that `num_steps` steps were counted, or reported as missing by their worker."""
        self._num_due -= num_steps

    def ask_no_more(self) -> None:
        """Note that no more executions will be asked for, unless steps are reported missing."""
        self._all_asked = True

    def forget(self) -> None:
        """Drop the pending executions, since the epoch has ended."""
        self._queue.clear()
        self._workers.splits.forget_unfinished()
        self._num_due = sum(e.num_steps for e in self._held())

    def put_back(self, split: int | None, executions: Iterable[Execution]) -> None:
        """Put executions before the pending ones.

        Executions that are partly applied need the same batches again, so they wait with their
        split. If the data never end, or executions carry their batches, any worker may retry them.
        """
        executions = [*executions]
        bound = []
        if split is not None and not self._workers.splits[split].is_endless:
            bound = [execution for execution in executions if any(execution.applied)]
            executions = executions[len(bound) :]  # they are the first
            self._workers.splits.put_back(split, bound)
        self._queue.extendleft(reversed(executions))

    def take_back(self, index: int) -> None:
        """Take back the executions that a session was given and did not run, with their batches."""
        worker = self._workers[index]
        for execution in worker.running:
            self._admission.take_back(index, execution.num_steps)
            worker.num_given -= 1
            if worker.split is not None:
                self._workers.splits[worker.split].give_out(-execution.num_steps)
        self.put_back(worker.split, worker.running)
        worker.running.clear()

    def deal(self) -> list[Command]:
        """Send pending executions to workers that can take them, the least busy first.

        Among equally busy workers, the one that was given the fewest executions comes first.
        """
        commands = self._admission.take_in(self._employable())
        if self._workers.splits.num_unfinished:
            commands += self._deal_unfinished()
        while self._queue:
            steps = self._queue[0].num_steps
            free = [
                worker.turn(index)
                for index, worker in enumerate(self._workers.states)
                if self._has_room(worker)
                and self._workers.unfinished(worker) is None
                and self._allows(index, steps)
            ]
            if not free or self._num_awaited_before(min(free)) >= len(self._queue):
                break
            commands += self._send(min(free)[-1], self._queue.popleft())
        return commands

    def _deal_unfinished(self) -> list[Command]:
        """Send the executions that are pending with a split to its reader."""
        commands: list[Command] = []
        for index, worker in enumerate(self._workers.states):
            while (unfinished := self._workers.unfinished(worker)) is not None:
                if not self._has_room(worker) or not self._may_begin(index, unfinished):
                    break
                assert worker.split is not None  # `unfinished` comes from the split
                commands += self._send(index, self._workers.splits.take_unfinished(worker.split))
        return commands

    def deal_after_progress(self) -> list[Command]:
        """Send pending executions if the admission's progress has changed since the last call."""
        before, self._progress = self._progress, self._admission.progress
        return self.deal() if before != self._progress else []

    def take_out_idle(self) -> list[Command]:
        """Remove workers that have nothing to push, so no synchronous update waits for them."""
        commands: list[Command] = []
        for index in self._admission.members:
            worker = self._workers[index]
            has_work = bool(self._queue) or not self._all_asked
            if not worker.running and not (has_work and self._has_room(worker)):
                commands += self._admission.stop_waiting_for(index)
        return commands

    def _num_awaited_before(self, turn: tuple[int, int, int]) -> int:
        """Return how many workers come before `turn`, and have a session that begins soon.

        As many pending executions are kept for them. Otherwise, where each execution has a flight
        for itself, the worker whose session begins first would do them all.
        """
        return sum(
            worker.split is not None
            and not worker.is_leaving
            and self._workers.has_data(worker, WorkerStatus.AWAITED)
            and worker.turn(index) < turn
            for index, worker in enumerate(self._workers.states)
        )

    def _may_begin(self, index: int, unfinished: Execution) -> bool:
        """Return whether a worker may retry an execution now, which only it can do.

        If nothing else is pending, workers without executions count as idle: no one waits for them.
        """
        if self._allows(index, unfinished.num_steps):
            return True
        if self._queue:
            return False
        for other, worker in enumerate(self._workers.states):
            if other != index and worker.status is WorkerStatus.READING and not worker.running:
                self._admission.set_idle(other)
        return self._allows(index, unfinished.num_steps)

    def _allows(self, index: int, steps: int) -> bool:
        is_idle = not self._workers[index].running
        return self._admission.allows(index, steps, is_idle=is_idle, readers=self._workers.readers)

    def _employable(self) -> Iterator[int]:
        """Yield the workers that could take a pending execution."""
        has_queue = bool(self._queue)
        for index, worker in enumerate(self._workers.states):
            if self._has_room(worker) and (has_queue or self._workers.unfinished(worker)):
                yield index

    def _has_room(self, worker: WorkerState) -> bool:
        if worker.is_leaving or len(worker.running) >= self._executions_ahead:
            return False
        return self._workers.has_data(worker)

    def _send(self, index: int, execution: Execution) -> list[Command]:
        split = self._workers[index].split
        left = None if split is None else self._workers.splits[split].left
        if left is None or left >= execution.num_steps:
            return [self._give(index, execution)]
        # This worker has no data for the remaining steps; another may have some.
        missing = Report(missing_steps=execution.num_steps - left)
        self._num_due -= missing.missing_steps
        return [missing, *(self._give(index, part) for part in execution.cut(left))]

    def _give(self, index: int, execution: Execution) -> Send:
        worker = self._workers[index]
        if worker.split is not None:
            self._workers.splits[worker.split].give_out(execution.num_steps)
        if execution.replicas != worker.replicas and not any(execution.applied):
            # An execution that is partly applied is retried in the same steps.
            execution = replace(execution, replicas=worker.replicas)
        self._admission.give(index, execution.num_steps)
        worker.running.append(execution)
        worker.num_given += 1
        return Send(index, execution)

    def _held(self) -> list[Execution]:
        """Return the executions that workers have."""
        return [
            e for worker in self._workers.states for e in (*worker.uncollected, *worker.running)
        ]

    def validate(self) -> None:
        """Raise AssertionError if a step is lost, or is in two places."""
        executions = [*self._queue, *self._workers.splits.all_unfinished(), *self._held()]
        assert len({id(e) for e in executions}) == len(executions), "an execution is in two places"
        num_steps = sum(execution.num_steps for execution in executions)
        assert num_steps == self._num_due, f"{num_steps} steps are there, {self._num_due} are due"
        running = [sum(e.num_steps for e in worker.running) for worker in self._workers.states]
        self._admission.validate(running)
