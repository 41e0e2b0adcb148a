"""The initializer of the weight of a table without a vocabulary."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.admission import Admission
from kerasps.dynamic.ids.eviction import Eviction
from kerasps.dynamic.ids.first_rows import FirstRows
from kerasps.dynamic.ids.keys import salt_of
from kerasps.errors import InputError, UnsupportedError
from kerasps.variables.storage.kinds import MOST_ROWS

__all__ = ["MOST_ROWS", "RowsOfIds"]


class RowsOfIds(keras.initializers.Initializer):
    """Says how a table without a vocabulary begins: with no rows.

    A strategy recognizes such a variable by this initializer, and makes a `KeyedVariable`.

    Args:
        first_rows: makes the row of an id before its first update.
        seed: the seed of these rows, any integer.
        max_rows: the most rows that the table may have; None for as many as the memory holds.
        admission: decides which ids get rows; None for all.
        reads_zeros: whether an id without a row reads zeros, and not its first row.
        eviction: the rule by which rows are given up; None for none.

    Attributes:
        first_rows: as given.
        salt: the salt of the seed.
        max_rows: as given.
        admission: as given.
        reads_zeros: as given.
        eviction: as given.
    """

    def __init__(
        self,
        first_rows: FirstRows,
        seed: int,
        max_rows: int | None,
        *,
        admission: Admission | None = None,
        reads_zeros: bool = False,
        eviction: Eviction | None = None,
    ) -> None:
        self.first_rows = first_rows
        self.salt = salt_of(seed)
        self.max_rows = max_rows
        self.admission, self.reads_zeros = admission, reads_zeros
        self.eviction = eviction

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        raise UnsupportedError(
            "The weight of a table without a vocabulary has no value as a whole. Expected: a use "
            f"of the layer `DynamicEmbedding`. Received: a value of shape {tuple(shape)}. Make the "
            "layer in the scope of the strategy, or without a strategy."
        )

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the first rows of ids, an int64 vector."""
        return self.first_rows(ids, np.int64(self.salt))

    def default_rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Return what ids without a row read."""
        rows = self.rows(ids)
        return tf.zeros_like(rows) if self.reads_zeros else rows


class CountsOfIds(RowsOfIds):
    """Says how the counts of the ids that may get a row begin: with none.

    Args:
        max_candidates: the most ids that are counted.
        table: the storage of the table on ps; None in one process.

    Attributes:
        max_candidates: as given.
        table: as given.
    """

    def __init__(self, max_candidates: int, table: object = None) -> None:
        super().__init__(FirstRows("constant", 0.0, 0.0, 1, "int32"), 0, max_candidates)
        self.max_candidates, self.table = max_candidates, table


class UsageOfRows(keras.initializers.Initializer):
    """Says that a weight has the use of each row of a table with eviction: ticks, or counts.

    Args:
        table: the storage of the table.
        eviction: its eviction.
    """

    def __init__(self, table: object, eviction: Eviction) -> None:
        self.table, self.num_columns = table, eviction.num_columns

    def __call__(self, shape: object, dtype: object = None) -> Any:
        raise NotImplementedError


def check_different(ids: np.ndarray) -> None:
    """Raise `InputError` if ids are not different."""
    if (ids[1:] > ids[:-1]).all():
        return
    num_different = len(np.unique(ids))
    if num_different < len(ids):
        raise InputError(
            "An id has more than one row. Expected: each id once. Received: "
            f"{len(ids):,} ids, {num_different:,} of them different. Leave out the repeated ids."
        )
