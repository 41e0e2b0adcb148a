"""Fences: a ps applies each push once, also when the worker that sent it is lost.

Each ps has a table of *lanes*. A worker sends its pushes in one lane, from when it is made ready
for executions until it is lost. The ps counts the applied pushes of each lane, under its lock. When
the worker is lost, kerasps closes its lane on every ps. From then on a ps refuses every push in
that lane. So a late push, or one of a worker that was only suspended, changes nothing. The count
says how many steps need not be applied again.

There is room for some 4,000 lanes at a time. When a lane is given back, a new lane reuses its
place; the place that has been free longest is reused first. A lane's number differs from those of
earlier lanes of its place, so a push in a lane that was given back long ago is refused too.

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
from kerasps.variables.lanes.lane_table import (
    LANES_END,
    NUM_LANES,
    TABLE_SIZE,
    LaneRecord,
    close,
    new_table,
    read_lanes,
    reuse_place,
    split_entry,
)
from kerasps.variables.storage.named import NamedVariable

# The lane of steps that the coordinator runs. It is never closed.
OPEN_LANE = 0


class Fences:
    """The lanes on the ps tasks of a strategy.

    Args:
        num_lanes: the number of lanes at a time, `OPEN_LANE` included.
    """

    def __init__(self, mutex: Callable[[str], tf.Tensor], num_lanes: int = NUM_LANES) -> None:
        self._mutex = mutex
        self._lock = threading.Lock()
        self._collecting = threading.Lock()
        # Changed without the lock, by atomic calls only: a lane may be given back at any instant,
        # when Python collects the object that held it.
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
        """Return a free lane, in which no push was applied on any of `devices`.

        Call `give_back` when nothing more is pushed in it.

        Raises:
            KeraspsError: all lanes are in use.
            tf.errors.OpError: a ps is lost.
        """
        # Trace now, while all tasks answer. A lane is closed when a worker hangs, and tracing would
        # wait for that worker.
        calls = [self._calls_on(device) for device in devices]
        make_ready([call.close for call in calls])
        lane = self._free_lane()
        self._held.add(lane)
        if lane >= NUM_LANES:  # it reuses the place of an earlier lane
            try:
                call_on_each([call.open for call in calls], lane)
            except BaseException:
                self.give_back(lane)
                raise
        return lane

    def give_back(self, lane: int) -> None:
        """Free the place of this lane for another one. Do nothing if it was given back before.

        Once another lane has the place, pushes in this lane are refused. Thread: any.
        """
        try:
            self._held.remove(lane)
        except KeyError:  # given back before, perhaps by another thread
            return
        if lane + NUM_LANES < LANES_END:
            self._free.append(lane + NUM_LANES)

    def _free_lane(self) -> int:
        with contextlib.suppress(IndexError):
            return self._free.popleft()
        # One thread at a time: `gc.collect` does nothing while another thread runs a collection.
        with self._collecting, contextlib.suppress(IndexError):
            if not self._free:
                # An interrupted training gives its lanes back when Python collects it.
                gc.collect()
            return self._free.popleft()
        raise KeraspsError(
            "No lane is free for the updates of a worker, so a ps cannot count them. Expected: a "
            "free lane; each running `fit` uses one per worker, and functions that are scheduled "
            f"on the `ClusterCoordinator` use two. Received: {len(self._held):,} lanes, all in "
            "use. Run fewer trainings at a time, or use fewer workers; or restart the script, "
            "which continues where it was if it uses `BackupAndRestore`."
        )

    def close_lane(self, lane: int, devices: Sequence[str]) -> tuple[int, ...]:
        """Close a lane on `devices`, which then refuse its pushes; return how many each applied.

        A push that is being applied is completed first, and counts. Thread: any. Raises
        tf.errors.OpError if a ps is lost.
        """
        return tuple(record.applied for record in self._close(lane, devices))

    def retire_lane(self, lane: int, devices: Sequence[str]) -> list[LaneRecord]:
        """Close a lane and give it back; return the record that each of `devices` has of it.

        Raises tf.errors.OpError if a ps is lost. The lane is given back nevertheless.
        """
        try:
            return self._close(lane, devices)
        finally:
            self.give_back(lane)

    def _close(self, lane: int, devices: Sequence[str]) -> list[LaneRecord]:
        closings = [self._calls_on(device).close for device in devices]
        return [LaneRecord.of(row) for row in call_on_each(closings, lane)]

    def records(self, lanes: Sequence[int], devices: Sequence[str]) -> list[list[LaneRecord]]:
        """Return the record that each of `devices` has of each of `lanes`. Thread: any.

        All records of one ps are of the same instant. Raises tf.errors.OpError if a ps is lost.
        """

        if not lanes:
            return []
        found = call_on_each([self._calls_on(device).read for device in devices], lanes)
        return [[LaneRecord.of(row) for row in rows] for rows in found]

    def close_call(self, lane: int, number: int, devices: Sequence[str]) -> tuple[int, ...]:
        """Close a lane of calls as `close_lane` does; return the applied pushes of one call.

        Returns how many pushes of that call each of `devices` applied.
        """
        ends = [split_entry(entry) for entry in self.close_lane(lane, devices)]
        return tuple(count if last == number else 0 for last, count in ends)

    def _calls_on(self, device: str) -> _LaneCalls:
        table = self.table(device)
        with self._lock:
            if device not in self._calls:
                self._calls[device] = _LaneCalls(device, table.handle, self._mutex(device))
            return self._calls[device]


class _LaneCalls:
    """The functions that one ps runs on its table of lanes."""

    def __init__(self, device: str, table: tf.Tensor, mutex: tf.Tensor) -> None:
        lane, lanes = tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.int32)
        self.open = OnPS(device, lambda lane: reuse_place(table, lane), lane, mutex=mutex)
        self.close = OnPS(device, lambda lane: close(table, lane), lane, mutex=mutex)
        self.read = OnPS(device, lambda lanes: read_lanes(table, lanes), lanes)
