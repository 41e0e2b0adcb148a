"""The table of lanes of one ps: the applied pushes of each, their staleness, and the ps's clock.

The *clock* of a ps is the number of pushes that it has counted: those that it has applied, and
those that came too late for a synchronous update. A pull returns the clock, and the push that
follows sends it back. The *staleness* of the push is the difference from the current clock: the
number of other pushes that were counted since the pull.

The table is one int64 vector, so that a push reads it once and adds to it once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

# The number of lanes that have a place in the table, a power of two. The table takes 1.2 MB on a
# ps.
NUM_LANES = 4096
# A lane is an int32 number: the lower bits are its place, the higher bits the number of lanes that
# had the place before. So lanes that reuse a place differ.
LANES_END = 2**31
# The lane of a push that must not be applied.
NO_LANE = -1
# The error of a push in a closed lane.
REFUSED = "kerasps: a push was refused, since its worker was given up"
# The number of bins in which stalenesses are counted: one for each of 0 to 30, one for 31 or more.
NUM_BINS = 32

# If the pushes in a lane belong to numbered calls, only those of the last call are counted, in so
# many lower bits; the higher bits are the number of that call.
_BITS_OF_COUNT = 32
# The offsets of a lane's numbers: the number of applied pushes; the sum of their staleness; the
# largest staleness; the lane that has the place (-1 minus that if closed); the bins, which count
# pushes by staleness.
_APPLIED, _TOTAL, _LARGEST, _LANE, _BINS = 0, 1, 2, 3, 4
_WIDTH = _BINS + NUM_BINS
_CLOCK = NUM_LANES * _WIDTH
TABLE_SIZE = _CLOCK + 1


@dataclass(frozen=True)
class LaneRecord:
    """The record that a ps keeps of the pushes in one lane."""

    applied: int  # the number of applied pushes; for numbered calls, see `split_entry`
    total: int  # the sum of their staleness
    largest: int  # the largest staleness
    counts: np.ndarray  # the number of pushes by staleness; the last entry includes larger ones

    @classmethod
    def of(cls, numbers: np.ndarray) -> LaneRecord:
        """Return the record of the numbers that `read_lanes` or `close` returned for one lane."""
        applied, total, largest = (int(numbers[i]) for i in (_APPLIED, _TOTAL, _LARGEST))
        return cls(applied, total, largest, numbers[_BINS:])


def new_table() -> tf.Tensor:
    """Return an initial table: no push is applied, and the first lane of each place is open."""
    places = tf.range(NUM_LANES, dtype=tf.int64)[:, None]
    rows = tf.pad(places, [[0, 0], [_LANE, _WIDTH - _LANE - 1]])
    return tf.pad(tf.reshape(rows, [-1]), [[0, TABLE_SIZE - _CLOCK]])


def place_of(lane: tf.Tensor) -> tf.Tensor:
    """Return the place of a lane in a table of all lanes."""
    return tf.bitwise.bitwise_and(lane, NUM_LANES - 1)


def is_open(table: tf.Tensor, lane: tf.Tensor) -> tf.Tensor:
    """Return whether pushes in a lane are applied. Call on the ps, with its lock held."""
    held = tf.raw_ops.ResourceGather(
        resource=table, indices=place_of(lane) * _WIDTH + _LANE, dtype=tf.int64
    )
    return tf.equal(held, tf.cast(lane, tf.int64))


def read_clock(table: tf.Tensor) -> tf.Tensor:
    """Return the clock of a ps, an int64 scalar. Call on the ps."""
    return tf.raw_ops.ResourceGather(
        resource=table, indices=tf.constant(_CLOCK), dtype=tf.int64, validate_indices=False
    )


def read_lanes(table: tf.Tensor, lanes: tf.Tensor) -> tf.Tensor:
    """Return the numbers of some lanes, all at the same instant. Call on the ps.

    Returns the numbers of a `LaneRecord` for each lane; zeros for a lane whose place was reused.
    """
    places = place_of(lanes)[:, None] * _WIDTH + tf.range(_WIDTH)[None]
    rows = tf.raw_ops.ResourceGather(resource=table, indices=places, dtype=tf.int64)
    return tf.where(_is_of(rows[:, _LANE], lanes)[:, None], rows, 0)


def _is_of(held: tf.Tensor, lane: tf.Tensor) -> tf.Tensor:
    """Return whether a place, given its number at `_LANE`, belongs to a lane, open or closed."""
    lane = tf.cast(lane, tf.int64)
    return tf.logical_or(tf.equal(held, lane), tf.equal(held, -1 - lane))


def split_entry(applied: int) -> tuple[int, int]:
    """Return the number of the last call in a lane, and how many of its pushes were applied."""
    return applied >> _BITS_OF_COUNT, applied & (2**_BITS_OF_COUNT - 1)


def apply_in_lane(
    table: tf.Tensor,
    lane: tf.Tensor,
    clock: tf.Tensor | None,
    apply: Callable[[], None],
    number: tf.Tensor | None = None,
) -> None:
    """Apply a push and count it; fail if its lane is closed. Call on its ps, with the lock held.

    Args:
        clock: the clock at the worker's pull; None if it pulled nothing from this ps.
        number: the number of the call that the push belongs to, an int32 scalar of at least 1.
    """
    first, one = place_of(lane) * _WIDTH, tf.constant(1, tf.int64)
    places = [first, first + _LARGEST, first + _LANE, tf.constant(_CLOCK)]
    applied, largest, held, now = tf.unstack(
        tf.raw_ops.ResourceGather(resource=table, indices=tf.stack(places), dtype=tf.int64)
    )
    # Not `tf.cond`, which takes a tenth of a small step's time.
    checked = tf.raw_ops.Assert(condition=tf.equal(held, tf.cast(lane, tf.int64)), data=[REFUSED])
    counted = one
    if number is not None:
        start = tf.bitwise.left_shift(tf.cast(number, tf.int64), _BITS_OF_COUNT)
        counted = tf.maximum(applied, start) + one - applied
    added = [(first, counted), (tf.constant(_CLOCK), one)]
    if clock is not None:
        staleness = now - clock
        bin_of = tf.cast(tf.minimum(staleness, NUM_BINS - 1), tf.int32)
        added += [
            (first + _TOTAL, staleness),
            (first + _LARGEST, tf.maximum(staleness - largest, 0)),
            (first + _BINS + bin_of, one),
        ]
    with tf.control_dependencies([checked]):
        apply()
        tf.raw_ops.ResourceScatterAdd(
            resource=table,
            indices=tf.stack([place for place, _ in added]),
            updates=tf.stack([value for _, value in added]),
        )


def apply_if_in_lane(
    table: tf.Tensor,
    lane: tf.Tensor,
    clock: tf.Tensor | None,
    apply: Callable[[], None],
    number: tf.Tensor | None = None,
) -> None:
    """Run `apply_in_lane`, or nothing if `lane` is `NO_LANE`."""
    tf.cond(lane == NO_LANE, lambda: None, lambda: apply_in_lane(table, lane, clock, apply, number))


def close(table: tf.Tensor, lane: tf.Tensor) -> tf.Tensor:
    """Close a lane; return the numbers of its `LaneRecord`. Call with the lock held.

    It may be called again. For a lane whose place was reused, it returns zeros.
    """
    first = place_of(lane) * _WIDTH
    row = tf.raw_ops.ResourceGather(
        resource=table, indices=first + tf.range(_WIDTH), dtype=tf.int64
    )
    is_its = _is_of(row[_LANE], lane)
    update = tf.raw_ops.ResourceScatterUpdate(
        resource=table,
        indices=first + _LANE,
        updates=tf.where(is_its, -1 - tf.cast(lane, tf.int64), row[_LANE]),
    )
    with tf.control_dependencies([update]):
        return tf.where(is_its, row, 0)


def reuse_place(table: tf.Tensor, lane: tf.Tensor) -> tf.Tensor:
    """Give a lane the place of an earlier one; return 0. Call with the lock held.

    It may be called again, until the first push in the lane.
    """
    row = tf.one_hot(_LANE, _WIDTH, tf.cast(lane, tf.int64), tf.zeros([], tf.int64), dtype=tf.int64)
    update = tf.raw_ops.ResourceScatterUpdate(
        resource=table, indices=place_of(lane) * _WIDTH + tf.range(_WIDTH), updates=row
    )
    with tf.control_dependencies([update]):
        return tf.constant(0, tf.int64)
