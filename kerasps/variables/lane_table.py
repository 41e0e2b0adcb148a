"""The table of lanes of one ps: what was applied in each, how stale it was, and the ps's clock.

The *clock* of a ps is the number of pushes that it has applied. A pull brings it, and the push that
follows has it again. The difference is the *staleness* of the push: how many others were applied
since the worker began to look.

The table is one int64 vector, so that a push looks once into it and adds once to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

# A lane is given again after so many others. They take 1.2 MB of a ps.
NUM_LANES = 4096
# What a push that is not to be applied has in place of its lane.
NO_LANE = -1
# What a push in a closed lane ends in.
REFUSED = "kerasps: a push was refused, since its worker was given up"
# A staleness is counted as it is up to one less than this, and together with larger ones from there
# on: 0 to 30, and 31 or more.
NUM_BINS = 32

# Where the pushes in a lane are of numbered calls, those of the last call alone are counted, in so
# many bits, and the number of that call stands above them.
_BITS_OF_COUNT = 32
# Where the numbers of a lane are, behind its first: how many pushes were applied (closed, it is -1
# less that number); the sum of their staleness; the largest; how many there were of each.
_APPLIED, _TOTAL, _LARGEST, _BINS = 0, 1, 2, 3
_WIDTH = _BINS + NUM_BINS
_CLOCK = NUM_LANES * _WIDTH
TABLE_SIZE = _CLOCK + 1


@dataclass(frozen=True)
class LaneRecord:
    """What a ps has noted of the pushes in one lane.

    Attributes:
        total: the sum of their staleness.
        largest: the largest.
        counts: of each staleness, how many pushes had it; the last entry counts larger ones too.
    """

    total: int
    largest: int
    counts: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray) -> LaneRecord:
        """Return what `read_lanes` has read of one lane."""
        return cls(int(numbers[_TOTAL]), int(numbers[_LARGEST]), numbers[_BINS:])


def read_clock(table: tf.Tensor) -> tf.Tensor:
    """Return the clock of a ps, an int64 scalar. Call on the ps."""
    return tf.raw_ops.ResourceGather(
        resource=table, indices=tf.constant(_CLOCK), dtype=tf.int64, validate_indices=False
    )


def read_lanes(table: tf.Tensor, lanes: tf.Tensor) -> tf.Tensor:
    """Return what there is of some lanes, all at one instant. Call on the ps.

    Args:
        table: the handle of the table.
        lanes: the lanes, an int32 vector.

    Returns:
        Per lane the numbers of a `LaneRecord`.
    """
    places = lanes[:, None] * _WIDTH + tf.range(_WIDTH)[None]
    return tf.raw_ops.ResourceGather(resource=table, indices=places, dtype=tf.int64)


def split_entry(applied: int) -> tuple[int, int]:
    """Return the number of the last call in a lane, and how many of its pushes were applied.

    Args:
        applied: what `close` returned.
    """
    return applied >> _BITS_OF_COUNT, applied & (2**_BITS_OF_COUNT - 1)


def apply_in_lane(
    table: tf.Tensor,
    lane: tf.Tensor,
    clock: tf.Tensor | None,
    apply: Callable[[], None],
    number: tf.Tensor | None = None,
) -> None:
    """Apply a push and count it; fail where its lane is closed. Call on its ps, with the lock held.

    Args:
        table: the handle of the ps's table.
        lane: the lane, an int32 scalar.
        clock: what the clock was when the worker pulled; None where it has pulled nothing here.
        apply: adds the operations that apply the push.
        number: the number of the call that the push is of, an int32 scalar from 1 on.
    """
    first, one = lane * _WIDTH, tf.constant(1, tf.int64)
    places = [first, first + _LARGEST, tf.constant(_CLOCK)]
    applied, largest, now = tf.unstack(
        tf.raw_ops.ResourceGather(resource=table, indices=tf.stack(places), dtype=tf.int64)
    )
    # Not `tf.cond`, which takes a tenth of a small step's time.
    is_open = tf.raw_ops.Assert(condition=applied >= 0, data=[REFUSED])
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
    with tf.control_dependencies([is_open]):
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
    """Do as `apply_in_lane`, or nothing where `lane` is `NO_LANE`."""
    tf.cond(lane == NO_LANE, lambda: None, lambda: apply_in_lane(table, lane, clock, apply, number))


def close(table: tf.Tensor, lane: tf.Tensor) -> tf.Tensor:
    """Close a lane; return how many pushes were applied in it. Call with the lock held."""
    entry = tf.raw_ops.ResourceGather(resource=table, indices=lane * _WIDTH, dtype=tf.int64)
    applied = tf.where(entry < 0, -1 - entry, entry)
    update = tf.raw_ops.ResourceScatterUpdate(
        resource=table, indices=lane * _WIDTH, updates=-1 - applied
    )
    with tf.control_dependencies([update]):
        return tf.identity(applied)


def reset(table: tf.Tensor, lane: tf.Tensor) -> tf.Tensor:
    """Have nothing be applied in a lane; return 0. Call with the lock held."""
    update = tf.raw_ops.ResourceScatterUpdate(
        resource=table,
        indices=lane * _WIDTH + tf.range(_WIDTH),
        updates=tf.zeros([_WIDTH], tf.int64),
    )
    with tf.control_dependencies([update]):
        return tf.constant(0, tf.int64)
