"""The rows of a table in one process that changed since a version.

Plain Keras writes these rows, also those of no id in the batch. So each question compares all rows
with a copy, as they were at the question before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from kerasps.dynamic.policies.stamps import MOST_REMOVED
from kerasps.dynamic.tables.changed import ChangedRows, checked_version


class LocalChanges:
    """Tells the rows of a table that changed (see `ChangedRows`).

    Args:
        width: the length of a row.
        dtype: the dtype of the rows.
    """

    def __init__(self, width: int, dtype: np.dtype) -> None:
        self._born = time.time_ns() // 1000
        self._version = 0
        self._ids, self._rows = np.zeros(0, np.int64), np.zeros([0, width], dtype)
        # The version in which each row changed last; ids that were removed, and when.
        self._stamps = np.zeros(0, np.int64)
        self._removed = np.zeros([0, 2], np.int64)
        # Of removals before this version, some are forgotten.
        self._oldest = 0

    def since(self, version: object, ids: np.ndarray, rows: np.ndarray, batch: int) -> ChangedRows:
        """Return the rows that changed since a version.

        Args:
            ids: the ids that there are, ascending.
            rows: their rows.

        Raises:
            InputError: it is no version.
        """
        born, since = (*checked_version(version), 0, 0)[:2]
        self._compare(ids, rows)
        is_whole = born != self._born or not self._oldest <= since < self._version
        since = 0 if is_whole else since
        removed = self._removed[self._removed[:, 1] > since, 0]
        return ChangedRows(
            (self._born, self._version),
            is_whole,
            removed[:0] if is_whole else np.setdiff1d(removed, ids),
            _pieces(ids, rows, np.flatnonzero(self._stamps > since), batch),
        )

    def _compare(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Find the rows that changed since the last question."""
        self._version += 1
        stamps = np.full(len(ids), self._version)
        _, here, before = np.intersect1d(ids, self._ids, assume_unique=True, return_indices=True)
        # By their bits, so that a NaN is equal to itself, and 0.0 is not -0.0.
        new, old = (np.ascontiguousarray(values).view(np.uint8) for values in (rows, self._rows))
        is_same = (new[here] == old[before]).all(1)
        stamps[here[is_same]] = self._stamps[before[is_same]]
        gone = np.setdiff1d(self._ids, ids, assume_unique=True)
        told = np.stack([gone, np.full(len(gone), self._version)], 1)
        removed = np.concatenate([self._removed, told])
        if len(removed) > MOST_REMOVED:
            self._oldest = int(removed[-MOST_REMOVED - 1, 1])
        self._removed = removed[-MOST_REMOVED:]
        self._ids, self._rows, self._stamps = ids, rows, stamps


def _pieces(
    ids: np.ndarray, rows: np.ndarray, places: np.ndarray, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, len(places), batch):
        chosen = places[start : start + batch]
        yield ids[chosen], rows[chosen]
