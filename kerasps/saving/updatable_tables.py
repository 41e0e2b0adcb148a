"""The tables and weights of a SavedModel that deltas update.

All is there in two *generations*, which a request reads one of, but the rows of tables without a
vocabulary: two hash tables lead to the places of one variable. A delta writes rows to places that
no hash table names. So the rows that a request reads stay until the delta after the next.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.dynamic.ids.rows_of_ids import RowsOfIds
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.saving.saved_model import Places, rows_or_default

GENERATIONS = (0, 1)
# A variable of rows that is full grows by this share, since it is copied then.
_GROWTH = 4


def variable(
    value: object, *, shape: list[int | None] | None = None, trainable: bool = False
) -> tf.Variable:
    """Return a variable of a SavedModel, in this process."""
    with tf.init_scope(), tf.device(COORDINATOR_CPU):
        # A `tf.Variable` would go to a ps, if a strategy is current.
        return _compat.ResourceVariable(value, trainable=trainable, shape=shape)


class _MutablePlaces(Places):
    """The places of a generation. When it is loaded, it notes how many there are."""

    def __init__(self, ids: tf.Variable, top: tf.Variable) -> None:
        super().__init__(ids)
        self._top = top

    def _create_resource(self) -> tf.Tensor:
        return tf.raw_ops.AnonymousMutableHashTable(key_dtype=tf.int64, value_dtype=tf.int64)

    def _create_named(self, name: str) -> tf.Tensor:
        return tf.raw_ops.MutableHashTableV2(
            container="", shared_name=name, key_dtype=tf.int64, value_dtype=tf.int64
        )

    def _initialize(self) -> None:
        ids = self._ids.read_value()
        self.replace(ids, tf.range(tf.size(ids, tf.int64)))
        self._top.assign(tf.size(ids, tf.int64))

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the places of ids that are there, each once."""
        places = tf.raw_ops.LookupTableFindV2(
            table_handle=self.resource_handle, keys=ids, default_value=np.int64(-1)
        )
        places = tf.ensure_shape(places, [None])
        return tf.unique(tf.boolean_mask(places, places >= 0)).y

    def all(self) -> tf.Tensor:
        """Return all places."""
        table = tf.raw_ops.LookupTableExportV2(
            table_handle=self.resource_handle, Tkeys=tf.int64, Tvalues=tf.int64
        )
        return tf.ensure_shape(table.values, [None])

    def replace(self, ids: tf.Tensor, places: tf.Tensor) -> tf.Operation:
        """Forget all ids, and name these."""
        return tf.raw_ops.LookupTableImportV2(
            table_handle=self.resource_handle, keys=ids, values=places
        )

    def change(self, removed: tf.Tensor, ids: tf.Tensor, places: tf.Tensor) -> tf.Operation:
        """Forget some ids, and name others."""
        remove = tf.raw_ops.LookupTableRemoveV2(table_handle=self.resource_handle, keys=removed)
        with tf.control_dependencies([remove]):
            return tf.raw_ops.LookupTableInsertV2(
                table_handle=self.resource_handle, keys=ids, values=places
            )


