"""The staleness of a training's updates, as the ps have counted it, by worker."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from kerasps.variables.lanes.fences import Fences
from kerasps.variables.lanes.lane_table import NUM_BINS, LaneRecord
from kerasps.words import Records, text_table


@dataclass(frozen=True)
class WorkerStaleness:
    """The staleness of one worker's pushes.

    The staleness of a push is the number of other pushes that its ps has applied since the worker
    began to pull for the step. A step pushes once to each ps that holds variables of the model.

    Args:
        worker: the index of the worker.
        counts: the number of pushes of each staleness, from 0. The last entry, 31, also counts
            larger ones.
        mean: the mean staleness; 0.0 without a push.
        max: the largest staleness.
    """

    worker: int
    counts: tuple[int, ...]
    mean: float
    max: int

    @property
    def pushes(self) -> int:
        """The number of pushes."""
        return sum(self.counts)


class Staleness(Records[WorkerStaleness]):
    """The staleness of each worker's pushes, as `WorkerStaleness`; prints as a histogram.

    Workers are in the order of their indices, without those that have pushed nothing.

    ```python
    print(strategy.staleness())  # after `model.fit`, or while it runs
    worst = max((worker.max for worker in strategy.staleness()), default=0)
    ```

    Args:
        workers: the staleness of each worker.
    """

    def __init__(self, workers: Sequence[WorkerStaleness]) -> None:
        super().__init__(workers)

    @property
    def pushes(self) -> int:
        """The total number of pushes."""
        return sum(worker.pushes for worker in self)

    @property
    def mean(self) -> float:
        """The mean staleness of all pushes; 0.0 without one."""
        total = sum(worker.mean * worker.pushes for worker in self)
        return total / self.pushes if self.pushes else 0.0

    @property
    def max(self) -> int:
        """The largest staleness of all pushes; 0 without one."""
        return max((worker.max for worker in self), default=0)

    def __repr__(self) -> str:
        return f"<Staleness of {self.pushes} pushes: mean={self.mean:.2f} max={self.max}>"

    def __str__(self) -> str:
        bins = [span for span in _SPANS if span.start <= max(self.max, 1)]
        rows = [("worker", "pushes", "mean", "max", *(_label(span) for span in bins))]
        for worker in self:
            counts = [f"{sum(worker.counts[span.start : span.stop]):,}" for span in bins]
            rows.append(
                (
                    str(worker.worker),
                    f"{worker.pushes:,}",
                    f"{worker.mean:.2f}",
                    f"{worker.max}",
                    *counts,
                )
            )
        return text_table(rows)


# The columns of the histogram: 0, 1, 2, 3, 4-7, 8-15, 16-30, 31+.
_SPANS = [
    *(range(i, i + 1) for i in range(4)),
    range(4, 8),
    range(8, 16),
    range(16, NUM_BINS - 1),
    range(NUM_BINS - 1, NUM_BINS),
]


def _label(span: range) -> str:
    if span.stop == NUM_BINS:
        return f"{span.start}+"
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"


class StalenessMeter:
    """Knows the lanes in which a training's workers push, and reads their records from the ps."""

    def __init__(self, fences: Fences) -> None:
        self._fences = fences
        self._lock = threading.Lock()
        self._is_live = False
        self.start(())

    def start(self, devices: Sequence[str]) -> None:
        """Forget all counts, and begin with steps that push to the ps `devices`."""
        with self._lock:
            self._devices = devices
            self._lanes: dict[int, int] = {}
            # The records of lanes that were given back, by worker.
            self._ended: dict[int, list[LaneRecord]] = {}
            self._report = Staleness([])
            self._is_live = True

    def add_lane(self, worker: int, lane: int) -> None:
        """Note that a worker pushes in a lane from now on. Thread: any."""
        with self._lock:
            self._lanes[lane] = worker

    def end_lane(self, worker: int, lane: int, records: Sequence[LaneRecord]) -> None:
        """Note that a lane was given back, so that no push follows in it. Thread: any."""
        with self._lock:
            if self._lanes.pop(lane, None) is not None:
                ended = self._ended.get(worker, [])
                self._ended[worker] = [_sum([*ended, *records])]

    def finish(self) -> None:
        """Read the records for the last time, and give the lanes back. Call after all steps."""
        self.report()
        self._is_live = False
        with self._lock:
            for lane in self._lanes:
                self._fences.give_back(lane)

    @property
    def last_report(self) -> Staleness:
        """The report that was read last, without asking a ps. Thread: any."""
        return self._report

    def report(self) -> Staleness:
        """Return the staleness since `start`, or the last report if a ps is lost.

        Thread: any.
        """
        with self._lock:
            lanes, devices, ended = list(self._lanes), self._devices, dict(self._ended)
            workers = list(self._lanes.values())
        if self._is_live:
            try:
                of_ps = self._fences.records(lanes, devices)
            except tf.errors.OpError:
                self._is_live = False
            else:
                found = {worker: list(records) for worker, records in ended.items()}
                for records in of_ps:
                    for worker, record in zip(workers, records, strict=True):
                        found.setdefault(worker, []).append(record)
                self._report = _summed(found)
        return self._report


def _sum(records: Sequence[LaneRecord]) -> LaneRecord:
    return LaneRecord(
        sum(record.applied for record in records),
        sum(record.total for record in records),
        max(record.largest for record in records),
        np.sum([record.counts for record in records], axis=0),
    )


def _summed(by_worker: Mapping[int, Sequence[LaneRecord]]) -> Staleness:
    """Return a report of the records of each worker."""
    found = []
    for worker, records in sorted(by_worker.items()):
        record = _sum(records)
        pushes = int(record.counts.sum())
        if pushes:
            mean, counts = record.total / pushes, tuple(record.counts.tolist())
            found.append(WorkerStaleness(worker, counts, mean, record.largest))
    return Staleness(found)
