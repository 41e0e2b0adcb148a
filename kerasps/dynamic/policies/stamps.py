"""The rows that changed since a version, on a ps.

A version is a number of a part: 0 until somebody asks for changes, and one more with each question.
All that writes a row, or a slot of it, writes the version as the *stamp* of its place, under the
lock. So the rows that changed since a question are those whose stamp is its version or a later one.
Removed rows are told in a ring of bounded length, by key and table, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import unmixed
from kerasps.dynamic.policies.terms import (
    BORN,
    REMOVED,
    VERSION,
    Holder,
    salt_in_pool,
    table_in,
)
from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.storage.named import NamedVariable

# The removed rows that a part tells, of all its tables: 16 bytes each, once there are so many.
MOST_REMOVED = 1 << 20
# The places that are looked through at once.
PLACES = 1 << 20


class Index(Protocol):
    """The index of a part (see `KeyIndex`)."""

    def find(self, keys: tf.Tensor) -> tf.Tensor: ...


class Part(Protocol):
    """The part of a pool that has rows (see `KeyPart`)."""

    stamps: NamedVariable
    removed: NamedVariable
    numbers: NamedVariable
    keys: NamedVariable
    tags: NamedVariable

    @property
    def index(self) -> Index: ...

    def store(self, holder: NamedVariable) -> RowStore: ...

    def add_to_numbers(self, at: Sequence[int], changes: tf.Tensor) -> tf.Operation: ...

    def span(self, holder: Holder) -> tf.Tensor: ...


def stamp(part: Part, places: tf.Tensor) -> tf.Operation:
    """Note that rows at some places change. Call under the lock."""
    version = _number(part, VERSION)
    # Until somebody asks, only place 0 is written, so that stamps take no memory.
    return tf.raw_ops.ResourceScatterUpdate(
        resource=part.stamps.handle,
        indices=tf.cast(places, tf.int64) * tf.minimum(version, 1),
        updates=tf.cast(version, tf.int32),
    )


def tell_removed(part: Part, keys: tf.Tensor, tables: tf.Tensor) -> list[tf.Operation]:
    """Note that the rows of keys are removed. Call under the lock.

    Args:
        tables: the number of the table of each, int32.
    """
    before, count = _number(part, REMOVED), tf.size(keys, tf.int64)
    kept = tf.minimum(count, MOST_REMOVED) * tf.minimum(_number(part, VERSION), 1)
    # Of more than the ring holds, the last ones.
    number = tf.range(count - kept, count)
    told = tf.stack([keys, tf.cast(tables, tf.int64)], 1)
    write = tf.raw_ops.ResourceScatterUpdate(
        resource=part.removed.handle,
        indices=(before + number) % MOST_REMOVED,
        updates=tf.gather(told, number),
    )
    with tf.control_dependencies([before]):
        return [write, part.add_to_numbers([REMOVED], count[None])]


def tell_replaced(part: Part, keys: tf.Tensor, places: tf.Tensor) -> list[tf.Operation]:
    """Note that keys lose their places to others. Call under the lock, before tags change."""
    return tell_removed(part, keys, table_in(part.store(part.tags).gather(places)))


def ask(part: Part) -> list[tf.Tensor]:
    """Begin a version, and return it. Call under the lock.

    Returns:
        When the part was made, as a number; the version; how many rows were removed before.
    """
    born, version, removed = (_number(part, at) for at in (BORN, VERSION, REMOVED))
    with tf.control_dependencies([born, version, removed]):
        add = part.add_to_numbers([VERSION], tf.ones([1], tf.int64))
    with tf.control_dependencies([add]):
        return [tf.identity(born), version + 1, tf.identity(removed)]


def removed_between(
    part: Part, holder: Holder, first: tf.Tensor, last: tf.Tensor
) -> list[tf.Tensor]:
    """Return the ids of a table that were removed and have no row now. Needs no lock.

    Args:
        first, last: the numbers of the removals among those of the part.

    Returns:
        The ids, some of them twice, and how many rows were removed up to now. If that is more than
        `MOST_REMOVED` from `first` on, some ids are missing, and others are wrong.
    """
    numbers = tf.range(tf.maximum(first, last - MOST_REMOVED), last)
    told = part.store(part.removed).gather(numbers % MOST_REMOVED)
    told.set_shape([None, 2])
    keys = tf.gather(told[:, 0], tf.where(tf.equal(told[:, 1], holder.number))[:, 0])
    keys = tf.gather(keys, tf.where(tf.equal(part.index.find(keys), 0))[:, 0])
    with tf.control_dependencies([keys]):
        after = _number(part, REMOVED)
    return [unmixed(keys) - salt_in_pool(holder.number), after]


def changed_places(
    part: Part, holder: Holder, since: tf.Tensor, first: tf.Tensor, count: tf.Tensor
) -> tf.Tensor:
    """Return those of `count` places whose rows are a table's and changed. Needs no lock.

    Args:
        since: a version; 0 for all rows.
    """
    last = tf.minimum(first + count, part.span(holder)[1])
    stamps = part.store(part.stamps).gather(tf.range(first, tf.maximum(first, last)))
    is_changed = (stamps >= tf.cast(since, tf.int32)) | tf.equal(since, 0)
    places = tf.where(is_changed)[:, 0] + first
    return _places_of(part, holder, places)


def all_changed_places(part: Part, holder: Holder, since: tf.Tensor) -> tf.Tensor:
    """Return all places whose rows are a table's and changed. Needs no lock.

    Args:
        since: a version; 0 for all rows.
    """
    begin, end = tf.unstack(part.span(holder), 2)
    pieces = tf.TensorArray(tf.int64, 0, dynamic_size=True, infer_shape=False, element_shape=[None])

    def add(first: tf.Tensor, found: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        places = changed_places(part, holder, since, first, tf.constant(PLACES, tf.int64))
        return first + PLACES, found.write(found.size(), places)

    pieces = pieces.write(0, tf.zeros([0], tf.int64))
    # One after another, or all pieces would be in memory at once.
    _, found = tf.while_loop(
        lambda first, _: first < end, add, (begin, pieces), parallel_iterations=1
    )
    return found.concat()


def rows_at(part: Part, holder: Holder, rows: RowStore, places: tf.Tensor) -> list[tf.Tensor]:
    """Return the ids and rows of a table at places that it may have left. Call under the lock."""
    places = _places_of(part, holder, places)
    ids = unmixed(part.store(part.keys).gather(places)) - salt_in_pool(holder.number)
    return [ids, rows.gather(places)]


def _number(part: Part, at: int) -> tf.Tensor:
    return part.store(part.numbers).gather(tf.constant(at, tf.int32))


def _places_of(part: Part, holder: Holder, places: tf.Tensor) -> tf.Tensor:
    """Return those of some places that have rows of a table."""
    tags = part.store(part.tags).gather(places)
    return tf.gather(places, tf.where(tf.equal(table_in(tags), np.int32(holder.number)))[:, 0])
