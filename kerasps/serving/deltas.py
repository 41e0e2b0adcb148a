"""Deltas as records of NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TableDelta:
    """The rows of a table that changed.

    Attributes:
        ids: int64 of shape `[n]`, each id once: the ids whose rows changed. Those of a fixed table
            are its row numbers.
        rows: their rows as they are now, of shape `[n, width]` and the dtype of the file.
        removed: int64: ids that have no row now. The table may never have had them.
        is_whole: True if `ids` are all ids, so that a reader forgets the others.
        default: how the row of another id is made, as in the manifest (`docs/delta_files.md`);
            None for a fixed table.
    """

    ids: np.ndarray
    rows: np.ndarray
    removed: np.ndarray
    is_whole: bool
    default: dict[str, Any] | None


@dataclass(frozen=True)
class Delta:
    """A base, or the difference from the delta before it.

    Attributes:
        version: its number, one more than that of the delta before, over all chains.
        is_base: True if it is a base: a reader forgets all that it had.
        read_at: when its content was read from the training, in seconds since 1970.
        step: the updates that the optimizer had made then.
        tables: the changed rows, by the path of the table.
        weights: the changed weights, whole, by their paths.
        name: the name of its manifest.
    """

    version: int
    is_base: bool
    read_at: float
    step: int
    tables: dict[str, TableDelta]
    weights: dict[str, np.ndarray]
    name: str


class State:
    """The tables and weights that deltas leave, as NumPy arrays. Apply each delta in turn.

    ```python
    state = kerasps.serving.State()
    for delta in kerasps.serving.DeltaReader("deltas").new():
        state.apply(delta)
    for path, (ids, rows) in state.tables.items():
        print(path, ids.shape, rows.shape)
    ```

    Attributes:
        version: the version of the last delta; None before the first one.
        weights: the values of weights, by their paths.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.weights: dict[str, np.ndarray] = {}
        self._tables: dict[str, dict[int, np.ndarray]] = {}
        self._widths: dict[str, tuple[int, Any]] = {}

    def apply(self, delta: Delta) -> None:
        """Take over the changes of a delta."""
        if delta.is_base:
            self._tables, self.weights = {}, {}
        for path, change in delta.tables.items():
            rows = self._tables.setdefault(path, {})
            self._widths[path] = (change.rows.shape[1], change.rows.dtype)
            if change.is_whole:
                rows.clear()
            for removed in change.removed.tolist():
                rows.pop(removed, None)
            rows.update(zip(change.ids.tolist(), change.rows, strict=True))
        self.weights.update(delta.weights)
        self.version = delta.version

    @property
    def tables(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The ids of each table, ascending, and their rows, by its path."""
        return {path: self._sorted(path) for path in self._tables}

    def _sorted(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        rows = self._tables[path]
        ids = sorted(rows)
        width, dtype = self._widths[path]
        values = np.empty((len(ids), width), dtype)
        for place, number in enumerate(ids):
            values[place] = rows[number]
        return np.array(ids, np.int64), values
