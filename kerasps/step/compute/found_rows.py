"""The rows that a look-up finds in a table, and their gradient.

The rows that look-ups find are taken for all tables of a group at once, before the step computes
(`RowRequest.find`). In the step each look-up is an input; a gradient tape is told that it follows
from the table's rows. Its gradient is then a sum over the look-ups of the table. Where the step
only hands that to an optimizer, the sum is left to the push, which takes one for the whole group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.step.contract.compute_messages import TableRows
from kerasps.step.records.identity import ByIdentity
from kerasps.variables import ParameterServerVariable


def rows_found(table: TableRows, number: int, ids: tf.Tensor) -> tf.Tensor:
    """Return the rows that a look-up finds.

    Args:
        table: what the table is in this step.
        number: which of its look-ups it is.
        ids: the ids that are looked up, of any shape.

    Returns:
        A tensor of shape `ids.shape + table.rows.shape[1:]`.
    """
    row_shape = table.rows.shape[1:]
    static = ids.shape.concatenate(row_shape)
    lengths = [] if static.rank is None else static.as_list()
    if lengths and lengths.count(None) <= 1 and 0 not in lengths:
        shape: Any = [-1 if length is None else length for length in lengths]
    else:
        shape = tf.concat([tf.shape(ids), row_shape], 0)
    found = tf.reshape(table.found[number], shape)
    found.set_shape(static)

    def gradient(upstream: tf.Tensor | tf.IndexedSlices) -> list[tf.IndexedSlices]:
        by_id = tf.reshape(upstream, [-1, *row_shape])
        return [tf.IndexedSlices(by_id, table.positions[number], tf.shape(table.rows))]

    _compat.record_operation("LookUp", [found], [table.rows], gradient)
    return found


class GradientSums:
    """Makes gradients of tables dense, and knows what each is the sum of.

    Args:
        tables: what each table is in this step, by the table.
    """

    def __init__(self, tables: Mapping[ParameterServerVariable, TableRows]) -> None:
        # By the positions of each look-up, its table and its number.
        self._lookups: ByIdentity[tf.Tensor, tuple[ParameterServerVariable, int]] = ByIdentity(
            (positions, (table, number))
            for table, rows in tables.items()
            for number, positions in enumerate(rows.positions)
        )
        # By the dense gradient, those look-ups and what is added up of each.
        self._addends: ByIdentity[
            tf.Tensor, tuple[list[tuple[ParameterServerVariable, int]], list[tf.Tensor]]
        ] = ByIdentity()

    def dense(self, gradient: tf.Tensor | tf.IndexedSlices | None) -> Any:
        """Return a gradient as a tensor; None where it is None."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        # Of a table it has one row per different id, so to make it dense is cheap.
        dense = tf.convert_to_tensor(gradient)
        parts, addends = _parts(gradient.indices), _parts(gradient.values)
        known = [self._lookups[part] for part in map(_uncast, parts) if part in self._lookups]
        if len(known) == len(parts) == len(addends):
            self._addends[dense] = known, addends
        return dense

    def addends(
        self, gradient: tf.Tensor | tf.IndexedSlices | None, table: ParameterServerVariable
    ) -> tuple[list[int], list[tf.Tensor]] | None:
        """Return what a gradient is the sum of; None where it is not known to be such a sum.

        Args:
            gradient: what is given to an optimizer, as `dense` has returned it.
            table: what it is given for: its look-ups alone count.

        Returns:
            Numbers of look-ups of the table, and of each a tensor with a row for each id.
        """
        lookups, addends = self._addends.get(gradient, ([], []))
        numbers = [number for other, number in lookups if other is table]
        return (numbers, addends) if numbers and len(numbers) == len(addends) else None


def _parts(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return what a tensor was concatenated of, as a tape does with gradients of one variable."""
    return list(tensor.op.inputs[:-1]) if tensor.op.type == "ConcatV2" else [tensor]


def _uncast(tensor: tf.Tensor) -> tf.Tensor:
    return tensor.op.inputs[0] if tensor.op.type == "Cast" else tensor
