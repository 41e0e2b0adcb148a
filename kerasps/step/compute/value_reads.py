"""The uses of a variable's value in a step, which may all be look-ups of rows.

`tf.nn.embedding_lookup_sparse(table.value, ids, None)` names the whole value and wants rows of it.
So the tensor that stands for a value knows its variable: `tf.gather`, and what looks rows up by it,
asks the variable. When the step has been traced, its graph tells whether anything else has used it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasps.variables import ParameterServerVariable
from kerasps.variables.tensor_like import note_read


class ValueReads:
    """The values that the trace of one step was given."""

    def __init__(self) -> None:
        self._handed_out: dict[int, tuple[ParameterServerVariable, tf.Tensor, tf.Tensor]] = {}
        # The operations on values that do not count as uses, by name.
        self._apart: set[str] = set()

    def hand_out(self, variable: ParameterServerVariable, value: tf.Tensor) -> tf.Tensor:
        """Return a tensor that stands for the value of a variable.

        Args:
            variable: the variable.
            value: its value in this step, which is zeros where the step has rows of it alone.
        """
        note_read(variable)  # before it is cast, or a GradientTape does not see the read
        tensor = variable.autocast(value)
        if tensor is not value:
            self._apart.add(tensor.op.name)

        # The graph, and so the tensor, may outlive the model.
        known, dtype = weakref.ref(variable), tensor.dtype

        def sparse_read(indices: object, name: str | None = None) -> tf.Tensor:
            """Return rows; `tf.gather` calls it."""
            held = known()
            assert held is not None  # while its step is traced
            return tf.cast(held.sparse_read(indices, name), dtype)

        tensor.sparse_read = sparse_read
        self._handed_out[id(tensor)] = variable, tensor, value
        return tensor

    def variable_of(self, value: object) -> Any:
        """Return the variable whose value a tensor stands for; another tensor as it is."""
        known = self._handed_out.get(id(value))
        return value if known is None else known[0]

    def gather(self, value: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """Return rows of a value, which is no use of all of it."""
        rows = tf.raw_ops.GatherV2(params=value, indices=ids, axis=0)
        self._apart.add(rows.op.name)
        return rows

    def apart(self, value: tf.Tensor) -> tf.Tensor:
        """Return a value for what does not count as a use of all of it."""
        value = tf.identity(value)
        self._apart.add(value.op.name)
        return value

    def used(self) -> Iterator[ParameterServerVariable]:
        """Yield the variables whose value was used otherwise. Call after the trace."""
        for variable, tensor, value in self._handed_out.values():
            uses = [*tensor.consumers(), *value.consumers()]
            if any(use.name not in self._apart for use in uses):
                yield variable
