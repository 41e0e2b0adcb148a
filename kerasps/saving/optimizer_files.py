"""Saves and loads the variables of an optimizer in Keras's files: large ones, and slots of tables.

Keras writes variable number i under the name "i". A slot of a table without a vocabulary is its
rows, in the order of their ids; those are beside it, under "i_ids". Slots of one table share their
ids: HDF5 has them once, under several names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kerasps import _compat
from kerasps.dynamic.row_files import RowsById, TableRows
from kerasps.dynamic.table import KeyedVariable
from kerasps.saving.keras_files import is_large

_IDS = "_ids"


def save_optimizer(
    original: Callable[..., None], optimizer: keras.optimizers.Optimizer, store: Any
) -> None:
    """Save an optimizer's variables without reading large ones whole.

    Replaces `Optimizer.save_own_variables`.
    """
    if not any(is_large(v) or isinstance(v, KeyedVariable) for v in optimizer.variables):
        original(optimizer, store)
        return
    # For each table, its ids, and the name of the first entry with them.
    tables: dict[int, tuple[np.ndarray, str]] = {}
    for index, variable in enumerate(optimizer.variables):
        name = str(index)
        if not isinstance(variable, KeyedVariable):
            store[name] = variable
            continue
        table = id(variable.storage.table)
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
    slots = {str(i): v for i, v in enumerate(optimizer.variables) if isinstance(v, KeyedVariable)}
    if slots:
        store = _WithSlots(store, set(store.keys()), slots)
    original(optimizer, store)


class _WithSlots:
    """The entries of an optimizer, of which two are one slot of a table without a vocabulary.

    Args:
        names: the names of all entries.
        slots: such slots, by their names.
    """

    def __init__(self, store: Any, names: set[str], slots: Mapping[str, KeyedVariable]) -> None:
        self._store, self._names, self._slots = store, names, slots

    def keys(self) -> Sequence[str]:
        """Return the names of the variables."""
        return [name for name in self._names if not name.endswith(_IDS)]

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._store[name]
        slot = self._slots[name]
        if name + _IDS not in self._names:
            warnings.warn(
                f"A file has a slot of a table without a vocabulary as one process without a "
                f"strategy saves it. Expected: its rows with their ids, '{name + _IDS}'. Received: "
                f"'{name}' alone, for '{slot.path}'. The slot begins anew. To keep it, save the "
                "model in a scope.",
                stacklevel=2,
            )
            return RowsById(np.zeros(0, np.int64), slot.find_rows(np.zeros(0, np.int64)))
        rows = self._store[name]
        return RowsById(np.asarray(self._store[name + _IDS]), rows)
