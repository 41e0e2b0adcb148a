"""Storages that tables share: on each ps one for tables of a kind, and one for each of their slots.

Starting an operation on a table of a few megabytes costs a ps more than running it. So tables whose
rows have one shape and dtype are stored end to end, and one operation reads, updates or writes rows
of several. A storage has room for many tables. Its memory is not initialized: the operating system
allocates each page when the ps first writes to it. A table never moves, since functions refer to
its storage by a handle. Its slots have the same places in storages of the same size. Only code that
reads the storage of a variable sees this.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from kerasps.variables.rows.pooled_rows import PooledRows
from kerasps.variables.storage.kinds import TABLE_NAME
from kerasps.variables.storage.named import NamedVariable, on_own_task
from kerasps.variables.storage.names import NAMES

# Reading or writing a whole table takes longer in such a storage than in a variable: it goes row by
# row. So a larger table is stored separately.
MAX_TABLE_BYTES = 16 << 20
POOL_BYTES = 128 << 20
# This many tables of a kind are stored separately before others share a storage. Most models have
# few tables, and few gain nothing by sharing.
NUM_SEPARATE = 3

_NUMBERS = itertools.count(1)


@dataclass
class _Range:
    """Rows that a table has, or had."""

    # The row after the last.
    stop: int
    # The values in these rows, as pairs of a dtype and a number: 0 for the table, 1 and more
    # for its slots.
    holds: set[tuple[tf.DType, int]] = field(default_factory=set)


class RowPool:
    """Room for the rows of several tables on one ps, and for their slots at the same places."""

    def __init__(
        self, device: str, row_shape: Sequence[int], dtype: tf.DType, *, trainable: bool
    ) -> None:
        # The properties that all of its tables have in common.
        self.kind = device, tuple(row_shape), dtype, trainable
        # The number of this pool among those of this process, in the order of creation.
        self.number = next(_NUMBERS)
        self._generation = NAMES.generation
        self._num_rows = POOL_BYTES // _row_bytes(row_shape, dtype)
        self._holders: dict[tuple[tf.DType, int], NamedVariable] = {}
        self._ranges: dict[int, _Range] = {}
        # Rows to free. Python may collect rows at any instant, in any thread, so the finalizer
        # only appends to this.
        self._left: deque[tuple[int, tuple[tf.DType, int]]] = deque()

    @property
    def is_open(self) -> bool:
        """True while freed rows may be reused.

        False once steps were given up: their pushes may still be in flight and write to the rows.
        """
        return self._generation == NAMES.generation

    def add(self, num_rows: int, name: str) -> PooledRows | None:
        """Return the rows of a new table, at the first place with room; None without room."""
        self._free_ranges()
        begin = 0
        for start, taken in sorted(self._ranges.items()):
            if begin + num_rows <= start:
                break
            begin = taken.stop
        if begin + num_rows > self._num_rows:
            return None
        _, _, dtype, trainable = self.kind
        self._ranges[begin] = _Range(begin + num_rows)
        return self._hold(begin, (dtype, 0), name, trainable=trainable)

    def add_slot(self, rows: PooledRows, dtype: tf.DType, name: str) -> PooledRows | None:
        """Return the rows of a new slot of a table; None if the slot must be stored separately."""
        if not self.is_open:
            return None
        self._free_ranges()
        held = self._ranges[rows.store.begin].holds
        number = next(n for n in range(1, len(held) + 2) if (dtype, n) not in held)
        return self._hold(rows.store.begin, (dtype, number), name, trainable=False)

    def _hold(
        self, begin: int, key: tuple[tf.DType, int], name: str, *, trainable: bool
    ) -> PooledRows:
        taken = self._ranges[begin]
        taken.holds.add(key)
        try:
            holder = self._holder(key, trainable=trainable)
            places = range(begin, taken.stop)
            rows = PooledRows(holder, places, self, trainable=trainable, name=name)
        except BaseException:
            self._left.append((begin, key))
            raise
        weakref.finalize(rows, self._left.append, (begin, key)).atexit = False
        return rows

    def _holder(self, key: tuple[tf.DType, int], *, trainable: bool) -> NamedVariable:
        if key not in self._holders:
            device, row_shape, _, _ = self.kind
            with tf.init_scope(), tf.device(device):
                holder = NamedVariable(
                    None,
                    shape=[self._num_rows, *row_shape],
                    dtype=key[0],
                    trainable=trainable,
                    name="tables" if trainable else "rows",
                )
                if holder.takes_values:
                    on_own_task(lambda: take_memory(holder))
            self._holders[key] = holder
        return self._holders[key]

    def _free_ranges(self) -> None:
        """Free the rows of tables that no longer exist, for other tables."""
        while self._left:
            begin, key = self._left.popleft()
            self._ranges[begin].holds.discard(key)
            if not self._ranges[begin].holds:
                del self._ranges[begin]


class RowPools:
    """The pools of a strategy. A pool lives as long as a table is in it.

    Args:
        table_min_bytes: the strategy's argument of that name. A smaller variable is not a table.
    """

    def __init__(self, table_min_bytes: int) -> None:
        self._table_min_bytes = table_min_bytes
        self._lock = threading.Lock()
        self._pools: list[weakref.ref[RowPool]] = []
        # Of each kind, the `id`s of the tables that are stored separately.
        self._separate: dict[Hashable, set[int]] = {}

    def takes(self, name: str, shape: tuple[int, ...], dtype: tf.DType) -> bool:
        """Return whether a new variable counts as a table that may share a storage."""
        return (
            name == TABLE_NAME
            and len(shape) > 1
            and dtype.is_floating
            and self._table_min_bytes <= math.prod(shape) * dtype.size
        )

    def add(
        self, device: str, shape: tuple[int, ...], dtype: tf.DType, *, trainable: bool, name: str
    ) -> PooledRows | None:
        """Return rows for a new table, or a shard of one; None if it is stored separately."""
        num_rows, *row_shape = shape
        if math.prod(shape) * dtype.size > MAX_TABLE_BYTES or not num_rows:
            return None
        with self._lock:
            kind = device, tuple(row_shape), dtype, trainable
            if len(self._separate.get(kind, ())) < NUM_SEPARATE:
                return None
            for pool in self._open_pools(kind):
                rows = pool.add(num_rows, name)
                if rows is not None:
                    break
            else:
                pool = RowPool(device, row_shape, dtype, trainable=trainable)
                self._pools.append(weakref.ref(pool))
                rows = pool.add(num_rows, name)
                assert rows is not None  # a pool has room for several
            return rows

    def note_separate(self, variable: tf.Variable) -> None:
        """Record that a table, or a shard of one, is stored separately."""
        row_shape = tuple(variable.shape[1:])
        kind = str(variable.device), row_shape, variable.dtype, variable.trainable
        with self._lock:
            separate = self._separate.setdefault(kind, set())
        separate.add(id(variable))
        weakref.finalize(variable, separate.discard, id(variable)).atexit = False

    def add_slot(self, rows: PooledRows, dtype: tf.DType, name: str) -> PooledRows | None:
        """Return rows for a new slot of a table in a pool; None if it is stored separately."""
        with self._lock:
            return rows.pool.add_slot(rows, dtype, name)

    def _open_pools(self, kind: Hashable) -> list[RowPool]:
        """Return the pools of a kind that accept new tables."""
        alive = [(ref, pool) for ref in self._pools if (pool := ref()) is not None]
        self._pools = [ref for ref, _ in alive]
        return [pool for _, pool in alive if pool.kind == kind and pool.is_open]


def take_memory(holder: NamedVariable) -> None:
    """Give a variable memory that is not written to yet."""

    # In a function, which keeps no reference to the value: TensorFlow's operations on rows copy a
    # value that has two references.
    def fill() -> tf.Tensor:
        with tf.device(holder.device):
            value = tf.raw_ops.Empty(shape=holder.shape, dtype=holder.dtype, init=False)
            tf.raw_ops.AssignVariableOp(resource=holder.handle, value=value)
            # TensorFlow does not wait for a remote call that returns nothing.
            return tf.constant(0)

    with tf.device(holder.device):
        tf.function(fill, autograph=False).get_concrete_function()()


def _row_bytes(row_shape: Sequence[int], dtype: tf.DType) -> int:
    return max(1, int(math.prod(row_shape) * dtype.size))
