"""Exports SavedModels that a plain process can load.

Their functions use one variable where the model has shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kerasps.runtime.connected import check_not_closed
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.variables import NamedVariable, ParameterServerVariable, current_phase, entering
from kerasps.variables.rows.sharding import ShardedStorage, WholeValue, from_start


class _StandIn(NamedVariable):
    """The variable that replaces a sharded one in a SavedModel.

    It has no value in this process. The checkpoint has the value of the shards under its key.
    """

    def __init__(self, storage: ShardedStorage) -> None:
        with tf.init_scope(), tf.device(COORDINATOR_CPU):
            super().__init__(
                None,
                shape=storage.shape,
                dtype=storage.dtype,
                trainable=storage.trainable,
                name=storage.name,
            )
        self._storage = storage

    def _serialize_to_tensors(self) -> dict[str, WholeValue]:
        return self._storage._serialize_to_tensors()


def _stand_in_of(storage: ShardedStorage) -> _StandIn:
    # It lives as long as the storage, since functions that were traced before have captured it.
    stand_in = getattr(storage, "stand_in", None)
    if stand_in is None:
        stand_in = storage.stand_in = _StandIn(storage)
    return stand_in


class Export:
    """The phase in which functions of a SavedModel are traced (see `variables.Phase`)."""

    hides_constraints = False

    def read(self, variable: ParameterServerVariable) -> tf.Variable:
        check_not_closed("an export")
        storage = variable.storage
        if not isinstance(storage, ShardedStorage):
            return storage
        return _stand_in_of(storage)

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return variable.storage.shape

    def source(self, variable: ParameterServerVariable) -> tf.Tensor:
        return self.read(variable).handle

    def read_rows(
        self, variable: ParameterServerVariable, ids: tf.Tensor, *, from_end: bool
    ) -> tf.Tensor:
        ids = from_start(ids, variable.shape[0]) if from_end else ids
        return tf.gather(self.read(variable), ids)

    def regularizer(
        self, variable: ParameterServerVariable, regularizer: keras.regularizers.Regularizer | None
    ) -> Any:
        return regularizer

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.read(variable).assign(value)

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.read(variable).assign_add(value)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Trace functions for a SavedModel within this context. Does nothing within a step."""
    with entering(current_phase() or Export()):
        yield


def track_stand_ins(exported: object) -> None:
    """Have an object that is exported track the stand-ins of the storages in its lists.

    Keras 3.16 lists the storages of a model's variables there, and earlier versions the variables.
    """
    storages = {
        id(element): element
        for attribute in getattr(exported, "__dict__", {}).values()
        if isinstance(attribute, list)
        for element in attribute
        if isinstance(element, ShardedStorage)
    }
    if storages:
        exported.stand_ins = [_stand_in_of(storage) for storage in storages.values()]  # type: ignore[attr-defined]
