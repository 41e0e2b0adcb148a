"""The Keras variables of a table and of its slots in one process.

They are plain Keras's, by place. Files have them as on ps, by id: so their class is another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from kerasps.dynamic.tables.row_files import IDS, ROWS, RowsById, VariableById, not_later
from kerasps.variables.lanes.phase import current_phase


class Table(Protocol):
    """A table in one process (see `local_table.py`).

    Attributes:
        num_places: the most rows that it may have.
    """

    num_places: int

    def sorted_ids(self) -> np.ndarray:
        """Return the ids of the table, ascending."""

    def places_of(self, ids: np.ndarray, *, makes: bool = False) -> np.ndarray:
        """Return the places of ids, -1 for an id without a row, or make these rows."""

    def find_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of ids; makes none."""

    def replace_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Replace all rows of the table."""

    def keep(self, slot: LocalSlot) -> None:
        """Let the rows of a slot move with those of the table."""


class LocalRows(keras.Variable, VariableById):
    """The rows of a table.

    Attributes:
        table: the table.
    """

    table: Table

    @property
    def table_of_rows(self) -> object:
        return self.table

    def sorted_ids(self) -> np.ndarray:
        return self.table.sorted_ids()

    def find_rows(self, ids: np.ndarray) -> np.ndarray:
        return self.table.find_rows(ids)

    def write_rows(self, ids: np.ndarray, rows: ArrayLike) -> None:
        scatter(self, self.table.places_of(ids, makes=True), np.asarray(rows))

    def replace_rows(self, ids: np.ndarray, rows: ArrayLike) -> None:
        self.table.replace_rows(ids, np.asarray(rows))

    def assign(self, value: object) -> Any:
        """Replace all rows if the value is a `RowsById`; else assign as Keras does."""
        if not isinstance(value, RowsById):
            return super().assign(value)
        self.replace_rows(value.ids, value.rows)
        return self.value

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if current_phase() is not None:  # a SavedModel has the variable as it is
            return dict(super()._serialize_to_tensors())
        ids = self.sorted_ids()
        with tf.device("CPU:0"):
            return {IDS: tf.constant(ids), ROWS: tf.constant(self.find_rows(ids))}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        ids, rows = (np.asarray(restored_tensors[name]) for name in (IDS, ROWS))
        return self.assign(RowsById(ids, rows))

    def _copy_trackable_to_cpu(self, object_map: Any) -> NoReturn:
        del object_map
        raise not_later(self.path)


class LocalSlot(LocalRows):
    """The rows of a slot.

    Attributes:
        initializer: the initializer of the slot.
    """

    initializer: Any

    def find_rows(self, ids: np.ndarray) -> np.ndarray:
        places = self.table.places_of(ids)
        rows = tf.gather(self.value, np.maximum(places, 0))
        first = self.initializer([1, *self.shape[1:]], dtype=self.dtype)
        return np.asarray(tf.where((places >= 0)[:, None], rows, first))

    def replace_rows(self, ids: np.ndarray, rows: ArrayLike) -> None:
        self.begin_with(self.table.places_of(ids, makes=True), np.asarray(rows))

    def begin_with(self, places: np.ndarray, rows: np.ndarray) -> None:
        """Set the rows at some places; let all others begin anew."""
        super().assign(self.initializer(self.shape, dtype=self.dtype))
        scatter(self, places, rows)


class _ThreadState(threading.local):
    # The table and the initializer of the slot that is being made.
    slot: tuple[Table, object] | None = None


_STATE = _ThreadState()


@contextlib.contextmanager
def making_slot(table: Table, initializer: object) -> Iterator[None]:
    """Make the variable that is made in this context a slot of a table."""
    _STATE.slot = table, initializer
    try:
        yield
    finally:
        _STATE.slot = None


def becomes_slot(variable: keras.Variable) -> bool:
    """Make a new variable a slot if it is one; return whether it is."""
    if _STATE.slot is None:
        return False
    (table, initializer), _STATE.slot = _STATE.slot, None
    variable.__class__, variable.table = LocalSlot, table
    variable.initializer = keras.initializers.get(initializer)
    table.keep(variable)
    return True


# These write by the handle, as a replica of a CentralStorageStrategy cannot assign in a `tf.cond`,
# and on the device of the variable, which may be a GPU.
def scatter(
    variable: keras.Variable, places: tf.Tensor | np.ndarray, rows: tf.Tensor | np.ndarray
) -> None:
    """Set the rows of a variable at places."""
    with tf.device(None):
        tf.raw_ops.ResourceScatterUpdate(
            resource=variable.handle, indices=places, updates=tf.cast(rows, variable.dtype)
        )


def assign(variable: Any, value: tf.Tensor) -> None:
    """Set the value of a variable."""
    with tf.device(None):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def numbers(*shape: int) -> tf.Variable:
    """Return a variable of zeros, int64."""
    return tf.Variable(
        tf.zeros(shape, tf.int64),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
