"""Tables without a vocabulary as files have them.

In every file a table is its ids, int64 and ascending, and its rows in their order. A slot of an
optimizer is the same, with the ids of its table. So a file does not depend on the number of ps. A
table that is loaded loses the rows that the file does not have. Formats:

- `.weights.h5` and `.keras`: the layer has the datasets `ids` and `rows`; the optimizer, for a
  slot that is its variable i, `i_ids` and `i` (see `saving/optimizer_files.py`).
- `tf.train.Checkpoint`: the variable has the values `IDS` and `ROWS`.
- A backup of a training: files with some ids, and the rows of the table and of all its slots (see
  `saving/table_backups.py`).
- A SavedModel: two variables, and a hash table that is filled from the first when it is loaded (see
  `saving/saved_model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, DTypeLike

from kerasps import _compat
from kerasps.dynamic.parts.keyed_rows import KeyedStorage
from kerasps.dynamic.tables.row_access import RowAccess, pieces_of
from kerasps.errors import UnsupportedError
from kerasps.variables.storage.kinds import MOST_ROWS

# More in a list of `get_weights` would surprise: other variables are as large as users made them.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, eq=False, repr=False)
class RowsById:
    """The value of a table without a vocabulary, or of a slot: rows, and the ids they belong to.

    `model.get_weights()` returns one where another variable has an array, and
    `model.set_weights()` takes it. As a new value it replaces all rows of the table.

    Attributes:
        ids: different int64 ids.
        rows: an array of shape `[len(ids), width]`, or an object that is sliced like one.
    """

    ids: np.ndarray
    rows: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the variable, which has no number of rows that stays."""
        return (MOST_ROWS, *self.rows.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the rows."""
        return self.rows.dtype

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<RowsById rows={len(self.ids):,} width={self.rows.shape[1]} dtype={self.dtype}>"


class VariableById:
    """A Keras variable of a table, or of a slot, which files have as ids and rows.

    Attributes:
        path: the path of the variable.
    """

    path: str

    @property
    def table_of_rows(self) -> object:
        """The table. That of its slots is the same object."""
        raise NotImplementedError

    def sorted_ids(self) -> np.ndarray:
        """Return the ids of the table, int64 and ascending."""
        raise NotImplementedError

    def find_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of ids, `[len(ids), width]`; makes none."""
        raise NotImplementedError

    def write_rows(self, ids: np.ndarray, rows: ArrayLike) -> None:
        """Set the rows of different ids; make those that are missing.

        Args:
            rows: an array, or an object that is sliced like one.

        Raises:
            InputError: there is no room for them.
        """
        raise NotImplementedError

    def replace_rows(self, ids: np.ndarray, rows: ArrayLike) -> None:
        """Set the rows of different ids, and remove all others.

        In a slot, rows of other ids begin anew. A table and its slots may be replaced in any order.

        Args:
            rows: an array, or an object that is sliced like one.

        Raises:
            InputError: there is no room for them.
        """
        raise NotImplementedError


class TableRows:
    """The rows of some ids of a table, as an array that is read in pieces.

    Args:
        find_rows: returns the rows of ids.
        ids: the ids, in the order of the rows.
    """

    def __init__(self, find_rows: Callable[[np.ndarray], np.ndarray], ids: np.ndarray) -> None:
        self._find_rows, self._ids = find_rows, ids
        empty = find_rows(ids[:0])
        self.dtype = empty.dtype
        self.shape = (len(ids), *empty.shape[1:])

    def __len__(self) -> int:
        return len(self._ids)

    def pieces(self) -> Iterator[tuple[range, np.ndarray]]:
        """Iterate over pieces: their places in the array, and the rows."""
        for places in pieces_of(len(self), self.shape[1] * self.dtype.itemsize):
            yield places, self._find_rows(self._ids[places.start : places.stop])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy  # rows that are read are a copy
        return np.asarray(self._find_rows(self._ids), dtype)


def save_table(
    store: Any, table: VariableById, *, ids_name: str = "ids", rows_name: str = "rows"
) -> None:
    """Write a table, or a slot, into two entries of Keras's weights file.

    Args:
        store: what Keras passes to `save_own_variables`.
    """
    ids = table.sorted_ids()
    store[ids_name], store[rows_name] = ids, TableRows(table.find_rows, ids)


def value_of(access: RowAccess, name: str) -> RowsById:
    """Return the value of a table, or of a slot.

    Raises:
        UnsupportedError: it is larger than 1 GiB.
    """
    ids = access.sorted_ids()
    num_bytes = len(ids) * (8 + access.row_bytes)
    if num_bytes > _MOST_BYTES:
        raise UnsupportedError(
            f"The value of '{name}', a table without a vocabulary, is too large for this process. "
            f"Expected: at most {_MOST_BYTES >> 30} GiB for `get_weights`. Received: {len(ids):,} "
            f"rows, {num_bytes / 2**30:.1f} GiB. Save the model into a file, which is written in "
            "pieces, or read pieces with the layer's `items()`."
        )
    return RowsById(ids, access.read(ids))


class TableValue(_compat.base_class("CheckpointCallable")):  # type: ignore[misc]
    """The ids, or the rows, of a table or of a slot in a checkpoint.

    The writer of checkpoints recognises this class and writes it in pieces.

    Args:
        storage: the table, or the slot.
        is_ids: whether it is the ids.
    """

    def __init__(self, storage: KeyedStorage, *, is_ids: bool) -> None:
        dtype = tf.int64 if is_ids else storage.dtype
        super().__init__(storage.read_value, dtype, storage.device)
        self.storage, self.is_ids = storage, is_ids


# The names of the two values of a table in a checkpoint.
IDS, ROWS = "IDS", "ROWS"


def values_for_checkpoint(storage: KeyedStorage) -> dict[str, TableValue]:
    """Return what a checkpoint has of a table, or of a slot, by its name there."""
    return {IDS: TableValue(storage, is_ids=True), ROWS: TableValue(storage, is_ids=False)}


def not_later(name: str) -> UnsupportedError:
    """Return the error of a checkpoint that would need a copy of a table or of a slot."""
    return UnsupportedError(
        f"A checkpoint that is written later would need a copy of '{name}', a table without a "
        "vocabulary, which may fill the memory. Expected: a checkpoint that is written at once. "
        "Received: `enable_async=True`. Leave it out."
    )
