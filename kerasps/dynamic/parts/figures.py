"""The numbers that a part keeps of its tables, read and cleared on a ps."""

from __future__ import annotations

import tensorflow as tf

from kerasps.dynamic.parts.key_part import KeyPart
from kerasps.dynamic.parts.terms import NUM_FREE, TOP, Field, place_of_field, table_in


def figures_of(part: KeyPart, number: int) -> tf.Tensor:
    """Return the fields of a table."""
    return part.gather_numbers([place_of_field(number, field) for field in Field])


def all_figures(part: KeyPart, num_tables: tf.Tensor) -> tf.Tensor:
    """Return the fields (see `Field`) of the first tables, `[num_tables, len(Field)]`."""
    first = place_of_field(0, Field.ROWS)
    at = tf.range(first, first + num_tables * len(Field))
    return tf.reshape(part.store(part.numbers).gather(at), [-1, len(Field)])


def num_without_row(part: KeyPart, number: int, keys: tf.Tensor) -> tf.Tensor:
    """Return how many of some keys have no row in a table."""
    tags = part.store(part.tags).gather(part.index.find(keys))
    return tf.math.count_nonzero(tf.not_equal(table_in(tags), number))


def clear_figures(part: KeyPart, number: int) -> tf.Tensor:
    """Set the fields of a table that has no rows to 0. Call under the lock."""
    at = [place_of_field(number, field) for field in Field]
    with tf.control_dependencies([part.add_to_numbers(at, -part.gather_numbers(at))]):
        return tf.constant(0)


def set_end(part: KeyPart, end: tf.Tensor, added: tf.Tensor) -> tf.Tensor:
    """Let the places before `end` be in regions. Call under the lock.

    Args:
        added: the number of places in the newest region.
    """
    top = part.gather_numbers([TOP])[0]
    change = part.add_to_numbers([TOP, NUM_FREE], tf.stack([end - top, added]))
    with tf.control_dependencies([change]):
        return tf.identity(end)
