"""Pools of keyed rows: all tables of one width share a pool, which has a part on each ps."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.dynamic.ids.rows_of_ids import CountsOfIds, RowsOfIds, UsageOfRows
from kerasps.dynamic.parts.figures import clear_figures, set_end
from kerasps.dynamic.parts.index_growth import IndexGrowth
from kerasps.dynamic.parts.key_part import PIECE, KeyPart
from kerasps.dynamic.parts.keyed_rows import KeyedRows, KeyedStorage, TableRecord
from kerasps.dynamic.parts.room import places_on
from kerasps.dynamic.parts.terms import MOST_TABLES, Holder, Region
from kerasps.dynamic.tables.row_access import called_range, spanning
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
        self._next_place = 1
        self._free_regions: list[Region] = []
        # The tables that Python has collected, whose rows are still there.
        self._left: list[Holder] = []

    def add(self, name: str, rows_of_ids: RowsOfIds) -> KeyedStorage:
        """Return the storage of a new table."""
        self._remove_left()
        if isinstance(rows_of_ids, CountsOfIds):
            return self._add_counts(name, rows_of_ids)
        number = self._free_tables.pop() if self._free_tables else next(self._next_table)
        if number >= MOST_TABLES:
            raise InputError(
                f"There are too many tables without a vocabulary. Expected: at most {MOST_TABLES:,}"
                f" of one width. Received: one more, '{name}'. Let features share a layer."
            )
        region = None
        if rows_of_ids.eviction is not None and rows_of_ids.max_rows is not None:
            # A file may have rows that are spread less evenly than `max_rows` is.
            most = -(-rows_of_ids.max_rows // len(self.parts))
            region = self._new_region(name, most + 8 * math.isqrt(most) + 64, replaces=False)
        return self._storage_of(TableRecord(number, name, rows_of_ids, len(self.parts), region))

    def _add_counts(self, name: str, counts_of_ids: CountsOfIds) -> KeyedStorage:
        """Return the storage of the counts of a table's ids: they have its number, and its keys."""
        counted = _counted_by(counts_of_ids).table
        size = -(-counts_of_ids.max_candidates // len(self.parts))
        region = self._new_region(name, size, replaces=True)
        record = TableRecord(counted.number, name, counts_of_ids, len(self.parts), region)
        counted.counts, record.counts_for = record, counted
        return self._storage_of(record)

    def _new_region(self, name: str, size: int, *, replaces: bool) -> Region:
        region = next((free for free in self._free_regions if free.size == size), None)
        if region is not None:
            self._free_regions.remove(region)
            return region
        region = Region(self._next_place, size, replaces)
        if region.first + size > min(part.capacity for part in self.parts):
            raise InputError(
                f"A ps has no room for all rows that '{name}' may have. Expected: a bound within "
                f"the memory. Received: {size:,} rows on each ps. Give the layer a smaller "
                "`max_rows`, or use more ps."
            )
        self._next_place += size
        for part in self.parts:
            if part.tags.takes_values:
                self._open(part, region)
        return region

    def _open(self, part: KeyPart, region: Region) -> None:
        """Mark the places of a new region as free."""
        place, mutex = tf.TensorSpec([], tf.int64), self._terms.mutex(part.device)
        mark = OnPS(part.device, part.mark_free, place, place)
        end = region.first + region.size
        for first in range(region.first, end, PIECE):
            mark.call(first, min(PIECE, end - first))
        # It adds, and so must not run twice.
        OnPS(part.device, functools.partial(set_end, part), place, place, mutex=mutex).run_once(
            end, region.size
        )

    def _storage_of(self, table: TableRecord) -> KeyedStorage:
        if not self._terms.is_lasting:
            weakref.finalize(table, self._left.append, table.holder).atexit = False
        rows = [
            KeyedRows(part, table, part.rows, self, trainable=self._trainable)
            for part in self.parts
        ]
        return KeyedStorage(rows, table.name)

    def mutex(self, device: str) -> tf.Tensor:
        """Return the lock of a ps."""
        return self._terms.mutex(device)

    def _remove_left(self) -> None:
        while self._left:
            holder = self._left.pop()
            for part in self.parts:
                self._remove_in(part, holder)
            if holder.region is not None:
                self._free_regions.append(holder.region)
            if holder.region is None or not holder.region.replaces:
                self._free_tables.append(holder.number)

    def _remove_in(self, part: KeyPart, holder: Holder) -> None:
        """Remove the rows of a table in a part, some places at a time."""

        def remove_piece(first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
            return part.remove_at([holder], part.piece(holder, first, count)[0], None)

        place, mutex = tf.TensorSpec([], tf.int64), self._terms.mutex(part.device)
        remove = OnPS(part.device, remove_piece, place, place, mutex=mutex)
        for first in called_range(spanning(part, holder), PIECE):
            # A second call finds none of the rows.
            remove.call(first, PIECE)
        clear = functools.partial(clear_figures, part, holder.number)
        OnPS(part.device, clear, mutex=mutex).call()


class KeyPools:
    """The pools of a strategy. A pool lives as long as a table is in it.

    Args:
        terms: the means by which they are made.
        beside: returns the storage beside which this thread makes a variable.
    """

    def __init__(self, terms: PoolTerms, beside: Callable[[], object]) -> None:
        self._terms, self._beside = terms, beside
        self._lock = threading.Lock()
        # By width, dtype, whether it is trained, whether rows are given up, and the number of the
        # pool whose ids it counts.
        self._pools: MutableMapping[tuple[int, tf.DType, bool, bool, int], KeyPool] = (
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
        if isinstance(initializer, UsageOfRows):
            variable.__class__ = KeyedVariable
            assert isinstance(initializer.table, KeyedStorage)
            variable.begin_slot(initializer.table, initializer)
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
            counted = None
            if isinstance(rows_of_ids, CountsOfIds):
                counted = _counted_by(rows_of_ids).shards[0].pool
            evicts = rows_of_ids.eviction is not None
            kind = width, dtype, trainable, evicts, 0 if counted is None else counted.number
            pool = self._pools.get(kind)
            if pool is None:
                pool = KeyPool(self._terms, width, dtype, trainable=trainable)
                self._pools[kind] = pool
                for part, of_ids in zip(pool.parts, counted.parts if counted else [], strict=False):
                    of_ids.counts = part
            return pool.add(name, rows_of_ids)


def _counted_by(counts_of_ids: CountsOfIds) -> KeyedStorage:
    assert isinstance(counts_of_ids.table, KeyedStorage)
    return counts_of_ids.table


def add_key_pools(extended: Extended, *, is_lasting: bool = False) -> None:
    """Let a strategy make tables without a vocabulary.

    Args:
        is_lasting: see `PoolTerms`.
    """
    devices = [ps_device(ps) for ps in range(extended.num_ps)]
    make, make_index = extended.new_variable, extended.new_index
    terms = PoolTerms(devices, make, make_index, extended.mutex, is_lasting, IndexGrowth())
    extended.key_pools = KeyPools(terms, lambda: extended.beside)
