"""The rows that a look-up finds in a table, and their gradient.

The rows of all look-ups are gathered for all tables of a group at once, before the compute phase
(`RowRequest.find`). In the step each look-up is an input. A gradient tape is told that it depends
on the table's rows, so the gradient is a sum over the look-ups of the table. If the step only hands
it to an optimizer, the push computes the sum, once for the whole group.
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

    Returns a tensor of shape `ids.shape + table.rows.shape[1:]`.
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
    """Makes gradients of tables dense, and knows the addends of each."""

    def __init__(self, tables: Mapping[ParameterServerVariable, TableRows]) -> None:
        # The table and the index of each look-up, by its positions.
        self._lookups: ByIdentity[tf.Tensor, tuple[ParameterServerVariable, int]] = ByIdentity(
            (positions, (table, number))
            for table, rows in tables.items()
            for number, positions in enumerate(rows.positions)
        )
        # The look-ups and their addends, by the dense gradient.
        self._addends: ByIdentity[
            tf.Tensor, tuple[list[tuple[ParameterServerVariable, int]], list[tf.Tensor]]
        ] = ByIdentity()

    def dense(self, gradient: tf.Tensor | tf.IndexedSlices | None) -> Any:
        """Return a gradient as a tensor; return None unchanged."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        # A table's gradient has one row per different id, so the dense tensor is small.
        dense = tf.convert_to_tensor(gradient)
        parts, addends = _parts(gradient.indices), _parts(gradient.values)
        known = [self._lookups[part] for part in map(_uncast, parts) if part in self._lookups]
        if len(known) == len(parts) == len(addends):
            self._addends[dense] = known, addends
        return dense

    def addends(
        self, gradient: tf.Tensor | tf.IndexedSlices | None, table: ParameterServerVariable
    ) -> tuple[list[int], list[tf.Tensor]] | None:
        """Return the addends of a gradient; None if it is not known to be a sum over look-ups.

        Returns the indices of look-ups of the table, and for each a tensor with a row for each id.
        """
        lookups, addends = self._addends.get(gradient, ([], []))
        numbers = [number for other, number in lookups if other is table]
        return (numbers, addends) if numbers and len(numbers) == len(addends) else None


def _parts(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return the parts of a concatenated tensor; a tape concatenates gradients of one variable."""
    return list(tensor.op.inputs[:-1]) if tensor.op.type == "ConcatV2" else [tensor]


def _uncast(tensor: tf.Tensor) -> tf.Tensor:
    return tensor.op.inputs[0] if tensor.op.type == "Cast" else tensor
