"""Eviction on a ps: the use of rows is noted, and some rows are given up, at the end of a push."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import mixed, salt_of
from kerasps.dynamic.parts.regions import drawn_positions
from kerasps.dynamic.parts.terms import (
    Field,
    Holder,
    SlotTerms,
    TableTerms,
    of_tables,
    place_of_field,
    table_in,
)
from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.storage.named import NamedVariable

# The rows that are drawn for each one that is given up.
_DRAWS = 64
# The rows that a push may give up beside as many as it makes; those whose time it looks at.
_MORE = 64
_LOOKED_AT = 64


class Part(Protocol):
    """The part of a pool that has rows (see `KeyPart`)."""

    @property
    def tags(self) -> NamedVariable: ...

    def slot(self, terms: SlotTerms) -> NamedVariable: ...

    def store(self, holder: NamedVariable) -> RowStore: ...

    def piece(
        self, holder: Holder, first: tf.Tensor, count: tf.Tensor
    ) -> tuple[tf.Tensor, ...]: ...

    def gather_numbers(self, at: Sequence[int]) -> tf.Tensor: ...

    def add_to_numbers(self, at: Sequence[int], changes: tf.Tensor) -> tf.Operation: ...

    def remove_at(
        self, holders: Sequence[Holder], places: tf.Tensor, local: tf.Tensor | None
    ) -> tf.Tensor: ...


class Push:
    """A push to tables with eviction, after its rows are made. Use under the lock.

    Args:
        tables: the tables, whose evictions differ in numbers alone.
        which: the index of the table of each key.
        found: the place of each key before, 0 for none.
        places: its place now, 0 for none.
    """

    def __init__(
        self,
        part: Part,
        tables: Sequence[TableTerms],
        which: tf.Tensor,
        found: tf.Tensor,
        places: tf.Tensor,
    ) -> None:
        self._part, self._tables = part, tables
        self._evictions = [table.eviction for table in tables if table.eviction is not None]
        self._order = self._evictions[0].order
        usage = tables[0].usage
        assert usage is not None  # of each table with eviction
        self._usage = part.slot(usage)
        fields = [Field.TICK, Field.ROWS, Field.USED]
        numbers = part.gather_numbers(self._at(*fields))
        before, self._rows, self._used = tf.unstack(tf.reshape(numbers, [len(fields), -1]))
        self._ticks = before + 1
        self._firsts = np.array([table.region.first for table in tables if table.region], np.int64)
        self._which, self._places = which, places
        is_made = tf.equal(found, 0) & (places > 0)
        self._made = tf.math.unsorted_segment_sum(tf.cast(is_made, tf.int64), which, len(tables))

    def settle(self) -> tf.Operation:
        """Note which rows the push uses, then give up others."""
        part = self._part
        with tf.control_dependencies([self._ticks, self._rows, self._used]):
            add = part.add_to_numbers(self._at(Field.TICK), tf.ones_like(self._ticks))
        steps: list[tf.Operation] = [add, self._stamp()]
        with tf.control_dependencies(steps):
            if any(eviction.ttl_steps for eviction in self._evictions):
                with tf.control_dependencies([self._give_up(*self._expired())]):
                    self._rows = tf.identity(part.gather_numbers(self._at(Field.ROWS)))
            bounds = zip(self._evictions, self._tables, strict=True)
            low = np.array([int(eviction.low * table.most) for eviction, table in bounds])
            over = tf.clip_by_value(self._rows - low, 0, 2 * self._made + _MORE)
            done = tf.cond(
                tf.reduce_any(over > 0),
                lambda: self._give_up(*self._first_in_order(over)),
                lambda: tf.zeros([], tf.int64),
            )
        with tf.control_dependencies([done]):
            return tf.no_op()

    def _at(self, *fields: Field) -> list[int]:
        return [place_of_field(table.number, field) for field in fields for table in self._tables]

    def _stamp(self) -> tf.Operation:
        """Write the tick, and the number of the order, of the rows that the push uses."""
        used = tf.where(self._places > 0)[:, 0]
        places = tf.gather(self._places, used)
        ticks = tf.cast(tf.gather(self._ticks, tf.gather(self._which, used)), tf.int32)[:, None]
        if self._order == "lru":
            numbers = ticks
        else:
            others = self._part.store(self._usage).gather(places)[:, 1:]
            numbers = tf.concat([ticks, others + 1 if self._order == "lfu" else others], 1)
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self._usage.handle, indices=places, updates=numbers
        )

    def _rows_at(self, places: tf.Tensor, which: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return whether each place has a row of its table, and the use of the row."""
        numbers = of_tables([table.number for table in self._tables], which, np.int32)
        tags = self._part.store(self._part.tags).gather(places)
        return tf.equal(table_in(tags), numbers), self._part.store(self._usage).gather(places)

    def _expired(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the places of rows that were not used for too long, among some in turn."""
        count = tf.minimum(self._used, _LOOKED_AT)
        which = tf.repeat(tf.range(len(self._tables)), count)
        number = tf.range(tf.reduce_sum(count)) - tf.gather(tf.cumsum(count, exclusive=True), which)
        ticks, used = (tf.gather(values, which) for values in (self._ticks, self._used))
        position = (ticks * _LOOKED_AT + number) % tf.maximum(used, 1)
        places = tf.gather(tf.constant(self._firsts), which) + position
        is_row, usage = self._rows_at(places, which)
        limits = [e.ttl_steps or np.iinfo(np.int64).max for e in self._evictions]
        age = ticks - tf.cast(usage[:, 0], tf.int64)
        expired = tf.where(is_row & (age > of_tables(limits, which, np.int64)))[:, 0]
        return tf.gather(places, expired), tf.gather(which, expired)

    def _first_in_order(self, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the places of rows to give up, `count` of each table, or fewer."""
        which = tf.repeat(tf.range(len(self._tables)), count)
        number = tf.range(tf.reduce_sum(count)) - tf.gather(tf.cumsum(count, exclusive=True), which)
        ticks, used, of_table = (
            tf.gather(values, which)[:, None] for values in (self._ticks, self._used, count)
        )
        salts = np.array([salt_of(draw) for draw in range(_DRAWS)], np.int64)
        seeds = mixed(mixed(ticks) + number[:, None]) + salts
        position = drawn_positions(seeds, number[:, None], of_table, used)
        firsts = tf.gather(tf.constant(self._firsts), which)[:, None]
        places = tf.where(position >= 0, firsts + position, tf.zeros_like(position))
        flat, repeated = tf.reshape(places, [-1]), tf.repeat(which, _DRAWS)
        is_row, usage = self._rows_at(flat, repeated)
        may_go = is_row & (usage[:, 0] < tf.cast(tf.gather(self._ticks, repeated), tf.int32))
        score = tf.where(may_go, usage[:, -1], tf.int32.max)
        score = tf.reshape(score, [-1, _DRAWS])
        best = tf.argmin(score, 1)
        chosen = tf.gather(places, best, batch_dims=1)
        found = tf.where(tf.reduce_min(score, 1) < tf.int32.max)[:, 0]
        return tf.gather(chosen, found), tf.gather(which, found)

    def _give_up(self, places: tf.Tensor, which: tf.Tensor) -> tf.Tensor:
        """Remove rows; return how many."""
        holders = [table.holder for table in self._tables]
        removed = self._part.remove_at(holders, places, which)
        counts = tf.math.unsorted_segment_sum(tf.ones_like(places), which, len(self._tables))
        add = self._part.add_to_numbers(self._at(Field.EVICTED), counts)
        with tf.control_dependencies([add, removed]):
            return tf.reduce_sum(counts)


def begin_usage(
    part: Part, tables: Sequence[TableTerms], places: tf.Tensor, local: tf.Tensor | None
) -> tf.Operation:
    """Note that rows are made and used now, and were not used before."""
    usage, eviction = tables[0].usage, tables[0].eviction
    assert usage is not None
    ticks = part.gather_numbers([place_of_field(t.number, Field.TICK) for t in tables]) + 1
    which = tf.zeros_like(places, tf.int32) if local is None else local
    now = tf.gather(tf.cast(ticks, tf.int32), which)[:, None]
    is_counted = eviction is not None and eviction.order == "lfu"
    columns = [now, tf.zeros_like(now) if is_counted else now][: usage.width]
    return tf.raw_ops.ResourceScatterUpdate(
        resource=part.slot(usage).handle, indices=places, updates=tf.concat(columns, 1)
    )


def last_use(
    part: Part, holder: Holder, usage: SlotTerms, first: tf.Tensor, count: tf.Tensor
) -> tf.Tensor:
    """Return the last tick at which rows of a table among `count` places were used."""
    places, _ = part.piece(holder, first, count)
    ticks = part.store(part.slot(usage)).gather(places)[:, 0]
    return tf.cast(tf.reduce_max(tf.concat([[0], ticks], 0)), tf.int64)


def set_tick(part: Part, holder: Holder, tick: tf.Tensor) -> tf.Tensor:
    """Set the number of pushes to a table. Call under the lock."""
    at = [place_of_field(holder.number, Field.TICK)]
    with tf.control_dependencies([part.add_to_numbers(at, tick[None] - part.gather_numbers(at))]):
        return tf.identity(tick)
