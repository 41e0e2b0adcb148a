"""Pools of keyed rows: all tables of one width share a pool, which has a part on each ps."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.dynamic.ids.rows_of_ids import RowsOfIds
from kerasps.dynamic.parts.index_growth import IndexGrowth
from kerasps.dynamic.parts.key_part import MOST_TABLES, PIECE, KeyPart
from kerasps.dynamic.parts.keyed_rows import KeyedRows, KeyedStorage, TableRecord
from kerasps.dynamic.parts.room import places_on
from kerasps.dynamic.tables.table import KeyedVariable
from kerasps.errors import InputError
from kerasps.runtime.devices import ps_device
from kerasps.runtime.on_ps import OnPS
from kerasps.variables.placing.placing import Extended
from kerasps.variables.storage.named import NamedIndex, NamedVariable

_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class PoolTerms:
    """The means by which pools are made, and those that they need later.

    Attributes:
        devices: the devices of all ps.
        make: makes a variable (see `variables.NamedVariable`).
        make_index: makes a hash table on a device, with a number of buckets.
        mutex: returns the lock of a ps.
        is_lasting: whether several processes share the pools by name, so that a pool and the
            number of a table outlive them.
        growth: watches the indexes of their parts.
    """

    devices: Sequence[str]
    make: Callable[..., NamedVariable]
    make_index: Callable[[str, int], NamedIndex]
    mutex: Callable[[str], tf.Tensor]
    is_lasting: bool
    growth: IndexGrowth


class KeyPool:
    """The rows of all tables of one width and dtype.

    Attributes:
        number: its number among those of this process.
        parts: the part on each ps.
    """

    def __init__(self, terms: PoolTerms, width: int, dtype: tf.DType, *, trainable: bool) -> None:
        self.number = next(_NUMBERS)
        self.parts = [
            KeyPart(
                device,
                width,
                dtype,
                places_on(device, width * dtype.size),
                terms.make,
                terms.make_index,
                trainable=trainable,
            )
            for device in terms.devices
        ]
        for part in self.parts:
            terms.growth.watch(part, terms.mutex(part.device))
        self._terms, self._trainable = terms, trainable
        self._next_table = itertools.count()
        self._free_tables: list[int] = []
        # The numbers of tables that Python has collected, whose rows are still there.
        self._left: list[int] = []

    def add(self, name: str, rows_of_ids: RowsOfIds) -> KeyedStorage:
        """Return the storage of a new table."""
        self._remove_left()
        number = self._free_tables.pop() if self._free_tables else next(self._next_table)
        if number >= MOST_TABLES:
            raise InputError(
                f"There are too many tables without a vocabulary. Expected: at most {MOST_TABLES:,}"
                f" of one width. Received: one more, '{name}'. Let features share a layer."
            )
        table = TableRecord(
            number,
            name,
            rows_of_ids.first_rows,
            rows_of_ids.salt,
            rows_of_ids.max_rows,
            len(self.parts),
        )
        if not self._terms.is_lasting:
            weakref.finalize(table, self._left.append, number).atexit = False
        rows = [
            KeyedRows(part, table, part.rows, self, trainable=self._trainable)
            for part in self.parts
        ]
        return KeyedStorage(rows, name)

    def mutex(self, device: str) -> tf.Tensor:
        """Return the lock of a ps."""
        return self._terms.mutex(device)

    def _remove_left(self) -> None:
        while self._left:
            number = self._left.pop()
            for part in self.parts:
                self._remove_in(part, number)
            self._free_tables.append(number)

    def _remove_in(self, part: KeyPart, number: int) -> None:
        """Remove the rows of a table in a part, some places at a time."""
        place = tf.TensorSpec([], tf.int64)
        remove = OnPS(
            part.device,
            functools.partial(part.remove, number),
            place,
            place,
            mutex=self._terms.mutex(part.device),
        )
        (top,) = OnPS(part.device, part.top).call()
        for first in range(1, int(top), PIECE):
            # A second call finds none of the rows.
            remove.call(first, PIECE)


class KeyPools:
    """The pools of a strategy. A pool lives as long as a table is in it.

    Args:
        terms: the means by which they are made.
        beside: returns the storage beside which this thread makes a variable.
    """

    def __init__(self, terms: PoolTerms, beside: Callable[[], object]) -> None:
        self._terms, self._beside = terms, beside
        self._lock = threading.Lock()
        self._pools: MutableMapping[tuple[int, tf.DType, bool], KeyPool] = (
            {} if terms.is_lasting else weakref.WeakValueDictionary()
        )

    @property
    def variables(self) -> list[NamedVariable]:
        """The variables of all pools."""
        parts = [part for pool in self._pools.values() for part in pool.parts]
        return [variable for part in parts for variable in part.variables]

    def stop(self) -> None:
        """Stop watching indexes, since the cluster closes or this process ends."""
        self._terms.growth.stop()

    def begins(self, variable: Any, initializer: object) -> bool:
        """Make the storage of a new variable if it is a table of ids, or a slot of one.

        Args:
            variable: a `ParameterServerVariable`, which becomes a `KeyedVariable`.

        Returns:
            True if it is.
        """
        if isinstance(initializer, RowsOfIds):
            variable.__class__ = KeyedVariable
            dtype = tf.as_dtype(variable.dtype)
            variable.begin(
                initializer,
                self.add(variable.path, initializer, dtype, trainable=variable.trainable),
            )
            return True
        beside = self._beside()
        if isinstance(beside, KeyedStorage) and tuple(beside.shape) == tuple(variable.shape):
            variable.__class__ = KeyedVariable
            variable.begin_slot(beside, initializer)
            return True
        return False

    def add(
        self, name: str, rows_of_ids: RowsOfIds, dtype: tf.DType, *, trainable: bool
    ) -> KeyedStorage:
        """Return the storage of a new table."""
        width = rows_of_ids.first_rows.width
        with self._lock:
            kind = width, dtype, trainable
            pool = self._pools.get(kind)
            if pool is None:
                pool = KeyPool(self._terms, width, dtype, trainable=trainable)
                self._pools[kind] = pool
            return pool.add(name, rows_of_ids)


def add_key_pools(extended: Extended, *, is_lasting: bool = False) -> None:
    """Let a strategy make tables without a vocabulary.

    Args:
        is_lasting: see `PoolTerms`.
    """
    devices = [ps_device(ps) for ps in range(extended.num_ps)]
    make, make_index = extended.new_variable, extended.new_index
    terms = PoolTerms(devices, make, make_index, extended.mutex, is_lasting, IndexGrowth())
    extended.key_pools = KeyPools(terms, lambda: extended.beside)
