"""The storage of a table without a vocabulary, or of one of its slots, on all ps."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import mixed, part_of
from kerasps.dynamic.ids.rows_of_ids import RowsOfIds
from kerasps.dynamic.parts.key_part import KeyPart
from kerasps.dynamic.policies.stamps import stamp
from kerasps.dynamic.policies.terms import (
    AskedKeys,
    Holder,
    Region,
    SlotTerms,
    TableTerms,
    salt_in_pool,
)
from kerasps.errors import UnsupportedError
from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.rows.sharding import ShardedStorage, Sharding
from kerasps.variables.storage.kinds import MOST_ROWS
from kerasps.variables.storage.named import NamedVariable
from kerasps.variables.storage.tensor_like import TensorLike


class KeySharding(Sharding):
    """The part of a row follows from its key. No ps has a range of rows."""

    def rows(self, shard: int) -> range:
        del shard
        raise _no_whole_value("its rows")

    def merge(self, values: Sequence[tf.Tensor], rows: Sequence[range], first: int) -> tf.Tensor:
        del values, rows, first
        raise _no_whole_value("its value")

    def locate(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the part of each key, and the key."""
        return part_of(ids, self.num_shards), ids

    def locate_in_tables(
        self, ids: tf.Tensor, table_of: tf.Tensor, num_rows: Sequence[int]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        del table_of, num_rows
        return self.locate(ids)


class TableRecord:
    """A table in a pool, as all of its parts know it.

    Attributes:
        number: its number in the pool.
        name: its name in messages.
        rows_of_ids: how it begins.
        max_rows: the most rows; None for no limit.
        replaces: whether a row that finds no room replaces another.
        num_parts: the number of parts of the pool.
        holder: the owner of its rows, as parts know it.
        counts: the table of the counts of ids that may get rows; None if none are counted.
        usage: the slot that has the use of each row; None without eviction.
        counts_for: the table whose ids it counts; None for a table of rows.
        known_fields: its numbers in each part when it was asked last, by its device (see `Field`).
        made_per_second: the rows that were made, by device, since they were counted before.
        counted_at: when they were counted, on `time.monotonic`'s clock; 0.0 before.
        told_nearly: True if its user knows that it is nearly full.
        told_full: True if its user knows that it is full.
        access: finds, makes and removes rows by their ids (see `table_access.TableAccess`).
    """

    access: Any = None
    counts: TableRecord | None = None
    usage: SlotTerms | None = None
    counts_for: TableRecord | None = None

    def __init__(
        self,
        number: int,
        name: str,
        rows_of_ids: RowsOfIds,
        num_parts: int,
        region: Region | None = None,
    ) -> None:
        self.number, self.name = number, name
        self.rows_of_ids, self.num_parts = rows_of_ids, num_parts
        # Candidates beyond their region replace others.
        self.replaces = region is not None and region.replaces
        self.max_rows = None if self.replaces else rows_of_ids.max_rows
        self.holder = Holder(number, region)
        self.known_fields: dict[str, list[int]] = {}
        self.made_per_second: dict[str, float] = {}
        self.counted_at = 0.0
        self.told_nearly = self.told_full = False
        self._slots: list[weakref.ref[KeyedStorage]] = []
        self._num_slots = 0

    def new_slot(self, dtype: tf.DType, begins_as: float, width: int | None = None) -> SlotTerms:
        """Return the terms of a new slot."""
        self._num_slots += 1
        return SlotTerms(self._num_slots, dtype, begins_as, width)

    def keep(self, slot: KeyedStorage) -> None:
        """Begin a slot with each new row for as long as the slot exists."""
        self._slots.append(weakref.ref(slot))

    @property
    def terms(self) -> TableTerms:
        """The table as a part knows it, with its present slots."""
        alive = [slot for ref in self._slots if (slot := ref()) is not None]
        slots = tuple(slot.terms for slot in alive if slot.terms is not None)
        begins = self.rows_of_ids
        width = begins.first_rows.width
        slot_bytes = sum(slot.dtype.size * (slot.width or width) for slot in slots)
        most = begins.most_rows_on_ps(self.num_parts, slot_bytes)
        if self.replaces:  # it is full when its region is
            most = None
        return TableTerms(
            self.number,
            begins.first_rows,
            begins.salt,
            most,
            slots,
            self.holder.region,
            begins.admission,
            None if self.counts is None else self.counts.terms,
            begins.reads_zeros,
            begins.eviction,
            0 if begins.eviction is None else -(-begins.eviction.min_rows // self.num_parts),
            self.usage,
        )

    def keys(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the keys of ids, int64 of any shape."""
        return mixed(ids + salt_in_pool(self.number))


def keys_of_tables(tables: Sequence[TableRecord], ids: tf.Tensor, table_of: tf.Tensor) -> tf.Tensor:
    """Return the keys of ids of several tables.

    Args:
        table_of: the index of the table of each id.
    """
    salts = np.array([salt_in_pool(table.number) for table in tables], np.int64)
    return mixed(ids + tf.gather(tf.constant(salts), table_of))


class Pool(Protocol):
    """The pool of a table (see `key_pools.py`), which its rows keep alive."""

    number: int

    def mutex(self, device: str) -> tf.Tensor:
        """Return the lock of a ps."""


class KeyedRows(TensorLike):
    """The rows of a table, or of a slot, in one part; stands where a `tf.Variable` would.

    Attributes:
        part: the part.
        table: the table.
        pool: the pool that the part belongs to.
        store: the rows, by their places.
        trainable: whether gradients are taken with respect to them.
    """

    takes_values = False

    def __init__(
        self,
        part: KeyPart,
        table: TableRecord,
        holder: NamedVariable,
        pool: Any,
        *,
        trainable: bool,
    ) -> None:
        self.part, self.table, self.pool = part, table, pool
        self.store: RowStore = part.store(holder)
        self.trainable = trainable
        self._unique_id = uuid.uuid4().hex

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.table.name}:0"

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the elements."""
        return self.store.holder.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the table: it has no number of rows that stays."""
        return tf.TensorShape([MOST_ROWS, *self.store.holder.shape[1:]])

    @property
    def device(self) -> str:
        """The device of the part."""
        return self.part.device

    def read_value(self) -> NoReturn:
        """Raise the error that there is no whole value."""
        raise _no_whole_value(self.name)

    @property
    def may_leave(self) -> bool:
        """True if the table gives up rows."""
        return self.table.rows_of_ids.eviction is not None

    def look_up(self, tables: Sequence[KeyedRows], asked: AskedKeys) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what keys of some tables of the part read, and which have rows. On the ps."""
        return self.part.look_up([rows.table.terms for rows in tables], asked)

    def made(self, tables: Sequence[KeyedRows], asked: AskedKeys) -> tf.Tensor:
        """Return the place of each key, of rows made where missing. On the ps, under the lock."""
        return self.part.made([rows.table.terms for rows in tables], asked)

    def note_change(self, places: tf.Tensor) -> None:
        """Note that rows change that were made before. On the ps, under the lock."""
        stamp(self.part, places)


class KeyedStorage(ShardedStorage):
    """The storage of a table without a vocabulary, or of one of its slots, on all ps.

    Attributes:
        table: the table.
        terms: the terms of the slot; None for the table itself.
        access: reads and writes rows by their ids (see `row_access.access_to`).
    """

    shards: tuple[KeyedRows, ...]
    access: Any = None

    def __init__(
        self, shards: Sequence[KeyedRows], name: str, terms: SlotTerms | None = None
    ) -> None:
        super().__init__(shards, KeySharding(MOST_ROWS, len(shards)), name)
        self.table = shards[0].table
        self.terms = terms

    def read_value(self) -> NoReturn:
        raise _no_whole_value(self.name)

    def assign(self, value: object, **unused: object) -> NoReturn:
        """Raise the error that there is no whole value."""
        del value, unused
        raise _no_whole_value(self.name)

    assign_add = assign_sub = assign

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> NoReturn:
        del indices, name
        raise _no_whole_value(self.name)

    @property
    def watched(self) -> list[Any]:
        raise no_gradient(self.name)

    def add_slot(
        self, name: str, dtype: tf.DType, begins_as: float, width: int | None = None
    ) -> KeyedStorage:
        """Return the storage of a new slot of the table.

        Args:
            begins_as: the value of each element before the first update.
            width: the number of elements of its rows. Default: that of the table.
        """
        terms = self.table.new_slot(dtype, begins_as, width)
        rows = [
            KeyedRows(shard.part, self.table, shard.part.slot(terms), shard.pool, trainable=False)
            for shard in self.shards
        ]
        slot = KeyedStorage(rows, name, terms)
        self.table.keep(slot)
        return slot


def _no_whole_value(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"The value of '{name}' as a whole is asked for, and a table without a vocabulary has only "
        "the rows of the ids that came. Expected: look-ups by the layer `DynamicEmbedding`, or its "
        "methods `rows(ids)` and `items()`. Received: a read or an assignment of all rows, such as "
        "by `get_weights`, `ops.copy` or an optimizer that needs all rows. Use one of these "
        "methods, or another optimizer, such as Adam or Adagrad."
    )


def no_gradient(name: str) -> UnsupportedError:
    """Return the error of a tape that asks for a gradient that only a step has."""
    return UnsupportedError(
        f"A GradientTape outside of a step asks for the gradient of '{name}', a table without a "
        "vocabulary, whose rows only a step makes and updates. Expected: a step of `model.fit` or "
        "`train_on_batch`, or a function that a `ClusterCoordinator` schedules. Received: a tape "
        "in another function. Train with one of these."
    )
