"""Regions: places of a part that a single table has, and gives to other rows when they are full.

A table whose number of rows is bounded by replacement draws the rows to replace among its places,
so it has them to itself. Other tables of a pool share their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import mixed, salt_of
from kerasps.dynamic.policies.terms import (
    NUM_FREE,
    Field,
    TableTerms,
    of_tables,
    place_of_field,
    table_in,
)

# Added to keys before they are mixed, so that draws are independent of keys.
_SALT = salt_of(-50)


class NewPlaces(NamedTuple):
    """The places of new rows in regions.

    Attributes:
        places: the place of each row; 0 for those without room.
        replaced: the places among these whose rows are replaced; None if rows replace none.
        at: the indices of the numbers of the part that change.
        changes: what is added to them.
    """

    places: tf.Tensor
    replaced: tf.Tensor | None
    at: list[int]
    changes: tf.Tensor


def new_places(
    tables: Sequence[TableTerms],
    numbers: tf.Tensor,
    free: tf.Tensor,
    tags: tf.Tensor,
    keys: tf.Tensor,
    local: tf.Tensor | None,
    touched: tf.Tensor,
) -> NewPlaces:
    """Return the places of new rows of tables with regions.

    A row without room replaces one of its table that its key draws; or none, if that one is among
    `touched`, or if rows of the region replace none.

    Args:
        numbers, free, tags: gather numbers, places that were given back, and tags of the part.
        keys: the keys of the rows, table by table.
        local: the index of the table of each; None if there is one table.
        touched: places that are in use now.
    """
    which = tf.zeros_like(keys, tf.int32) if local is None else local
    fields = Field.ROWS, Field.USED, Field.FREE
    wanted = [place_of_field(table.number, field) for field in fields for table in tables]
    rows, used, num_free = tf.unstack(tf.reshape(numbers(wanted), [3, len(tables)]))
    of_each = tf.math.unsorted_segment_sum(tf.ones_like(keys), which, len(tables))
    rank = tf.range(tf.size(keys, tf.int64)) - tf.gather(tf.cumsum(of_each, exclusive=True), which)
    most = np.array([table.most for table in tables], np.int64)
    room = tf.maximum(most - rows, 0)
    made = tf.minimum(of_each, room)
    from_free = tf.minimum(made, num_free)
    room_of, used_of, free_of, from_free_of, over_of = tf.unstack(
        tf.gather(tf.stack([room, used, num_free, from_free, of_each - made], 1), which), axis=1
    )
    first = of_tables([table.region.first for table in tables if table.region], local, np.int64)
    has_room, is_given_back = rank < room_of, rank < from_free_of
    given_back = free(tf.where(is_given_back, first + free_of - 1 - rank, tf.zeros_like(rank)))
    fresh = tf.where(
        is_given_back, tf.cast(given_back, tf.int64), first + used_of + rank - from_free_of
    )
    drawn, leaving, replaced = tf.zeros_like(rank), None, tf.zeros_like(made)
    if all(table.region.replaces for table in tables if table.region):
        position = drawn_positions(keys, rank - room_of, over_of, used_of)
        drawn = tf.where(~has_room & (position >= 0), first + position, drawn)
        is_replaced = _may_be_replaced(tables, tags, drawn, local, touched)
        drawn = tf.where(is_replaced, drawn, tf.zeros_like(rank))
        leaving = tf.boolean_mask(drawn, is_replaced)
        replaced = tf.math.unsorted_segment_sum(tf.cast(is_replaced, tf.int64), which, len(tables))
    added = {
        Field.ROWS: made,
        Field.MADE: made + replaced,
        Field.USED: made - from_free,
        Field.FREE: -from_free,
        Field.REFUSED: of_each - made - replaced,
        Field.EVICTED: replaced,
    }
    at = [NUM_FREE, *(place_of_field(t.number, field) for field in added for t in tables)]
    changes = tf.concat([-tf.reduce_sum(made, keepdims=True), *added.values()], 0)
    return NewPlaces(tf.where(has_room, fresh, drawn), leaving, at, changes)


def _may_be_replaced(
    tables: Sequence[TableTerms],
    tags: tf.Tensor,
    drawn: tf.Tensor,
    local: tf.Tensor | None,
    touched: tf.Tensor,
) -> tf.Tensor:
    """Return whether each drawn place has a row of its table that is not in use."""
    names = of_tables([table.number for table in tables], local, np.int32)
    is_own = tf.equal(table_in(tags(drawn)), names)
    return (drawn > 0) & is_own & ~_among(drawn, touched)


def drawn_positions(
    keys: tf.Tensor, number: tf.Tensor, count: tf.Tensor, size: tf.Tensor
) -> tf.Tensor:
    """Return a position below `size` that each key draws, -1 if there are too few.

    The key with a number draws among every `count`-th position, so no two draw the same.

    Args:
        number: the number of each key, from 0.
        count: how many keys draw.
    """
    stride = tf.maximum(count, 1)
    choices = tf.maximum((size - number + stride - 1) // stride, 1)
    seeds = tf.bitwise.bitwise_and(mixed(keys + _SALT), np.int64(2**31 - 1))
    drawn = number + stride * (seeds % choices)
    return tf.where(number < size, drawn, -tf.ones_like(drawn))


def spread_positions(
    seeds: tf.Tensor, number: tf.Tensor, count: tf.Tensor, size: tf.Tensor, most: int
) -> tf.Tensor:
    """Return `most` positions below `size` for each seed, -1 where there are too few.

    Those of a seed are spread evenly, from a random one on, over every `count`-th position. So no
    two of all are the same.

    Args:
        number: the number of each seed, from 0.
        count: how many seeds there are.
    """
    stride = tf.maximum(count, 1)
    choices = tf.maximum((size - number + stride - 1) // stride, 1)[:, None]
    steps = tf.range(most, dtype=tf.int64) * tf.maximum(choices // most, 1)
    first = tf.bitwise.bitwise_and(seeds, np.int64(2**31 - 1))[:, None]
    drawn = number[:, None] + stride[:, None] * ((first + steps) % choices)
    return tf.where((steps < choices) & (number < size)[:, None], drawn, -tf.ones_like(drawn))


def _among(values: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Return whether each value is among others."""
    _, numbers = tf.unique(tf.concat([others, values], 0))
    numbers_of_others, numbers = tf.split(numbers, [tf.size(others), tf.size(values)])
    return numbers <= tf.reduce_max(tf.concat([[-1], numbers_of_others], 0))
