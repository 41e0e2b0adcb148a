"""Saves and loads the variables of an optimizer in Keras's files: large ones, and slots of tables.

Keras writes variable number i under the name "i". A slot of a table without a vocabulary is its
rows, in the order of their ids; those are beside it, under "i_ids". Slots of one table share their
ids: HDF5 has them once, under several names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np

from kerasps import _compat
from kerasps.dynamic.tables.row_files import RowsById, TableRows, VariableById
from kerasps.saving.keras_files import is_large

_IDS = "_ids"


def save_optimizer(
    original: Callable[..., None], optimizer: keras.optimizers.Optimizer, store: Any
) -> None:
    """Save an optimizer's variables without reading large ones whole.

    Replaces `Optimizer.save_own_variables`.
    """
    if not any(is_large(v) or isinstance(v, VariableById) for v in optimizer.variables):
        original(optimizer, store)
        return
    # For each table, its ids, and the name of the first entry with them.
    tables: dict[int, tuple[np.ndarray, str]] = {}
    for index, variable in enumerate(optimizer.variables):
        name = str(index)
        if not isinstance(variable, VariableById):
            store[name] = variable
            continue
        table = id(variable.table_of_rows)
        if table not in tables:
            tables[table] = variable.sorted_ids(), name + _IDS
            store[name + _IDS] = tables[table][0]
        elif isinstance(store, _compat.ShardedH5IOStore):  # the entries may be in several files
            store[name + _IDS] = tables[table][0]
        else:
            store._h5_entry_group[name + _IDS] = store._h5_entry_group[tables[table][1]]
        store[name] = TableRows(variable.find_rows, tables[table][0])


def load_optimizer(
    original: Callable[..., None], optimizer: keras.optimizers.Optimizer, store: Any
) -> None:
    """Load an optimizer's variables, slots of tables without a vocabulary with their ids.

    Replaces `Optimizer.load_own_variables`.
    """
    slots = {str(i) for i, v in enumerate(optimizer.variables) if isinstance(v, VariableById)}
    if slots:
        store = _WithSlots(store, slots)
    original(optimizer, store)


class _WithSlots:
    """The entries of an optimizer, of which two are one slot of a table without a vocabulary.

    Args:
        slots: the names of such slots.
    """

    def __init__(self, store: Any, slots: Collection[str]) -> None:
        self._store, self._slots = store, slots

    def keys(self) -> Sequence[str]:
        """Return the names of the variables."""
        return [name for name in sorted(self._store.keys()) if not name.endswith(_IDS)]

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._store[name]
        return RowsById(np.asarray(self._store[name + _IDS]), self._store[name])
