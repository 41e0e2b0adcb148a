"""SavedModels: their functions use one variable where the model has shards, so that a plain process can load them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasps import variables
from kerasps.placement import COORDINATOR_CPU
from kerasps.sharding import ShardedStorage, WholeValue
from kerasps.storage import NamedVariable
from kerasps.variables import ParameterServerVariable


class _StandIn(NamedVariable):
    """What a SavedModel has for a sharded variable: a variable without a value here, whose checkpoint is that of the shards."""

    def __init__(self, storage: ShardedStorage) -> None:
        with tf.init_scope(), tf.device(COORDINATOR_CPU):
            super().__init__(None, shape=storage.shape, dtype=storage.dtype, trainable=storage.trainable, name=storage.name)
        self._storage = storage

    def _serialize_to_tensors(self) -> dict[str, WholeValue]:
        return self._storage._serialize_to_tensors()


class Export:
    """The phase in which functions of a SavedModel are traced (see `variables.Phase`)."""

    hides_constraints = False

    def read(self, variable: ParameterServerVariable) -> tf.Variable:
        storage = variable.storage
        if not isinstance(storage, ShardedStorage):
            return storage
        # As long as the storage: what was traced before has captured it.
        stand_in = getattr(storage, "stand_in", None)
        if stand_in is None:
            stand_in = storage.stand_in = _StandIn(storage)
        return stand_in

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return variable.storage.shape

    def source(self, variable: ParameterServerVariable) -> tf.Tensor:
        return self.read(variable).handle

    def take(self, variable: ParameterServerVariable, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.read(variable), ids)

    def regularizer(self, variable: ParameterServerVariable, regularizer: Any) -> Any:
        return regularizer

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.read(variable).assign(value)

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.read(variable).assign_add(value)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """While active, functions that are traced are for a SavedModel. Within a step, nothing changes."""
    with variables.entering(variables.phase() or Export()):
        yield
