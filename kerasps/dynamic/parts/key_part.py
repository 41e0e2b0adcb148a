"""One part of a pool of keyed rows: what one ps holds, and the operations on it.

Rows, their slots, keys and tags are at the same places of variables that are reserved at the size
that they may grow to; the system gives a ps the pages that were written. An index finds the place
of a key. The row at place 0 belongs to no key: an update of a row that was not made goes there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import unmixed
from kerasps.dynamic.parts.key_index import EMPTY_LOG, START_LOG, KeyIndex, first_state
from kerasps.dynamic.policies.candidates import admitted
from kerasps.dynamic.policies.giving_up import Push
from kerasps.dynamic.policies.gone import tell_gone
from kerasps.dynamic.policies.regions import new_places
from kerasps.dynamic.policies.stamps import MOST_REMOVED, stamp, tell_removed, tell_replaced
from kerasps.dynamic.policies.terms import (
    MEETING,
    NO_TABLE,
    NUM_FREE,
    NUM_NUMBERS,
    SLOT_BITS,
    TOP,
    AskedKeys,
    Field,
    Holder,
    SlotTerms,
    TableTerms,
    default_rows,
    first_numbers,
    first_rows,
    newest_of,
    of_tables,
    place_of_field,
    salt_in_pool,
    slots_of,
    some,
    table_in,
)
from kerasps.dynamic.policies.usage import begin_usage
from kerasps.runtime.on_ps import OnPS
from kerasps.variables.rows.row_pools import take_memory
from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.storage.named import NamedIndex, NamedVariable, on_own_task

# The places that a function looks through in one call.
PIECE = 1 << 18


class KeyPart:
    """The part of a pool on one ps.

    Args:
        device: the device of the ps.
        width: the number of elements of a row.
        capacity: the number of places.
        make: makes a variable (see `variables.NamedVariable`).
        make_index: makes a hash table on a device, with a number of buckets.
        evicts: whether its tables have an eviction.

    Attributes:
        device: as given.
        capacity: as given.
        index: finds the places of keys.
        keys: the key of each place.
        tags: the tag of each place.
        numbers: the numbers of the part and of its tables (see `terms.Field`).
        free: places that were given back.
        stamps: the version in which the row at each place changed last (see `stamps.py`).
        removed: the keys whose rows were removed, and the numbers of their tables.
        gone: keys whose rows were given up (see `gone.py`); None if its tables give up none.
        counts: the part of the counts of ids that may get rows (see `candidates.py`); None if no
            table of the pool counts.
    """

    counts: KeyPart | None = None

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
        evicts: bool = False,
    ) -> None:
        self.device, self.capacity = device, capacity
        self._width, self._make = width, make
        tables = make_index(device, 1 << START_LOG), make_index(device, 1 << EMPTY_LOG)
        self._state = self._variable([6], tf.int64, "index", first_state)
        self.index = KeyIndex(device, tables, self._state)
        self.numbers = self._variable(
            [NUM_NUMBERS],
            tf.int64,
            "numbers",
            first_numbers,
        )
        self.keys = self._reserved([], tf.int64, "keys")
        self.tags = self._reserved([], tf.int32, "tags")
        self.free = self._reserved([], tf.int32, "free")
        self.gone = self._reserved([], tf.int64, "gone") if evicts else None
        self.stamps = self._reserved([], tf.int32, "stamps")
        self.removed = self._reserved([2], tf.int64, "removed", num_places=MOST_REMOVED)
        if self.tags.takes_values:
            place = tf.TensorSpec([], tf.int64)
            OnPS(device, self.mark_free, place, place).call(0, 1)
        self.rows = self._reserved([width], dtype, "rows", trainable=trainable)
        self._slots: weakref.WeakValueDictionary[
            tuple[tf.DType, int, int | None], NamedVariable
        ] = weakref.WeakValueDictionary()

    def slot(self, terms: SlotTerms) -> NamedVariable:
        """Return the variable with the rows of a slot; it lives as long as a table has the slot."""
        key = terms.dtype, terms.number, terms.width
        holder = self._slots.get(key)
        if holder is None:
            width = terms.width or self._width
            holder = self._slots[key] = self._reserved([width], terms.dtype, "slots")
        return holder

    @property
    def variables(self) -> list[NamedVariable]:
        """All variables of the part."""
        first = [self._state, self.numbers, self.keys, self.tags, self.free, self.rows]
        first += [self.stamps, self.removed]
        return [*first, *([] if self.gone is None else [self.gone]), *self._slots.values()]

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
        self,
        row_shape: list[int],
        dtype: tf.DType,
        name: str,
        *,
        trainable: bool = False,
        num_places: int | None = None,
    ) -> NamedVariable:
        shape = [num_places or self.capacity, *row_shape]
        holder = self._variable(shape, dtype, name, trainable=trainable)
        if holder.takes_values:
            on_own_task(lambda: take_memory(holder))
        return holder

    # What follows adds operations to a graph on the ps, and captures handles.

    def mark_free(self, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """Give places that no row had the tag of no table."""
        tags = tf.fill(tf.stack([count]), np.int32(NO_TABLE))
        with tf.control_dependencies([self._write(self.tags, first + tf.range(count), tags)]):
            return tf.identity(count)

    def look_up(
        self, tables: Sequence[TableTerms], asked: AskedKeys
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what each key reads, and whether it has a row. Changes nothing."""
        # A row is complete before the index has its key.
        places, local = self.index.find(asked.keys), asked.table_of
        rows = self.store(self.rows).gather(places)
        numbers = of_tables([table.number for table in tables], local, np.int32)
        if tables[0].region is None:
            is_missing = tf.not_equal(table_in(self.store(self.tags).gather(places)), numbers)
        else:
            # The place may be given to another key meanwhile, which writes in the reverse order.
            with tf.control_dependencies([rows]):
                tags = self.store(self.tags).gather(places)
            with tf.control_dependencies([tags]):
                keys = self.store(self.keys).gather(places)
            is_missing = tf.not_equal(table_in(tags), numbers) | tf.not_equal(keys, asked.keys)
        rows.set_shape([None, self._width])

        def filled() -> tf.Tensor:
            missing = tf.where(is_missing)[:, 0]
            first = default_rows(tables, tf.gather(asked.keys, missing), some(local, missing))
            return tf.tensor_scatter_nd_update(rows, missing[:, None], first)

        found = tf.cond(tf.reduce_any(is_missing), filled, lambda: rows)
        found.set_shape([None, self._width])
        return found, ~is_missing

    def look_up_slot(self, number: int, slot: SlotTerms, keys: tf.Tensor) -> tf.Tensor:
        """Return a table's rows of a slot; where it has not begun, the value that it begins as."""
        places = self.index.find(keys)
        rows = self.store(self.slot(slot)).gather(places)
        tags = self.store(self.tags).gather(places)
        begun = tf.bitwise.bitwise_and(tags, np.int32(2**SLOT_BITS - 1))
        has_begun = tf.equal(table_in(tags), number) & (begun >= slot.number)
        return tf.where(has_begun[:, None], rows, tf.cast(slot.begins_as, slot.dtype))

    def made(
        self, tables: Sequence[TableTerms], asked: AskedKeys, *, is_push: bool = True
    ) -> tf.Tensor:
        """Return the place of each key; make the rows that are missing. Call under the lock.

        A row for which there is no room is not made, but counted; its place is 0. A push uses the
        rows, and gives up others in turn.
        """
        places = self.index.find_locked(asked.keys)
        tags = self.store(self.tags).gather(places)
        complete = [table.number * 2**SLOT_BITS + newest_of(table) for table in tables]
        are_complete = tf.equal(tags, of_tables(complete, asked.table_of, np.int32))
        made = tf.cond(
            tf.reduce_all(are_complete),
            lambda: tf.identity(places),
            lambda: self._make_admitted(tables, asked, places, tags, are_complete),
        )
        done = [stamp(self, made)]
        # Tables that are asked for together are alike in this.
        if is_push and tables[0].eviction is not None:
            done.append(Push(self, tables, asked, places, made).settle())
        with tf.control_dependencies(done):
            return tf.identity(made)

    def _make_admitted(
        self,
        tables: Sequence[TableTerms],
        asked: AskedKeys,
        places: tf.Tensor,
        tags: tf.Tensor,
        are_complete: tf.Tensor,
    ) -> tf.Tensor:
        """Do the same as `_make_rows`, without the rows of ids that are not admitted."""
        if tables[0].admission is None:  # tables that are asked for together are alike in this
            return self._make_rows(tables, asked, places, tags)
        new = tf.where(tf.equal(places, 0))[:, 0]
        is_admitted = admitted(self, tables, asked.some(new))
        may_begin = tf.tensor_scatter_nd_update(~are_complete, new[:, None], is_admitted)
        chosen = tf.where(may_begin)[:, 0]
        made = self._make_rows(
            tables, asked.some(chosen), tf.gather(places, chosen), tf.gather(tags, chosen)
        )
        return tf.tensor_scatter_nd_update(places, chosen[:, None], made)

    def _make_rows(
        self,
        tables: Sequence[TableTerms],
        asked: AskedKeys,
        places: tf.Tensor,
        tags: tf.Tensor,
    ) -> tf.Tensor:
        """Make the rows that are missing, and begin the slots that a row has not begun."""
        keys, local = asked.keys, asked.table_of
        is_new = tf.equal(places, 0)
        numbers = of_tables([table.number for table in tables], local, np.int32)
        check = tf.debugging.Assert(
            tf.reduce_all(is_new | tf.equal(table_in(tags), numbers)),
            [MEETING],
        )
        with tf.control_dependencies([check]):
            begun = tf.where(is_new, -1, tf.bitwise.bitwise_and(tags, np.int32(2**SLOT_BITS - 1)))
        new = tf.where(is_new)[:, 0]
        new_local = some(local, new)
        new_keys = tf.gather(keys, new)
        if tables[0].region is None:
            new_places = self._new_places(tables, new, new_local)
        else:
            new_places = self._new_places_in_regions(tables, new_keys, new_local, places)
        places = tf.tensor_scatter_nd_update(places, new[:, None], new_places)
        newest = of_tables([newest_of(table) for table in tables], local, np.int32)
        writes = self._begin_slots(tables, places, begun, local)
        first = first_rows(tables, new_keys, new_local)
        writes.append(self._write(self.rows, new_places, first))
        if tables[0].usage is not None:
            writes.append(begin_usage(self, tables, new_places, new_local))
        # A pull that has found another key here reads the row, then the tag, and then the key.
        with tf.control_dependencies([] if tables[0].region is None else writes):
            writes.append(self._write(self.keys, new_places, new_keys))
        due = tf.where(begun < newest)[:, 0]
        new_tags = tf.broadcast_to(numbers * np.int32(2**SLOT_BITS) + newest, tf.shape(places))
        # Place 0 keeps its tag, by which a look-up sees that a row is missing.
        new_tags = tf.where(places > 0, new_tags, NO_TABLE)
        with tf.control_dependencies([] if tables[0].region is None else writes):
            writes.append(self._write(self.tags, tf.gather(places, due), tf.gather(new_tags, due)))
        with tf.control_dependencies(writes):
            has_place = tf.where(new_places > 0)[:, 0]
            insert = self.index.insert(
                tf.gather(new_keys, has_place), tf.gather(new_places, has_place)
            )
        with tf.control_dependencies([insert]):
            return tf.identity(places)

    def _begin_slots(
        self,
        tables: Sequence[TableTerms],
        places: tf.Tensor,
        begun: tf.Tensor,
        local: tf.Tensor | None,
    ) -> list[Any]:
        """Begin the slots that rows have not begun.

        Args:
            begun: the number of the newest slot that each row has begun.
        """
        writes = []
        for slot, tables_with in slots_of(tables).items():
            # Of tables without the slot, rows are not due.
            number = of_tables(
                [slot[1] if i in tables_with else -1 for i in range(len(tables))], local, np.int32
            )
            due = tf.where(begun < number)[:, 0]
            values = of_tables(
                [tables_with.get(i, 0.0) for i in range(len(tables))],
                some(local, due),
                slot[0].as_numpy_dtype,
            )
            values = tf.broadcast_to(
                tf.reshape(values, [-1, 1]), tf.stack([tf.size(due), slot[2] or self._width])
            )
            writes.append(self._write(self._slots[slot], tf.gather(places, due), values))
        return writes

    def _new_places(
        self, tables: Sequence[TableTerms], new: tf.Tensor, local: tf.Tensor | None
    ) -> tf.Tensor:
        """Return places for new rows, 0 for those without room; count them."""
        count = tf.size(new, tf.int64)
        which = tf.zeros_like(new, tf.int32) if local is None else local
        rows_of = [place_of_field(table.number, Field.ROWS) for table in tables]
        made_of = [place_of_field(table.number, Field.MADE) for table in tables]
        refused_of = [place_of_field(table.number, Field.REFUSED) for table in tables]
        numbers = self.gather_numbers([TOP, NUM_FREE, *rows_of])
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
        changes = tf.concat([tf.stack([used, -from_free]), made, made, of_each - made], 0)
        with tf.control_dependencies([given_back]):
            add = self.add_to_numbers([TOP, NUM_FREE, *rows_of, *made_of, *refused_of], changes)
        with tf.control_dependencies([add]):
            return tf.identity(places)

    def _new_places_in_regions(
        self,
        tables: Sequence[TableTerms],
        keys: tf.Tensor,
        local: tf.Tensor | None,
        touched: tf.Tensor,
    ) -> tf.Tensor:
        """Return places for new rows in the regions of their tables; replace rows where full."""
        found = new_places(
            tables,
            self.gather_numbers,
            self.store(self.free).gather,
            self.store(self.tags).gather,
            keys,
            local,
            touched,
        )
        keys = [] if found.replaced is None else [self.store(self.keys).gather(found.replaced)]
        told = [] if found.replaced is None else tell_replaced(self, keys[0], found.replaced)
        with tf.control_dependencies([found.places, *keys, *told]):
            taken = [self.index.remove(each) for each in keys]
        with tf.control_dependencies(taken):
            add = self.add_to_numbers(found.at, found.changes)
        with tf.control_dependencies([add]):
            return tf.identity(found.places)

    def gather_numbers(self, at: Sequence[int]) -> tf.Tensor:
        """Return some of `numbers`."""
        return self.store(self.numbers).gather(tf.constant(at, tf.int32))

    def add_to_numbers(self, at: Sequence[int], changes: tf.Tensor) -> tf.Operation:
        """Add to some of `numbers`. Call under the lock."""
        return tf.raw_ops.ResourceScatterAdd(
            resource=self.numbers.handle, indices=tf.constant(at, tf.int32), updates=changes
        )

    def _write(self, holder: NamedVariable, places: tf.Tensor, rows: tf.Tensor) -> Any:
        return tf.raw_ops.ResourceScatterUpdate(
            resource=holder.handle, indices=places, updates=tf.cast(rows, holder.dtype)
        )

    def top(self) -> tf.Tensor:
        """Return the first place that no row had yet, and that is in no region."""
        return self.gather_numbers([TOP])[0]

    def span(self, holder: Holder) -> tf.Tensor:
        """Return the first place that the rows of a table may have, and the end of these."""
        if holder.region is None:
            return tf.stack([tf.ones([], tf.int64), self.top()])
        used = self.gather_numbers([place_of_field(holder.number, Field.USED)])[0]
        return tf.stack([tf.zeros([], tf.int64), used]) + holder.region.first

    def piece(self, holder: Holder, first: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Return the places of a table's rows among `count` places, and their ids."""
        last = tf.minimum(first + count, self.span(holder)[1])
        tags = self.store(self.tags).gather(tf.range(first, tf.maximum(first, last)))
        places = tf.where(tf.equal(table_in(tags), holder.number))[:, 0] + first
        keys = self.store(self.keys).gather(places)
        return places, unmixed(keys) - salt_in_pool(holder.number)

    def remove_keys(self, holder: Holder, keys: tf.Tensor) -> tf.Tensor:
        """Remove a table's rows of different keys; return how many there were. Under the lock."""
        places = self.index.find_locked(keys)
        is_there = tf.equal(table_in(self.store(self.tags).gather(places)), holder.number)
        return self.remove_at([holder], tf.gather(places, tf.where(is_there)[:, 0]), None)

    def keys_between(self, first: tf.Tensor, last: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the places of a range that have rows, and their keys."""
        tags = self.store(self.tags).gather(tf.range(first, last))
        places = tf.where(tags > NO_TABLE)[:, 0] + first
        return places, self.store(self.keys).gather(places)

    def num_keys(self) -> tf.Tensor:
        """Return the number of rows of all tables."""
        top, num_free = tf.unstack(self.gather_numbers([TOP, NUM_FREE]), 2)
        return top - 1 - num_free

    def remove_at(
        self, holders: Sequence[Holder], places: tf.Tensor, local: tf.Tensor | None
    ) -> tf.Tensor:
        """Remove the rows at some places; return how many there were. Call under the lock.

        Args:
            places: different places, table by table.
            local: the index of the table of each, among `holders`; None if there is one table.
        """
        which = tf.zeros_like(places, tf.int32) if local is None else local
        removed = tf.math.unsorted_segment_sum(tf.ones_like(places), which, len(holders))
        position = tf.range(tf.size(places, tf.int64))
        rows_of = [place_of_field(holder.number, Field.ROWS) for holder in holders]
        if holders[0].region is None:
            at = [NUM_FREE]
            changes = [tf.reduce_sum(removed, keepdims=True), -removed]
            position += self.gather_numbers(at)[0]
        else:
            free_of = [place_of_field(holder.number, Field.FREE) for holder in holders]
            at = [NUM_FREE, *free_of]
            changes = [tf.reduce_sum(removed, keepdims=True), removed, -removed]
            starts = np.array([holder.region.first for holder in holders if holder.region])
            starts = starts + self.gather_numbers(free_of) - tf.cumsum(removed, exclusive=True)
            position += tf.gather(starts, which)
        keys = self.store(self.keys).gather(places)
        with tf.control_dependencies([keys, position]):
            taken = self.index.remove(keys)
            tables = tf.gather(tf.constant([h.number for h in holders], tf.int32), which)
            told = [*tell_gone(self, holders, keys, which), *tell_removed(self, keys, tables)]
        with tf.control_dependencies([taken]):
            tags = tf.fill(tf.shape(places), np.int32(NO_TABLE))
            writes = [
                self._write(self.tags, places, tags),
                self._write(self.free, position, places),
                self.add_to_numbers([*at, *rows_of], tf.concat(changes, 0)),
            ]
        with tf.control_dependencies([*writes, *told]):
            return tf.reduce_sum(removed)
