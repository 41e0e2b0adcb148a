"""Fences: what lets each push be applied once, whatever becomes of the worker that sent it.

Each ps has a table of *lanes*. A worker sends its pushes in one lane, from when it is made ready
for executions until it is lost; the ps counts, under its lock, those that it has applied. When the
worker is lost, its lane is closed on every ps. From then on a push in that lane is refused, so one
that is late, or of a worker that was only asleep, changes nothing; and the count says how many
steps need not be applied again.

The idea is that of fencing tokens (M. Kleppmann, "Designing Data-Intensive Applications", 2017,
chapter 8).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.cluster import call_apart, fetch, persist, sent
from kerasps.variables.lane_table import (
    NUM_LANES,
    TABLE_SIZE,
    LaneRecord,
    close,
    read_lanes,
    reset,
    split_entry,
)
from kerasps.variables.named import NamedVariable

# The lane of steps that the coordinator does itself. Nobody can lose it.
OPEN_LANE = 0


class Fences:
    """The lanes on the ps tasks of a strategy.

    Args:
        mutex: returns the lock of a device, by the device's name.
    """

    def __init__(self, mutex: Callable[[str], tf.Tensor]) -> None:
        self._mutex = mutex
        self._lock = threading.Lock()
        self._next = OPEN_LANE
        self._tables: dict[str, NamedVariable] = {}
        self._functions: dict[tuple[str, str], Any] = {}

    def table(self, device: str) -> NamedVariable:
        """Return the table of lanes on the ps `device` (see `lane_table`)."""
        with self._lock:
            if device not in self._tables:
                with tf.init_scope(), tf.device(device):
                    self._tables[device] = NamedVariable(
                        lambda: tf.zeros([TABLE_SIZE], tf.int64),
                        shape=[TABLE_SIZE],
                        dtype=tf.int64,
                        trainable=False,
                        name="lanes",
                    )
            return self._tables[device]

    def open_lane(self, devices: Sequence[str]) -> int:
        """Return a lane that nobody has, in which no push was applied on any of `devices`."""
        with self._lock:
            self._next += 1
            number = self._next
        lane = OPEN_LANE + 1 + (number - 1) % (NUM_LANES - 1)
        if number >= NUM_LANES:
            self._call("reset", reset, lane, devices)
        return lane

    def close_lane(self, lane: int, devices: Sequence[str]) -> tuple[int, ...]:
        """Have each of `devices` refuse what comes in a lane; return how many it has applied.

        What is being applied is applied to its end first, and counts. Thread: any.

        Raises:
            tf.errors.OpError: a ps is lost.
        """
        return self._call("close", close, lane, devices)

    def records(self, lanes: Sequence[int], devices: Sequence[str]) -> list[list[LaneRecord]]:
        """Return what each of `devices` has noted of each of `lanes`. Thread: any.

        What a ps has noted is of one instant.

        Raises:
            tf.errors.OpError: a ps is lost.
        """

        def read() -> list[np.ndarray]:
            returned: list[tf.Tensor] = []
            for device in devices if lanes else ():
                traced = self._reading(device)
                with tf.device(device):
                    returned += call_apart(traced, [sent(tf.constant(lanes, tf.int32))])
            return fetch(returned)

        return [[LaneRecord.of(row) for row in rows] for rows in persist(read)]

    def _reading(self, device: str) -> Any:
        table = self.table(device)
        with self._lock:
            if ("read", device) not in self._functions:

                def read(lanes: tf.Tensor) -> tf.Tensor:
                    with tf.device(device):
                        return read_lanes(table.handle, lanes)

                with tf.init_scope():
                    self._functions["read", device] = tf.function(
                        read, autograph=False
                    ).get_concrete_function(tf.TensorSpec([None], tf.int32))
            return self._functions["read", device]

    def close_call(self, lane: int, number: int, devices: Sequence[str]) -> tuple[int, ...]:
        """Do as `close_lane` for a lane of calls; return how many of one call were applied."""
        ends = [split_entry(entry) for entry in self.close_lane(lane, devices)]
        return tuple(count if last == number else 0 for last, count in ends)

    def _call(
        self, name: str, function: Callable[..., tf.Tensor], lane: int, devices: Sequence[str]
    ) -> tuple[int, ...]:
        def call() -> tuple[int, ...]:
            returned: list[tf.Tensor] = []
            for device in devices:
                traced = self._traced(name, function, device)
                with tf.device(device):
                    returned += call_apart(traced, [tf.constant(lane)])
            return tuple(int(value) for value in fetch(returned))

        return persist(call)

    def _traced(self, name: str, function: Callable[..., tf.Tensor], device: str) -> Any:
        table = self.table(device)
        with self._lock:
            if (name, device) not in self._functions:

                def under_lock(lane: tf.Tensor) -> tf.Tensor:
                    with tf.device(device):
                        lane = tf.identity(lane)
                        with tf.control_dependencies([lane]):
                            lock = tf.raw_ops.MutexLock(mutex=self._mutex(device))
                        with tf.control_dependencies([lock]):
                            returned = function(table.handle, lane)
                        with tf.control_dependencies([returned]):
                            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
                        return returned

                with tf.init_scope():
                    self._functions[name, device] = tf.function(
                        under_lock, autograph=False
                    ).get_concrete_function(tf.TensorSpec([], tf.int32))
            return self._functions[name, device]
