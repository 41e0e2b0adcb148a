"""One part of a pool of keyed rows: what one ps holds, and the operations on it.

Rows, their slots, keys and tags are at the same places of variables that are reserved at the size
that they may grow to; the system gives a ps the pages that were written. An index finds the place
of a key. The row at place 0 belongs to no key: an update of a row that was not made goes there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.first_rows import FirstRows
from kerasps.dynamic.ids.keys import from_halves, halves, salt_of, unmixed
from kerasps.dynamic.parts.key_index import EMPTY_LOG, START_LOG, KeyIndex, first_state
from kerasps.runtime.on_ps import OnPS
from kerasps.variables.rows.row_pools import take_memory
from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.storage.named import NamedIndex, NamedVariable, on_own_task

# A tag has the number of a table and, in these lowest bits, the number of the newest slot that the
# row has begun.
SLOT_BITS = 16
MOST_TABLES = 2**12 - 1
# The tag of a place that no row has.
NO_TABLE = -1
# The error of a key that ids of two tables have.
MEETING = "Two tables without a vocabulary have ids that meet in one key."
# The places that a function looks through in one call.
PIECE = 1 << 18
# In `numbers`: the first place that no row had yet; how many places were given back; then, for each
# table, the number of its rows, and of the rows that it had no room for.
_TOP, _NUM_FREE, _HEADER = 0, 1, 2


class AskedKeys(NamedTuple):
    """The rows that a step asks for in one part.

    Attributes:
        keys: different keys, table by table.
        table_of: int32: the index of the table of each key, among those of the run; None if there
            is one table.
    """

    keys: tf.Tensor
    table_of: tf.Tensor | None = None

    @classmethod
    def of(cls, sent: tf.Tensor, num_tables: int) -> AskedKeys:
        """Return what a worker has sent."""
        if num_tables == 1:
            return cls(from_halves(sent))
        size = tf.size(sent) // 3
        return cls(from_halves(sent[size:]), sent[:size])

    def sent(self) -> tf.Tensor:
        """Return them as a worker sends them: end to end, as int32."""
        keys = halves(self.keys)
        return keys if self.table_of is None else tf.concat([self.table_of, keys], 0)


@dataclass(frozen=True)
class TableTerms:
    """A table, as a part knows it.

    Attributes:
        number: the number of the table in its pool.
        first_rows: makes first rows.
        salt: the salt of the seed of first rows.
        max_rows: the most rows in this part; None for no limit but the room of the part.
        slots: the slots that it has now, in the order in which they were made.
    """

    number: int
    first_rows: FirstRows
    salt: np.int64
    max_rows: int | None
    slots: tuple[SlotTerms, ...]


@dataclass(frozen=True)
class SlotTerms:
    """A slot of a table, as a part knows it.

    Attributes:
        number: its number among all slots that the table ever had, from 1.
        dtype: the dtype of its rows.
        begins_as: the value of each element before the first update.
    """

    number: int
    dtype: tf.DType
    begins_as: float


def salt_in_pool(number: int) -> np.int64:
    """Return what is added to the ids of a table before they are mixed to keys."""
    return np.int64(0) if number == 0 else salt_of(number)


class KeyPart:
    """The part of a pool on one ps.

    Args:
        device: the device of the ps.
        width: the number of elements of a row.
        capacity: the number of places.
        make: makes a variable (see `variables.NamedVariable`).
        make_index: makes a hash table on a device, with a number of buckets.

    Attributes:
        device: as given.
        capacity: as given.
        index: finds the places of keys.
        keys: the key of each place.
        tags: the tag of each place.
        numbers: see above.
        free: places that were given back.
    """

    def __init__(
        self,
        device: str,
        width: int,
        dtype: tf.DType,
        capacity: int,
        make: Callable[..., NamedVariable],
        make_index: Callable[[str, int], NamedIndex],
        *,
        trainable: bool,
    ) -> None:
        self.device, self.capacity = device, capacity
        self._width, self._make = width, make
        tables = make_index(device, 1 << START_LOG), make_index(device, 1 << EMPTY_LOG)
        self._state = self._variable([6], tf.int64, "index", first_state)
        self.index = KeyIndex(device, tables, self._state)
        num_numbers = _HEADER + 2 * MOST_TABLES
        self.numbers = self._variable(
            [num_numbers],
            tf.int64,
            "numbers",
            # Place 0 is no key's.
            lambda: tf.concat([[1], tf.zeros([num_numbers - 1], tf.int64)], 0),
        )
        self.keys = self._reserved([], tf.int64, "keys")
        self.tags = self._reserved([], tf.int32, "tags")
        self.free = self._reserved([], tf.int32, "free")
        if self.tags.takes_values:
            OnPS(device, self._mark_no_row).call()
        self.rows = self._reserved([width], dtype, "rows", trainable=trainable)
        self._slots: weakref.WeakValueDictionary[tuple[tf.DType, int], NamedVariable] = (
            weakref.WeakValueDictionary()
        )

    def slot(self, terms: SlotTerms) -> NamedVariable:
        """Return the variable with the rows of a slot; it lives as long as a table has the slot."""
        key = terms.dtype, terms.number
        holder = self._slots.get(key)
        if holder is None:
            holder = self._slots[key] = self._reserved([self._width], terms.dtype, "slots")
        return holder

    @property
    def variables(self) -> list[NamedVariable]:
        """All variables of the part."""
        first = [self._state, self.numbers, self.keys, self.tags, self.free, self.rows]
        return [*first, *self._slots.values()]

    def store(self, holder: NamedVariable) -> RowStore:
        """Return rows by their places."""
        return RowStore(holder, 0, self.device)

    def _variable(
        self,
        shape: list[int],
        dtype: tf.DType,
        name: str,
        initial_value: Callable[[], tf.Tensor] | None = None,
        *,
        trainable: bool = False,
    ) -> NamedVariable:
        with tf.init_scope(), tf.device(self.device):
            return self._make(
                initial_value, shape=shape, dtype=dtype, trainable=trainable, name=name
            )

    def _reserved(
        self, row_shape: list[int], dtype: tf.DType, name: str, *, trainable: bool = False
    ) -> NamedVariable:
        shape = [self.capacity, *row_shape]
        holder = self._variable(shape, dtype, name, trainable=trainable)
        if holder.takes_values:
            on_own_task(lambda: take_memory(holder))
        return holder

    # What follows adds operations to a graph on the ps, and captures handles.

    def _mark_no_row(self) -> tf.Tensor:
        """Give place 0 the tag of no table."""
        with tf.control_dependencies([self._write(self.tags, [0], [NO_TABLE])]):
            return tf.constant(0)

    def look_up(self, tables: Sequence[TableTerms], asked: AskedKeys) -> tf.Tensor:
        """Return the row of each key; of one that has none, the first row. Changes nothing."""
        # A row is complete before the index has its key.
        places, local = self.index.find(asked.keys), asked.table_of
        rows = self.store(self.rows).gather(places)
        tags = self.store(self.tags).gather(places)
        numbers = _of_tables([table.number for table in tables], local, np.int32)
        is_missing = tf.not_equal(_table_in(tags), numbers)
        rows.set_shape([None, self._width])

        def filled() -> tf.Tensor:
            missing = tf.where(is_missing)[:, 0]
            first = first_rows(tables, tf.gather(asked.keys, missing), _some(local, missing))
            return tf.tensor_scatter_nd_update(rows, missing[:, None], first)

        found = tf.cond(tf.reduce_any(is_missing), filled, lambda: rows)
        found.set_shape([None, self._width])
        return found

    def look_up_slot(self, number: int, slot: SlotTerms, keys: tf.Tensor) -> tf.Tensor:
        """Return a table's rows of a slot; where it has not begun, the value that it begins as."""
        places = self.index.find(keys)
        rows = self.store(self.slot(slot)).gather(places)
        tags = self.store(self.tags).gather(places)
        begun = tf.bitwise.bitwise_and(tags, np.int32(2**SLOT_BITS - 1))
        has_begun = tf.equal(_table_in(tags), number) & (begun >= slot.number)
        return tf.where(has_begun[:, None], rows, tf.cast(slot.begins_as, slot.dtype))

    def made(self, tables: Sequence[TableTerms], asked: AskedKeys) -> tf.Tensor:
        """Return the place of each key; make the rows that are missing. Call under the lock.

        A row for which there is no room is not made, but counted; its place is 0.
        """
        places = self.index.find_locked(asked.keys)
        tags = self.store(self.tags).gather(places)
        complete = [table.number * 2**SLOT_BITS + _newest(table) for table in tables]
        are_complete = tf.equal(tags, _of_tables(complete, asked.table_of, np.int32))
        return tf.cond(
            tf.reduce_all(are_complete),
            lambda: tf.identity(places),
            lambda: self._make_rows(tables, asked, places, tags),
        )

    def _make_rows(
        self,
        tables: Sequence[TableTerms],
        asked: AskedKeys,
        places: tf.Tensor,
        tags: tf.Tensor,
    ) -> tf.Tensor:
        """Make the rows that are missing, and begin the slots that a row has not begun."""
        keys, local = asked
        is_new = tf.equal(places, 0)
        numbers = _of_tables([table.number for table in tables], local, np.int32)
        check = tf.debugging.Assert(
            tf.reduce_all(is_new | tf.equal(_table_in(tags), numbers)),
            [MEETING],
        )
        with tf.control_dependencies([check]):
            begun = tf.where(is_new, -1, tf.bitwise.bitwise_and(tags, np.int32(2**SLOT_BITS - 1)))
        new = tf.where(is_new)[:, 0]
        new_local = _some(local, new)
        new_places = self._new_places(tables, new, new_local)
        places = tf.tensor_scatter_nd_update(places, new[:, None], new_places)
        newest = _of_tables([_newest(table) for table in tables], local, np.int32)
        writes = []
        for slot, tables_with in _slots_of(tables).items():
            # Of tables without the slot, rows are not due.
            number = _of_tables(
                [slot[1] if i in tables_with else -1 for i in range(len(tables))], local, np.int32
            )
            due = tf.where(begun < number)[:, 0]
            values = _of_tables(
                [tables_with.get(i, 0.0) for i in range(len(tables))],
                _some(local, due),
                slot[0].as_numpy_dtype,
            )
            values = tf.broadcast_to(
                tf.reshape(values, [-1, 1]), tf.stack([tf.size(due), self._width])
            )
            writes.append(self._write(self._slots[slot], tf.gather(places, due), values))
        new_keys = tf.gather(keys, new)
        first = first_rows(tables, new_keys, new_local)
        writes.append(self._write(self.rows, new_places, first))
        writes.append(self._write(self.keys, new_places, new_keys))
        due = tf.where(begun < newest)[:, 0]
        new_tags = tf.broadcast_to(numbers * np.int32(2**SLOT_BITS) + newest, tf.shape(places))
        # Place 0 keeps its tag, by which a look-up sees that a row is missing.
        new_tags = tf.where(places > 0, new_tags, NO_TABLE)
        writes.append(self._write(self.tags, tf.gather(places, due), tf.gather(new_tags, due)))
        with tf.control_dependencies(writes):
            has_place = tf.where(new_places > 0)[:, 0]
            insert = self.index.insert(
                tf.gather(new_keys, has_place), tf.gather(new_places, has_place)
            )
        with tf.control_dependencies([insert]):
            return tf.identity(places)

    def _new_places(
        self, tables: Sequence[TableTerms], new: tf.Tensor, local: tf.Tensor | None
    ) -> tf.Tensor:
        """Return places for new rows, 0 for those without room; count them."""
        count = tf.size(new, tf.int64)
        which = tf.zeros_like(new, tf.int32) if local is None else local
        rows_of = [_HEADER + 2 * table.number for table in tables]
        numbers = self.store(self.numbers).gather(
            tf.constant([_TOP, _NUM_FREE, *rows_of], tf.int32)
        )
        top, num_free, held = numbers[0], numbers[1], numbers[2:]
        of_each = tf.math.unsorted_segment_sum(tf.ones_like(new), which, len(tables))
        # The rank of each new row among those of its table.
        rank = tf.range(count) - tf.gather(tf.cumsum(of_each, exclusive=True), which)
        most = np.array([t.max_rows or self.capacity for t in tables], np.int64)
        has_room = rank < tf.gather(tf.constant(most) - held, which)
        order = tf.cumsum(tf.cast(has_room, tf.int64), exclusive=True)
        has_room &= order < num_free + self.capacity - top
        from_free = tf.minimum(tf.reduce_sum(tf.cast(has_room, tf.int64)), num_free)
        is_given_back = has_room & (order < from_free)
        given_back = self.store(self.free).gather(
            tf.where(is_given_back, num_free - 1 - order, tf.zeros_like(order))
        )
        places = tf.where(is_given_back, tf.cast(given_back, tf.int64), top + order - from_free)
        places = tf.where(has_room, places, tf.zeros_like(places))
        made = tf.math.unsorted_segment_sum(tf.cast(has_room, tf.int64), which, len(tables))
        used = tf.reduce_sum(made) - from_free
        changes = tf.concat([tf.stack([used, -from_free]), made, of_each - made], 0)
        at = [_TOP, _NUM_FREE, *rows_of, *(number + 1 for number in rows_of)]
        with tf.control_dependencies([given_back]):
            add = tf.raw_ops.ResourceScatterAdd(
                resource=self.numbers.handle, indices=tf.constant(at, tf.int32), updates=changes
            )
        with tf.control_dependencies([add]):
            return tf.identity(places)

    def _write(self, holder: NamedVariable, places: tf.Tensor, rows: tf.Tensor) -> Any:
        return tf.raw_ops.ResourceScatterUpdate(
            resource=holder.handle, indices=places, updates=tf.cast(rows, holder.dtype)
        )

    def counts(self, number: int) -> tf.Tensor:
        """Return the number of rows of a table, and of those that it had no room for."""
        first = _HEADER + 2 * number
        return self.store(self.numbers).gather(tf.constant([first, first + 1], tf.int32))

    def all_numbers(self) -> tf.Tensor:
        """Return the value of `numbers`."""
        return self.store(self.numbers).read(range(_HEADER + 2 * MOST_TABLES))

    @staticmethod
    def counted(numbers: np.ndarray, table: int) -> np.ndarray:
        """Return the number of rows of a table, and of those refused, given `all_numbers`."""
        return numbers[_HEADER + 2 * table : _HEADER + 2 * table + 2]

    def top(self) -> tf.Tensor:
        """Return the first place that no row had yet."""
        return self.store(self.numbers).gather(tf.constant([_TOP], tf.int32))[0]

    def piece(self, number: int, first: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the places of a table's rows among `count` places, and their ids."""
        last = tf.minimum(first + count, self.top())
        tags = self.store(self.tags).gather(tf.range(first, tf.maximum(first, last)))
        places = tf.where(tf.equal(_table_in(tags), number))[:, 0] + first
        keys = self.store(self.keys).gather(places)
        return places, unmixed(keys) - salt_in_pool(number)

    def keys_between(self, first: tf.Tensor, last: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the places of a range that have rows, and their keys."""
        tags = self.store(self.tags).gather(tf.range(first, last))
        places = tf.where(tags > NO_TABLE)[:, 0] + first
        return places, self.store(self.keys).gather(places)

    def num_keys(self) -> tf.Tensor:
        """Return the number of rows of all tables."""
        top, num_free = tf.unstack(
            self.store(self.numbers).gather(tf.constant([_TOP, _NUM_FREE], tf.int32)), 2
        )
        return top - 1 - num_free

    def remove(self, number: int, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """Remove the rows of a table among `count` places; return how many. Under the lock."""
        return self._remove(number, self.piece(number, first, count)[0])

    def remove_keys(self, number: int, keys: tf.Tensor) -> tf.Tensor:
        """Remove a table's rows of different keys; return how many there were. Under the lock."""
        places = self.index.find_locked(keys)
        is_there = tf.equal(_table_in(self.store(self.tags).gather(places)), number)
        return self._remove(number, tf.gather(places, tf.where(is_there)[:, 0]))

    def num_without_row(self, number: int, keys: tf.Tensor) -> tf.Tensor:
        """Return how many of some keys have no row in a table."""
        tags = self.store(self.tags).gather(self.index.find(keys))
        return tf.math.count_nonzero(tf.not_equal(_table_in(tags), number))

    def _remove(self, number: int, places: tf.Tensor) -> tf.Tensor:
        removed = tf.size(places, tf.int64)
        header = self.store(self.numbers).gather(tf.constant([_NUM_FREE], tf.int32))
        keys = self.store(self.keys).gather(places)
        with tf.control_dependencies([keys]):
            taken = self.index.remove(keys)
        with tf.control_dependencies([taken]):
            tags = tf.fill(tf.shape(places), np.int32(NO_TABLE))
            writes = [
                self._write(self.tags, places, tags),
                self._write(self.free, header[0] + tf.range(removed), places),
                tf.raw_ops.ResourceScatterAdd(
                    resource=self.numbers.handle,
                    indices=tf.constant([_NUM_FREE, _HEADER + 2 * number], tf.int32),
                    updates=tf.stack([removed, -removed]),
                ),
            ]
        with tf.control_dependencies(writes):
            return tf.identity(removed)


def first_rows(tables: Sequence[TableTerms], keys: tf.Tensor, local: tf.Tensor | None) -> tf.Tensor:
    """Return the first rows of keys of tables whose first rows are made alike."""
    in_pool = _of_tables([salt_in_pool(table.number) for table in tables], local, np.int64)
    salts = _of_tables([table.salt for table in tables], local, np.int64)
    return tables[0].first_rows(unmixed(keys) - in_pool, salts)


def _newest(table: TableTerms) -> int:
    return table.slots[-1].number if table.slots else 0


def _slots_of(
    tables: Sequence[TableTerms],
) -> dict[tuple[tf.DType, int], dict[int, float]]:
    """Return the slots of tables, and for each the tables that have it, with what it begins as."""
    slots: dict[tuple[tf.DType, int], dict[int, float]] = {}
    for index, table in enumerate(tables):
        for slot in table.slots:
            slots.setdefault((slot.dtype, slot.number), {})[index] = slot.begins_as
    return slots


def _of_tables(values: Sequence[Any], local: tf.Tensor | None, dtype: Any) -> Any:
    """Return the value of each key's table: one value if it is the same for all."""
    numbers = np.array(values, dtype)
    if local is None or (numbers == numbers[0]).all():
        return numbers[0]
    return tf.gather(tf.constant(numbers), local)


def _some(values: tf.Tensor | None, indices: tf.Tensor) -> tf.Tensor | None:
    return None if values is None else tf.gather(values, indices)


def _table_in(tags: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.right_shift(tags, np.int32(SLOT_BITS))
