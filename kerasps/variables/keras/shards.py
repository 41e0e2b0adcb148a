"""Shards, the parts of variables on ps tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import tensorflow as tf

from kerasps.variables.keras.variable import ParameterServerVariable
from kerasps.variables.rows.pooled_rows import PooledRows, store_of
from kerasps.variables.rows.row_store import RowStore


@dataclass(frozen=True, eq=False)
class Shard:
    """One shard of a variable: the `index`-th. A whole variable has one shard."""

    variable: ParameterServerVariable
    index: int

    def __eq__(self, other: object) -> bool:
        # `==` compares variables element by element, so compare their identity.
        return isinstance(other, Shard) and (
            self.variable is other.variable and self.index == other.index
        )

    def __hash__(self) -> int:
        return hash((id(self.variable), self.index))

    @property
    def storage(self) -> tf.Variable | PooledRows:
        """Its value on the ps, as a variable."""
        return self.variable.shards[self.index]

    @property
    def store(self) -> RowStore:
        """Its rows, by place."""
        return store_of(self.storage)

    @property
    def device(self) -> str:
        """The device of the ps that holds it."""
        return str(self.storage.device)

    @property
    def spec(self) -> tf.TensorSpec:
        """The shape and dtype of the shard."""
        return tf.TensorSpec(self.storage.shape, self.storage.dtype)

    def of(self, value: tf.Tensor) -> tf.Tensor:
        """Return the rows of this shard from a value of the whole variable."""
        sharding = self.variable.sharding
        return value if sharding is None else sharding.rows_in(value, self.index)


def shards_in(variables: Iterable[ParameterServerVariable]) -> list[Shard]:
    """Return all shards of the variables, in order."""
    return [
        Shard(variable, index) for variable in variables for index in range(len(variable.shards))
    ]
