"""Exports SavedModels that a plain process can load.

Their functions use one variable where the model has shards, and a hash table, with two variables,
where it has a table without a vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import uuid
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.rows_of_ids import RowsOfIds
from kerasps.dynamic.parts.keyed_rows import KeyedStorage
from kerasps.dynamic.tables.row_files import TableValue
from kerasps.runtime.connected import check_not_closed
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.variables import NamedVariable, ParameterServerVariable, current_phase, entering
from kerasps.variables.rows.sharding import ShardedStorage, WholeValue, from_start


class StandIn(NamedVariable):
    """The variable that replaces a sharded one, or a part of a table, in a SavedModel.

    It has no value in this process. The checkpoint has the value, from the ps, under its key.
    """

    def __init__(
        self, value: WholeValue | TableValue, *, shape: tf.TensorShape, trainable: bool
    ) -> None:
        with tf.init_scope(), tf.device(COORDINATOR_CPU):
            super().__init__(
                None,
                shape=shape,
                dtype=value.dtype,
                trainable=trainable,
                name=value.storage.name,
            )
        self._stored = value

    def _serialize_to_tensors(self) -> dict[str, WholeValue | TableValue]:
        return {"VARIABLE_VALUE": self._stored}


class Places(tf.saved_model.experimental.TrackableResource):
    """The hash table of a SavedModel from the ids of a table to the places of their rows.

    It is filled from the ids when the SavedModel is loaded, so they are not in the graph.
    """

    def __init__(self, ids: tf.Variable) -> None:
        super().__init__(device="CPU")
        self._ids = ids
        with tf.init_scope(), tf.device(COORDINATOR_CPU):  # not in a function that is traced
            assert self.resource_handle is not None

    def _create_resource(self) -> tf.Tensor:
        # `tf.saved_model.load` calls this. A table without a name belongs to what was loaded, and
        # goes with it.
        return tf.raw_ops.AnonymousHashTable(key_dtype=tf.int64, value_dtype=tf.int64)

    def _create_named(self, name: str) -> tf.Tensor:
        return tf.raw_ops.HashTableV2(
            container="", shared_name=name, key_dtype=tf.int64, value_dtype=tf.int64
        )

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, **unused: object
    ) -> list[tf.Tensor]:
        # TensorFlow's other loaders, such as TensorFlow Serving's, run the graph in a session, and
        # there each run would make a table without a name anew.
        del unused
        exported = copy.copy(self)
        with tf.device(self._resource_device):
            exported._resource_handle = self._create_named(f"kerasps_{uuid.uuid4().hex}")
        object_map[self] = exported
        tensor_map[self.resource_handle] = exported.resource_handle
        return [self.resource_handle]

    def _initialize(self) -> None:
        ids = self._ids.read_value()
        tf.raw_ops.InitializeTableV2(
            table_handle=self.resource_handle, keys=ids, values=tf.range(tf.size(ids, tf.int64))
        )


class _TableStandIn(tf.Module):
    """The replacement of a table without a vocabulary in a SavedModel: ids, rows, a hash table.

    All is read by TensorFlow alone. The ids and rows are variables, so they are in the checkpoint
    of the SavedModel and not in its graph. Their number is that at the time of the export.
    """

    def __init__(self, storage: KeyedStorage) -> None:
        super().__init__(name="table")
        ids, rows = TableValue(storage, is_ids=True), TableValue(storage, is_ids=False)
        self.ids = StandIn(ids, shape=tf.TensorShape([None]), trainable=False)
        shape = tf.TensorShape([None, storage.shape[1]])
        self.rows = StandIn(rows, shape=shape, trainable=storage.trainable)
        self.places = Places(self.ids)
        self._table = storage.table

    def take(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the rows of ids; an id without a row gets its first row, as on a ps."""
        rows_of_ids = self._table.rows_of_ids
        return rows_or_default(ids, self.places.resource_handle, self.rows, rows_of_ids)


def rows_or_default(
    ids: tf.Tensor, places: tf.Tensor, rows: tf.Variable, rows_of_ids: RowsOfIds
) -> tf.Tensor:
    """Return the rows of ids in a SavedModel; those that have none read their default row.

    Args:
        places: the handle of a hash table from ids to places.
        rows: the rows by place.
    """
    flat = tf.reshape(ids, [-1])
    found = tf.raw_ops.LookupTableFindV2(table_handle=places, keys=flat, default_value=np.int64(-1))
    found = tf.ensure_shape(found, [None])
    known, unknown = (tf.where(chosen)[:, 0] for chosen in (found >= 0, found < 0))
    values = rows.sparse_read(tf.gather(found, known))
    first = rows_of_ids.default_rows(tf.gather(flat, unknown))
    order = [tf.cast(known, tf.int32), tf.cast(unknown, tf.int32)]
    result = tf.dynamic_stitch(order, [values, first])
    result = tf.reshape(result, tf.concat([tf.shape(ids), tf.shape(first)[1:]], 0))
    result.set_shape(ids.shape.concatenate(first.shape[1:]))
    return result


def _stand_in_of(storage: ShardedStorage) -> Any:
    # It lives as long as the storage, since functions that were traced before have captured it.
    stand_in = getattr(storage, "stand_in", None)
    if stand_in is None:
        if isinstance(storage, KeyedStorage):
            stand_in = _TableStandIn(storage)
        else:
            value = WholeValue(storage)
            stand_in = StandIn(value, shape=storage.shape, trainable=storage.trainable)
        storage.stand_in = stand_in
    return stand_in


class Export:
    """The phase in which functions of a SavedModel are traced (see `variables.Phase`)."""

    hides_constraints = False

    def read(self, variable: ParameterServerVariable) -> tf.Variable:
        check_not_closed("an export")
        storage = variable.storage
        if not isinstance(storage, ShardedStorage):
            return storage
        return storage.read_value() if isinstance(storage, KeyedStorage) else _stand_in_of(storage)

    def table(self, variable: ParameterServerVariable) -> tf.Module:
        """Return what replaces a table without a vocabulary."""
        check_not_closed("an export")
        return _stand_in_of(variable.storage)

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return variable.storage.shape

    def source(self, variable: ParameterServerVariable) -> tf.Tensor:
        return self.read(variable).handle

    def read_rows(
        self, variable: ParameterServerVariable, ids: tf.Tensor, *, from_end: bool
    ) -> tf.Tensor:
        if isinstance(variable.storage, KeyedStorage):
            return self.table(variable).take(ids)
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
        if isinstance(element, ShardedStorage) and getattr(element, "terms", None) is None
    }
    if storages:
        exported.stand_ins = [_stand_in_of(storage) for storage in storages.values()]  # type: ignore[attr-defined]
