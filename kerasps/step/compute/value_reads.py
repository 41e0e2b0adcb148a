"""The uses of a variable's value in a step, which may all be look-ups of rows.

`tf.nn.embedding_lookup_sparse(table.value, ids, None)` asks for the whole value but uses only rows
of it. So the tensor of a value knows its variable: `tf.gather`, and functions that look rows up by
it, ask the variable. After the trace, the graph shows whether other operations used the tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasps.variables import ParameterServerVariable
from kerasps.variables.storage.tensor_like import note_read


class ValueReads:
    """The values that the trace of one step received."""

    def __init__(self) -> None:
        self._handed_out: dict[int, tuple[ParameterServerVariable, tf.Tensor, tf.Tensor]] = {}
        # The operations on values that do not count as uses, by name.
        self._uncounted: set[str] = set()

    def hand_out(self, variable: ParameterServerVariable, value: tf.Tensor) -> tf.Tensor:
        """Return a tensor that represents the value of a variable.

        Args:
            value: its value in this step; zeros if the step has only rows of it.
        """
        note_read(variable)  # before the cast, so that a GradientTape sees the read
        tensor = variable.autocast(value)
        if tensor is not value:
            self._uncounted.add(tensor.op.name)

        # The graph, and so the tensor, may outlive the model.
        known, dtype = weakref.ref(variable), tensor.dtype

        def sparse_read(indices: object, name: str | None = None) -> tf.Tensor:
            """Return rows of the variable; `tf.gather` calls this."""
            held = known()
            assert held is not None  # alive while its step is traced
            return tf.cast(held.sparse_read(indices, name), dtype)

        tensor.sparse_read = sparse_read
        self._handed_out[id(tensor)] = variable, tensor, value
        return tensor

    def variable_of(self, value: object) -> Any:
        """Return the variable whose value a tensor represents; return other tensors unchanged."""
        known = self._handed_out.get(id(value))
        return value if known is None else known[0]

    def gather(self, value: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """Return rows of a value; this does not count as a use of the whole value."""
        rows = tf.raw_ops.GatherV2(params=value, indices=ids, axis=0)
        self._uncounted.add(rows.op.name)
        return rows

    def uncounted_copy(self, value: tf.Tensor) -> tf.Tensor:
        """Return a copy of a value; taking it does not count as a use of the whole value."""
        value = tf.identity(value)
        self._uncounted.add(value.op.name)
        return value

    def used(self) -> Iterator[ParameterServerVariable]:
        """Yield the variables whose whole value was used. Call after the trace."""
        for variable, tensor, value in self._handed_out.values():
            uses = [*tensor.consumers(), *value.consumers()]
            if any(use.name not in self._uncounted for use in uses):
                yield variable
