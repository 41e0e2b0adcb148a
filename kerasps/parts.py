"""The parts in which variables lie on ps tasks: their shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from kerasps.variables import ParameterServerVariable


@dataclass(frozen=True, eq=False)
class Part:
    """One shard of a variable."""

    variable: ParameterServerVariable
    shard: int

    def __eq__(self, other: object) -> bool:
        # Variables compare element by element, so they are told apart by identity.
        return isinstance(other, Part) and (self.variable is other.variable and self.shard == other.shard)

    def __hash__(self) -> int:
        return hash((id(self.variable), self.shard))

    @property
    def storage(self) -> tf.Variable:
        """The `tf.Variable` that holds it."""
        return self.variable.shards[self.shard]

    @property
    def spec(self) -> tf.TensorSpec:
        """Its shape and dtype."""
        return tf.TensorSpec(self.storage.shape, self.storage.dtype)

    def of(self, value: tf.Tensor) -> tf.Tensor:
        """This shard of a value of the whole variable."""
        sharding = self.variable.sharding
        return value if sharding is None else sharding.part(value, self.shard)


def parts_of(variables: Sequence[ParameterServerVariable]) -> list[Part]:
    """All shards of the variables."""
    return [Part(variable, shard) for variable in variables for shard in range(len(variable.shards))]
