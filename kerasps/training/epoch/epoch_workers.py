"""The workers of an epoch, their executions and results, and the splits that they read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kerasps.training.epoch.epoch_events import Execution, Open, SplitPosition
from kerasps.training.epoch.splits import SplitLedger, SplitStatus
from kerasps.training.epoch.worker_state import WorkerActivity, WorkerState, WorkerStatus


class EpochWorkers:
    """The state of the workers, and the split that each of them reads.

    Any code may read it. Only `EpochState` and its `Dealer` change it.
    """

    def __init__(self, num_workers: int, lost: Iterable[int]) -> None:
        self.states = [WorkerState() for _ in range(num_workers)]
        self.splits = SplitLedger(0)
        self._lost = set(lost)
        for index in self._lost:
            self.states[index].status = WorkerStatus.LOST

    # Queries

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> WorkerState:
        return self.states[index]

    @property
    def lost_workers(self) -> frozenset[int]:
        """The workers that were lost and have done nothing since."""
        return frozenset(self._lost)

    @property
    def running(self) -> dict[int, list[Execution]]:
        """The executions that were sent to each worker and are not known to be done."""
        return {i: [*worker.running] for i, worker in enumerate(self.states) if worker.running}

    @property
    def has_results_due(self) -> bool:
        """True while a worker holds results."""
        return any(worker.uncollected for worker in self.states)

    def holds_results(self, index: int) -> bool:
        """Return whether a worker holds results."""
        return bool(self.states[index].uncollected)

    def is_drained(self, index: int) -> bool:
        """Return whether a leaving worker holds no executions or results any more."""
        worker = self.states[index]
        return worker.is_leaving and worker.status is WorkerStatus.LOST

    def awaits(self, index: int) -> bool:
        """Return whether a worker has no session yet, and is not known to be lost."""
        return self.states[index].status is WorkerStatus.AWAITED

    @property
    def is_exhausted(self) -> bool:
        """True once all data are read, so that no worker can do any pending step."""
        nobody_reads = all(w.status in (WorkerStatus.DRY, WorkerStatus.LOST) for w in self.states)
        return nobody_reads and self.splits.all_read

    def has_data(self, worker: WorkerState, status: WorkerStatus = WorkerStatus.READING) -> bool:
        """Return whether a worker is in `status`, and may have batches for another execution."""
        if worker.status is not status or worker.is_exhausted:
            return False
        return worker.split is None or self.splits[worker.split].left != 0

    def readers(self) -> list[int]:
        """Return the workers that have data."""
        return [i for i, worker in enumerate(self.states) if self.has_data(worker)]

    def unfinished(self, worker: WorkerState) -> Execution | None:
        """Return the execution that a worker must retry first, on its next batches, or None."""
        if worker.split is None:
            return None
        unfinished = self.splits[worker.split].unfinished
        return unfinished[0] if unfinished else None

    def activities(self, *, is_queued: bool) -> dict[int, WorkerActivity]:
        """Return the part of each worker in the epoch, by its index."""
        return {
            index: WorkerActivity(len(worker.running), self._waits_for(worker, is_queued))
            for index, worker in enumerate(self.states)
        }

    def _waits_for(self, worker: WorkerState, is_queued: bool) -> str:
        match worker.status:
            case WorkerStatus.AWAITED:
                return "session"
            case WorkerStatus.OPENING | WorkerStatus.DRY:
                return "data"
            case WorkerStatus.LOST:
                return ""
        if worker.running or worker.is_collecting:
            return ""
        if not self.has_data(worker):
            return "data"
        return "workers" if is_queued else "coordinator"

    # Changes

    def begin_pass(self, num_splits: int, positions: Sequence[SplitPosition]) -> list[int]:
        """Begin a pass with new splits; return the workers that are not lost."""
        self.splits = SplitLedger(num_splits, positions)
        for index, worker in enumerate(self.states):
            worker.split, worker.num_given = None, 0
            worker.shares = worker.is_exhausted = False
            if index in self._lost:
                # Any worker may take its split, also this one if it comes back first.
                self._release_reserved(index)
        return [index for index in range(len(self.states)) if index not in self._lost]

    def grow(self, num_workers: int) -> None:
        """Add workers, up to `num_workers`, behind the present ones."""
        fewest = min(worker.num_given for worker in self.states)
        new = num_workers - len(self.states)
        self.states += [WorkerState(num_given=fewest) for _ in range(new)]

    def lose(self, index: int) -> None:
        """Note that a worker is lost, and release the split that is reserved for it."""
        self._lost.add(index)
        self._release_reserved(index)
        self.states[index].status = WorkerStatus.LOST

    def note_alive(self, index: int) -> None:
        """Note that a worker is not lost: it has done something, or waits for data."""
        self._lost.discard(index)

    def assign(self, index: int, min_batches: int) -> None:
        """Assign another split to a worker, if one is available."""
        worker = self.states[index]
        worker.is_exhausted = worker.shares = False
        worker.split = None
        if worker.is_leaving:
            return
        worker.split = self.splits.assign_to(index)
        if worker.split is None and not self.splits.has_untaken_split(index):
            worker.split = self.splits.divide(min_batches)
            if worker.split is None:
                worker.split = self.splits.share(index)
                worker.shares = worker.split is not None

    def open(self, index: int) -> Open:
        """Return the order to open the split that a worker was assigned."""
        split = self.states[index].split
        if split is None:
            return Open(index, None, 0)
        opened = self.splits[split]
        return Open(index, opened.source, opened.confirmed)

    def release(self, index: int) -> None:
        """Release the split of a worker, so that others may read on in it."""
        worker = self.states[index]
        if worker.split is not None and not worker.shares:
            self.splits[worker.split].release()
        worker.split, worker.shares = None, False

    def _release_reserved(self, index: int) -> None:
        """Release the split that is reserved for a worker, which may not have begun it."""
        if index < len(self.splits) and self.splits[index].status is SplitStatus.RESERVED:
            self.splits[index].release()

    # Checks

    def validate(self) -> None:
        """Raise AssertionError if the states of workers and splits contradict each other."""
        readers = [0] * len(self.splits)
        for index, worker in enumerate(self.states):
            worker.validate()
            if worker.status in (WorkerStatus.LOST, WorkerStatus.DRY):
                assert (index in self._lost) == (worker.status is WorkerStatus.LOST)
            if worker.status is WorkerStatus.READING:
                assert (worker.split is None) == (len(self.splits) == 0), "it reads no split"
            if worker.split is not None and worker.shares:
                assert self.splits[worker.split].is_endless, "a split with an end is shared"
            elif worker.split is not None:
                readers[worker.split] += 1
                held = sum(e.num_steps for e in [*worker.uncollected, *worker.running])
                self.splits[worker.split].validate_held(held)
        self.splits.validate(readers)