class UpdatableTable(tf.Module):
    """A table without a vocabulary in a SavedModel.

    Args:
        ids: a variable with the ids at the time of the export.
        rows: their rows, in the same order; of unknown length.
        rows_of_ids: makes the rows of other ids.
    """

    def __init__(self, ids: tf.Variable, rows: tf.Variable, rows_of_ids: RowsOfIds) -> None:
        super().__init__(name="table")
        self.ids, self.rows = ids, rows
        self._rows_of_ids = rows_of_ids
        # The places below `top` are in use, but those in `free`.
        self.top = variable(np.int64(0))
        self.free = variable(np.zeros(0, np.int64), shape=[None])
        self.places = [_MutablePlaces(ids, self.top) for _ in GENERATIONS]

    def take(self, generation: int, ids: tf.Tensor) -> tf.Tensor:
        """Return the rows of ids in a generation, or their default rows."""
        handle = self.places[generation].resource_handle
        return rows_or_default(ids, handle, self.rows, self._rows_of_ids)

    def write_rows(
        self, ids: tf.Tensor, rows: tf.Tensor, removed: tf.Tensor, is_whole: tf.Tensor
    ) -> tf.Tensor:
        """Write rows to places that no generation names; return these.

        The places that the generations are about to give up are free from now on. Call when both
        are equal.
        """
        places = self.places[0]
        given_up = tf.cond(is_whole, places.all, lambda: places.find(tf.concat([ids, removed], 0)))
        free, top = self.free.read_value(), self.top.read_value()
        number = tf.size(ids, tf.int64)
        reused = tf.minimum(number, tf.size(free, tf.int64))
        new_top = top + number - reused
        places_of_rows = tf.concat([free[:reused], tf.range(top, new_top)], 0)
        with tf.control_dependencies([self._make_room(new_top)]):
            write = tf.raw_ops.ResourceScatterUpdate(
                resource=self.rows.handle, indices=places_of_rows, updates=rows
            )
        notes = [
            self.free.assign(tf.concat([free[reused:], given_up], 0), read_value=False),
            self.top.assign(new_top, read_value=False),
        ]
        with tf.control_dependencies([write, *notes]):
            return tf.identity(places_of_rows)

    def name_places(
        self,
        generation: int,
        ids: tf.Tensor,
        places: tf.Tensor,
        removed: tf.Tensor,
        is_whole: tf.Tensor,
    ) -> tf.Tensor:
        """Let a generation know the places of ids, and forget removed ones."""
        of_generation = self.places[generation]

        def done(operation: tf.Operation) -> tf.Tensor:
            with tf.control_dependencies([operation]):
                return tf.constant(0)

        return tf.cond(
            is_whole,
            lambda: done(of_generation.replace(ids, places)),
            lambda: done(of_generation.change(removed, ids, places)),
        )

    def _make_room(self, top: tf.Tensor) -> tf.Tensor:
        size = tf.raw_ops.VariableShape(input=self.rows.handle, out_type=tf.int64)
        missing = top - size[0]

        def grow() -> tf.Tensor:
            more = tf.zeros([missing + top // _GROWTH, size[1]], self.rows.dtype)
            grown = tf.concat([self.rows.read_value(), more], 0)
            with tf.control_dependencies([self.rows.assign(grown, read_value=False)]):
                return tf.constant(0)

        return tf.cond(missing > 0, grow, lambda: tf.constant(0))


class UpdatableWeight(tf.Module):
    """A weight in a SavedModel, with a value for each generation.

    Args:
        values: a variable for each generation.
    """

    def __init__(self, values: Sequence[tf.Variable]) -> None:
        super().__init__(name="weight")
        self.values = list(values)

    def set(self, generation: int, value: tf.Tensor, is_given: tf.Tensor) -> tf.Tensor:
        """Set the value in a generation, if one is given."""

        def assign() -> tf.Tensor:
            write = self.values[generation].assign(value, read_value=False)
            with tf.control_dependencies([write]):
                return tf.constant(0)

        return tf.cond(is_given, assign, lambda: tf.constant(0))

    def set_rows(self, generation: int, ids: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Set some rows of the value in a generation."""
        write = tf.raw_ops.ResourceScatterUpdate(
            resource=self.values[generation].handle, indices=ids, updates=rows
        )
        with tf.control_dependencies([write]):
            return tf.constant(0)


class Mutex(tf.saved_model.experimental.TrackableResource):
    """A mutex of a SavedModel: one delta at a time."""

    def __init__(self) -> None:
        super().__init__(device="CPU")
        self._shared_name = f"kerasps_{uuid.uuid4().hex}"
        with tf.init_scope(), tf.device(COORDINATOR_CPU):
            assert self.resource_handle is not None

    def _create_resource(self) -> tf.Tensor:
        return tf.raw_ops.MutexV2(container="", shared_name=self._shared_name)

    def _initialize(self) -> None:
        pass

    def locked(self) -> tf.Tensor:
        """Return a lock, which is held until it is consumed."""
        return tf.raw_ops.MutexLock(mutex=self.resource_handle)
