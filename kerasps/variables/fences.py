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

import tensorflow as tf

from kerasps.cluster import call_apart, fetch
from kerasps.variables.named import NamedVariable

# A lane is given again after so many others. They take 32 kB of a ps.
NUM_LANES = 4096
# A call's pushes are counted in so many bits, its number stands above them.
_BITS_OF_COUNT = 32
# The lane of steps that the coordinator does itself. Nobody can lose it.
OPEN_LANE = 0
# What a push that is not to be applied has in place of its lane.
NO_LANE = -1
# What a push in a closed lane ends in.
REFUSED = "kerasps: a push was refused, since its worker was given up"


class Fences:
    """The lanes on the ps tasks of a strategy.

    A lane's entry is the number of pushes applied in it; closed, it is -1 less that number. Where
    pushes are of numbered calls, it counts those of the last call, and holds the call's number.

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
        """Return the entries of all lanes on the ps `device`, int64 of shape `[NUM_LANES]`."""
        with self._lock:
            if device not in self._tables:
                with tf.init_scope(), tf.device(device):
                    self._tables[device] = NamedVariable(
                        lambda: tf.zeros([NUM_LANES], tf.int64),
                        shape=[NUM_LANES],
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
            self._call("reset", _reset, lane, devices)
        return lane

    def close_lane(self, lane: int, devices: Sequence[str]) -> tuple[int, ...]:
        """Have each of `devices` refuse what comes in a lane; return how many it has applied.

        What is being applied is applied to its end first, and counts. Thread: any.

        Raises:
            tf.errors.OpError: a ps is lost.
        """
        return self._call("close", _close, lane, devices)

    def close_call(self, lane: int, number: int, devices: Sequence[str]) -> tuple[int, ...]:
        """Do as `close_lane` for a lane of calls; return how many of one call were applied."""
        entries = self.close_lane(lane, devices)
        counts = [divmod(entry, 2**_BITS_OF_COUNT) for entry in entries]
        return tuple(count if last == number else 0 for last, count in counts)

    def _call(
        self, name: str, function: Callable[..., tf.Tensor], lane: int, devices: Sequence[str]
    ) -> tuple[int, ...]:
        returned: list[tf.Tensor] = []
        for device in devices:
            traced = self._traced(name, function, device)
            with tf.device(device):
                returned += call_apart(traced, [tf.constant(lane)])
        return tuple(int(value) for value in fetch(returned))

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


def apply_in_lane(
    table: tf.Tensor, lane: tf.Tensor, apply: Callable[[], None], number: tf.Tensor | None = None
) -> None:
    """Apply a push and count it; fail where its lane is closed. Call on its ps, with the lock held.

    Args:
        table: the handle of the ps's table.
        lane: the lane, an int32 scalar.
        apply: adds the operations that apply the push.
        number: the number of the call that the push is of, an int32 scalar: 1 or more.
    """
    entry = _entry(table, lane)
    # Not `tf.cond`, which takes a tenth of a small step's time.
    is_open = tf.raw_ops.Assert(condition=entry >= 0, data=[REFUSED])
    one = tf.constant(1, tf.int64)
    with tf.control_dependencies([is_open]):
        apply()
        if number is None:
            tf.raw_ops.ResourceScatterAdd(resource=table, indices=lane, updates=one)
        else:
            first = tf.bitwise.left_shift(tf.cast(number, tf.int64), _BITS_OF_COUNT)
            tf.raw_ops.ResourceScatterUpdate(
                resource=table, indices=lane, updates=tf.maximum(entry, first) + one
            )


def apply_if_in_lane(
    table: tf.Tensor, lane: tf.Tensor, apply: Callable[[], None], number: tf.Tensor | None = None
) -> None:
    """Do as `apply_in_lane`, or nothing where `lane` is `NO_LANE`."""
    tf.cond(lane == NO_LANE, lambda: None, lambda: apply_in_lane(table, lane, apply, number))


def _entry(table: tf.Tensor, lane: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ResourceGather(resource=table, indices=lane, dtype=tf.int64)


def _close(table: tf.Tensor, lane: tf.Tensor) -> tf.Tensor:
    entry = _entry(table, lane)
    applied = tf.where(entry < 0, -1 - entry, entry)
    update = tf.raw_ops.ResourceScatterUpdate(resource=table, indices=lane, updates=-1 - applied)
    with tf.control_dependencies([update]):
        return tf.identity(applied)


def _reset(table: tf.Tensor, lane: tf.Tensor) -> tf.Tensor:
    zero = tf.constant(0, tf.int64)
    update = tf.raw_ops.ResourceScatterUpdate(resource=table, indices=lane, updates=zero)
    with tf.control_dependencies([update]):
        return tf.identity(zero)
