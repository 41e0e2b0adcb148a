"""The ids whose rows a table with eviction has given up last, on a ps.

They are in a ring of bounded length, at the places of the region of the table in a variable beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import unmixed
from kerasps.dynamic.policies.terms import BORN, Field, Holder, place_of_field, salt_in_pool
from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.storage.named import NamedVariable

# The most ids that a ps keeps for a table.
MOST_GONE = 1 << 16


class Part(Protocol):
    """The part of a pool that has rows (see `KeyPart`)."""

    @property
    def gone(self) -> NamedVariable | None: ...

    def store(self, holder: NamedVariable) -> RowStore: ...

    def gather_numbers(self, at: Sequence[int]) -> tf.Tensor: ...

    def add_to_numbers(self, at: Sequence[int], changes: tf.Tensor) -> tf.Operation: ...


def tell_gone(
    part: Part, holders: Sequence[Holder], keys: tf.Tensor, which: tf.Tensor
) -> list[tf.Operation]:
    """Note that the rows of keys are removed. Call under the lock.

    Args:
        keys: the keys, table by table.
        which: the index of the table of each, among `holders`.
    """
    if part.gone is None:
        return []
    at = [place_of_field(holder.number, Field.GONE) for holder in holders]
    before = part.gather_numbers(at)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(keys), which, len(holders))
    rank = tf.range(tf.size(keys, tf.int64)) - tf.gather(tf.cumsum(counts, exclusive=True), which)
    firsts, lengths = (tf.gather(tf.constant(v), which) for v in np.transpose(_rings(holders)))
    # Of more than the ring holds, the last ones.
    kept = tf.where(rank >= tf.gather(counts, which) - lengths)[:, 0]
    places = firsts + (tf.gather(before, which) + rank) % lengths
    write = tf.raw_ops.ResourceScatterUpdate(
        resource=part.gone.handle, indices=tf.gather(places, kept), updates=tf.gather(keys, kept)
    )
    with tf.control_dependencies([before]):
        return [write, part.add_to_numbers(at, counts)]


def gone_since(part: Part, holder: Holder, since: tf.Tensor) -> list[tf.Tensor]:
    """Return the ids that were removed after the first `since` ones. Call under the lock.

    Returns:
        When the part was made, as a number; how many ids were removed; and those of them that it
        keeps, in their order.
    """
    assert part.gone is not None
    born, count = tf.unstack(
        part.gather_numbers([BORN, place_of_field(holder.number, Field.GONE)]), 2
    )
    ((begin, length),) = _rings([holder])
    number = tf.range(tf.clip_by_value(since, tf.maximum(count - length, 0), count), count)
    keys = part.store(part.gone).gather(begin + number % length)
    return [born, count, unmixed(keys) - salt_in_pool(holder.number)]


def _rings(holders: Sequence[Holder]) -> list[tuple[int, int]]:
    """Return the first place and the length of each table's ring."""
    regions = [holder.region for holder in holders if holder.region is not None]
    return [(region.first, min(region.size, MOST_GONE)) for region in regions]
