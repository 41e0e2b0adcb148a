"""Loads rows by their ids into tables, with and without a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from kerasps.dynamic.ids.keys import ids_of
from kerasps.dynamic.ids.rows_of_ids import check_different
from kerasps.dynamic.local.local_rows import scatter
from kerasps.dynamic.tables.row_files import VariableById
from kerasps.errors import InputError
from kerasps.runtime.calls import persist
from kerasps.variables import ParameterServerVariable, wait_for_steps
from kerasps.variables.lanes.phase import note_assignment
from kerasps.variables.rows.sharding import ShardedStorage


def load_rows(
    layer: keras.layers.Layer | keras.Variable,
    rows: Iterable[tuple[ArrayLike, ArrayLike]],
    vocabulary: ArrayLike | None = None,
) -> int:
    """Set rows of a table to those of an iterable, piece by piece; return how many.

    Other rows of the table stay. Into a `DynamicEmbedding` all rows are loaded; into a
    `keras.layers.Embedding`, those of ids that the vocabulary has. No process holds the table.

    ```python
    words = ["[UNK]", "tea", "salt"]
    fixed = keras.layers.Embedding(3, 8)
    fixed.build()
    table = kerasps.layers.DynamicEmbedding(8)
    table.build()
    table.load_rows(["salt"], np.ones((1, 8)))
    print(kerasps.layers.load_rows(fixed, table.items(), vocabulary=words))  # 1
    ```

    Args:
        layer: a `DynamicEmbedding`, a `keras.layers.Embedding`, or the variable of a table or of a
            slot of an optimizer.
        rows: pieces `(ids, rows)`: those of `rows_in_file`, of `rows_of_recommenders_addons`, of
            the method `items` of a `DynamicEmbedding`, or others of any source. Ids are integers or
            strings, and different within a piece.
        vocabulary: for a table with a fixed number of rows: the id of each row, integers or
            strings. A `keras.layers.StringLookup` has them as `get_vocabulary()`. It may be shorter
            than the table. Default None, for a table without a vocabulary.

    Raises:
        InputError: the table and the vocabulary, or a piece, do not fit.
    """
    variable = table_of(layer)
    if variable is None:
        raise InputError(
            "Rows cannot be loaded into this object. Expected: a built `DynamicEmbedding` or "
            f"`keras.layers.Embedding`, or a variable of two axes. Received: {layer!r}. Build the "
            "layer before, as by `layer.build()` in the scope."
        )
    is_fixed = not isinstance(variable, VariableById)
    if is_fixed != (vocabulary is not None):
        raise InputError(
            f"The table '{variable.path}' has {'a fixed number of' if is_fixed else 'any'} rows. "
            f"Expected: {'a' if is_fixed else 'no'} vocabulary. Received: "
            f"{'none' if is_fixed else 'one'}. A vocabulary says which id each row of a "
            "`keras.layers.Embedding` has."
        )
    wait_for_steps()
    write = _writer_by_id(variable) if vocabulary is None else _writer_to(variable, vocabulary)
    return sum(write(*_checked(variable, *piece)) for piece in rows)


def table_of(layer: object) -> keras.Variable | None:
    """Return the variable with the rows of a layer, or of a variable itself; None for others."""
    variable = layer if isinstance(layer, keras.Variable) else getattr(layer, "embeddings", None)
    if not isinstance(variable, keras.Variable) or len(variable.shape) != 2:
        return None
    return variable


def _checked(
    variable: keras.Variable, ids: ArrayLike, rows: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    vector, values = ids_of(ids), np.asarray(rows)
    if values.shape != (len(vector), variable.shape[1]):
        raise InputError(
            f"A piece does not fit the table '{variable.path}'. Expected: {len(vector):,} ids and "
            f"rows of shape {(len(vector), int(variable.shape[1]))}. Received: rows of shape "
            f"{values.shape}. Give one row of the table's width for each id."
        )
    check_different(vector)
    return vector, values


def _writer_by_id(variable: VariableById) -> Callable[[np.ndarray, np.ndarray], int]:
    def write(ids: np.ndarray, rows: np.ndarray) -> int:
        variable.write_rows(ids, rows)
        return len(ids)

    return write


def _writer_to(
    variable: keras.Variable, ids_of_rows: ArrayLike
) -> Callable[[np.ndarray, np.ndarray], int]:
    """Return a function that writes the rows of the ids that a vocabulary has."""
    vocabulary = Vocabulary(ids_of_rows)
    if len(vocabulary) > variable.shape[0]:
        raise InputError(
            f"The vocabulary does not fit the table '{variable.path}'. Expected: at most "
            f"{variable.shape[0]:,} ids, one for each row. Received: {len(vocabulary):,}. Give the "
            "vocabulary of this table."
        )

    def write(ids: np.ndarray, rows: np.ndarray) -> int:
        places = vocabulary.rows_of(ids)
        known = places >= 0
        if known.any():
            write_fixed(variable, places[known], rows[known])
        return int(known.sum())

    return write


class Vocabulary:
    """The ids of the rows of a table with a fixed number of rows.

    Args:
        ids: the id of each row, different integers or strings.
    """

    def __init__(self, ids: ArrayLike) -> None:
        self.ids = ids_of(ids)
        check_different(self.ids)
        self._order = np.argsort(self.ids)
        self._sorted = self.ids[self._order]

    def __len__(self) -> int:
        return len(self.ids)

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows of ids, -1 for an id that it does not have."""
        if not len(self):
            return np.full(len(ids), -1)
        at = np.minimum(np.searchsorted(self._sorted, ids), len(self) - 1)
        return np.where(self._sorted[at] == ids, self._order[at], -1)


def read_fixed(variable: keras.Variable, places: np.ndarray) -> np.ndarray:
    """Return rows of a table with a fixed number of rows."""
    if isinstance(variable, ParameterServerVariable):
        return np.asarray(variable.take(places))
    return np.asarray(tf.gather(variable.value, places))


def write_fixed(variable: keras.Variable, places: np.ndarray, rows: np.ndarray) -> None:
    """Set rows of a table with a fixed number of rows.

    It does nothing in a process whose values are not written (see `NamedVariable.takes_values`).
    """
    if not isinstance(variable, ParameterServerVariable):
        scatter(variable, places, rows)
        return
    if not all(getattr(shard, "takes_values", True) for shard in variable.shards):
        return
    note_assignment()
    storage = variable.storage
    values = tf.cast(rows, storage.dtype)
    slices = tf.IndexedSlices(values, tf.constant(places, tf.int64))

    def write() -> None:
        if isinstance(storage, ShardedStorage):
            storage.scatter_update(slices)
        else:
            with tf.device(storage.device):
                storage.scatter_update(slices)

    persist(write)  # rows that are written twice are the same
