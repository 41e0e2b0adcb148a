"""The lane in which each worker pushes, and the pushes that were applied of a lost worker."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from kerasps.training.contract.staleness import StalenessMeter
from kerasps.training.epoch.epoch_events import WorkerEnd, WorkerEnded
from kerasps.variables.lanes.fences import OPEN_LANE, Fences


class WorkerLanes:
    """Opens a lane for each worker that is made ready, and closes it when the worker is lost.

    A worker's lane is given back when the worker gets another one. The last ones are given back
    when this object is garbage, since no session refers to it then.
    """

    def __init__(
        self,
        fences: Fences,
        devices: Sequence[str],
        meter: StalenessMeter,
        on_close: Callable[[int], None],
    ) -> None:
        self._fences = fences
        self._devices = devices
        self._meter = meter
        self._on_close = on_close
        self._lock = threading.Lock()
        self._lanes: dict[int, int] = {}
        weakref.finalize(self, _give_back, fences, self._lanes).atexit = False

    def open(self, worker: int) -> int:
        """Open and return a lane for a worker that is made ready for executions."""
        if not self._devices:
            return OPEN_LANE
        lane = self._fences.open_lane(self._devices)
        with self._lock:
            before = self._lanes.get(worker)
            self._lanes[worker] = lane
        self._meter.add_lane(worker, lane)
        if before is not None:
            # All pushes in it are counted, or the lane was closed.
            with contextlib.suppress(tf.errors.OpError):  # a ps is lost, and the flight fails
                records = self._fences.retire_lane(before, self._devices)
                self._meter.end_lane(worker, before, records)
        return lane

    def lane(self, worker: int) -> int:
        """Return the lane that was opened last for a worker; `OPEN_LANE` if none was."""
        with self._lock:
            return self._lanes.get(worker, OPEN_LANE)

    def end(self, worker: int, why: WorkerEnd, *, lane: int | None = None) -> WorkerEnded:
        """Close a worker's lane, the last one by default; return the event that the worker ended.

        No push in the lane is applied from now on. Every worker that ends does so here. If a ps is
        lost, the event says nothing of applied pushes: the training ends anyway.
        """
        try:
            applied = self._close(self.lane(worker) if lane is None else lane)
        except tf.errors.OpError:
            applied = ()
        return WorkerEnded(worker, why, applied)

    def _close(self, lane: int) -> tuple[int, ...]:
        """Close a lane; return how many pushes each ps has applied, () without a lane."""
        if lane == OPEN_LANE:
            return ()
        applied = self._fences.close_lane(lane, self._devices)
        self._on_close(lane)
        return applied

    @property
    def all(self) -> list[int]:
        """The lanes that were opened last, one for each worker."""
        with self._lock:
            return list(self._lanes.values())


def _give_back(fences: Fences, lanes: dict[int, int]) -> None:
    for lane in lanes.values():
        fences.give_back(lane)
