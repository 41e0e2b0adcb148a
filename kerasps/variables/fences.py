"""Fences: what lets each push be applied once, whatever becomes of the worker that sent it.

Each ps has a table of *lanes*. A worker sends its pushes in one lane, from when it is made ready
for executions until it is lost; the ps counts, under its lock, those that it has applied. When the
worker is lost, its lane is closed on every ps. From then on a push in that lane is refused, so one
that is late, or of a worker that was only asleep, changes nothing; and the count says how many
steps need not be applied again.

There is room for some 4,000 lanes at a time. Who is done with one gives it back, and another takes
its place: the one that was given back first. A push says which of all lanes of a place it is in, so
one that comes when its lane was given back long ago is refused too.

The idea is that of fencing tokens (M. Kleppmann, "Designing Data-Intensive Applications", 2017,
chapter 8).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import deque
from collections.abc import Callable, Sequence

import tensorflow as tf

from kerasps.errors import KeraspsError
from kerasps.runtime.on_ps import OnPS, call_on_each, make_ready
from kerasps.variables.lane_table import (
    LANES_END,
    NUM_LANES,
    TABLE_SIZE,
    LaneRecord,
    close,
    new_table,
    open_anew,
    read_lanes,
    split_entry,
)
from kerasps.variables.named import NamedVariable

# The lane of steps that the coordinator does itself. Nobody can lose it.
OPEN_LANE = 0


class Fences:
    """The lanes on the ps tasks of a strategy.

    Args:
        mutex: returns the lock of a device, by the device's name.
        num_lanes: how many lanes there are at a time, the open one among them.
    """

    def __init__(self, mutex: Callable[[str], tf.Tensor], num_lanes: int = NUM_LANES) -> None:
        self._mutex = mutex
        self._lock = threading.Lock()
        self._collecting = threading.Lock()
        # Changed without the lock, by calls that nothing can interrupt: lanes are given back in the
        # middle of anything, where Python collects who held them.
        self._free = deque(range(OPEN_LANE + 1, num_lanes))
        self._held: set[int] = set()
        self._tables: dict[str, NamedVariable] = {}
        self._calls: dict[str, _LaneCalls] = {}

    def table(self, device: str) -> NamedVariable:
        """Return the table of lanes on the ps `device` (see `lane_table`)."""
        with self._lock:
            if device not in self._tables:
                with tf.init_scope(), tf.device(device):
                    self._tables[device] = NamedVariable(
                        new_table,
                        shape=[TABLE_SIZE],
                        dtype=tf.int64,
                        trainable=False,
                        name="lanes",
                    )
            return self._tables[device]

    def open_lane(self, devices: Sequence[str]) -> int:
        """Return a lane that nobody has, in which no push was applied on any of `devices`.

        Call `give_back` when nothing is pushed in it any more.

        Raises:
            KeraspsError: all lanes are in use.
            tf.errors.OpError: a ps is lost.
        """
        # While all tasks answer. A lane is closed when a worker hangs.
        calls = [self._calls_on(device) for device in devices]
        make_ready([call.close for call in calls])
        lane = self._take()
        self._held.add(lane)
        if lane >= NUM_LANES:  # it takes the place of another
            try:
                call_on_each([call.open for call in calls], lane)
            except BaseException:
                self.give_back(lane)
                raise
        return lane

    def give_back(self, lane: int) -> None:
        """Free the place of this lane for another one. Nothing happens where it was given back.

        What is pushed in it once the place was taken is refused. Thread: any.
        """
        try:
            self._held.remove(lane)
        except KeyError:  # another thread was first, it may be
            return
        if lane + NUM_LANES < LANES_END:
            self._free.append(lane + NUM_LANES)

    def _take(self) -> int:
        with contextlib.suppress(IndexError):
            return self._free.popleft()
        # One thread at a time: Python leaves a collection out where another thread has one run.
        with self._collecting, contextlib.suppress(IndexError):
            if not self._free:
                # A training that was interrupted gives its lanes back when it is collected.
                gc.collect()
            return self._free.popleft()
        raise KeraspsError(
            "No lane is free for the updates of a worker, and without one they could not be "
            "counted. Expected: a free lane; each `fit` that runs holds one for each worker, and "
            "functions that are scheduled on the `ClusterCoordinator` hold two. Received: "
            f"{len(self._held):,} lanes, all in use. Run fewer trainings at a time, or with fewer "
            "workers; or start the script again, and with `BackupAndRestore` it goes on."
        )

    def close_lane(self, lane: int, devices: Sequence[str]) -> tuple[int, ...]:
        """Close a lane on `devices`, which refuse its pushes; return how many each has applied.

        What is being applied is applied to its end first, and counts. Thread: any.

        Raises:
            tf.errors.OpError: a ps is lost.
        """
        return tuple(record.applied for record in self._close(lane, devices))

    def retire_lane(self, lane: int, devices: Sequence[str]) -> list[LaneRecord]:
        """Close a lane and give it back; return what each of `devices` has noted of it.

        Raises:
            tf.errors.OpError: a ps is lost. The lane is given back.
        """
        try:
            return self._close(lane, devices)
        finally:
            self.give_back(lane)

    def _close(self, lane: int, devices: Sequence[str]) -> list[LaneRecord]:
        closings = [self._calls_on(device).close for device in devices]
        return [LaneRecord.of(row) for row in call_on_each(closings, lane)]

    def records(self, lanes: Sequence[int], devices: Sequence[str]) -> list[list[LaneRecord]]:
        """Return what each of `devices` has noted of each of `lanes`. Thread: any.

        What a ps has noted is of one instant.

        Raises:
            tf.errors.OpError: a ps is lost.
        """

        if not lanes:
            return []
        found = call_on_each([self._calls_on(device).read for device in devices], lanes)
        return [[LaneRecord.of(row) for row in rows] for rows in found]

    def close_call(self, lane: int, number: int, devices: Sequence[str]) -> tuple[int, ...]:
        """Do as `close_lane` for a lane of calls; return how many of one call were applied."""
        ends = [split_entry(entry) for entry in self.close_lane(lane, devices)]
        return tuple(count if last == number else 0 for last, count in ends)

    def _calls_on(self, device: str) -> _LaneCalls:
        table = self.table(device)
        with self._lock:
            if device not in self._calls:
                self._calls[device] = _LaneCalls(device, table.handle, self._mutex(device))
            return self._calls[device]


class _LaneCalls:
    """The functions about lanes that one ps runs.

    Args:
        device: the device of the ps.
        table: the handle of its table of lanes.
        mutex: its lock.
    """

    def __init__(self, device: str, table: tf.Tensor, mutex: tf.Tensor) -> None:
        lane, lanes = tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.int32)
        self.open = OnPS(device, lambda lane: open_anew(table, lane), lane, mutex=mutex)
        self.close = OnPS(device, lambda lane: close(table, lane), lane, mutex=mutex)
        self.read = OnPS(device, lambda lanes: read_lanes(table, lanes), lanes)
