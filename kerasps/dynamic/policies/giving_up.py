"""Eviction on a ps: the use of rows is noted, and some rows are given up, at the end of a push."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import mixed
from kerasps.dynamic.policies.regions import spread_positions
from kerasps.dynamic.policies.terms import (
    AskedKeys,
    Field,
    TableTerms,
    of_tables,
    place_of_field,
    table_in,
)
from kerasps.dynamic.policies.usage import Part as PartWithUsage
from kerasps.dynamic.policies.usage import Usage, UsageOfPlaces, this_second
from kerasps.variables.storage.named import NamedVariable

# So many rows are given up together, the first in order of so many that are drawn.
_TOGETHER, _DRAWS = 8, 256
# Every so many pushes, rows are given up, unless a table is nearer to its bound.
_EVERY = 8
# The rows that a push may give up beside twice as many as were made since; those whose time it
# looks at.
_MORE = 64
_LOOKED_AT = 64


class Part(PartWithUsage, Protocol):
    """The part of a pool that has rows (see `KeyPart`)."""

    rows: NamedVariable

    @property
    def tags(self) -> NamedVariable: ...


class Push:
    """A push to tables with eviction, after its rows are made. Use under the lock.

    Args:
        tables: the tables, whose evictions differ in numbers alone.
        asked: the keys.
        found: the place of each key before, 0 for none.
        places: its place now, 0 for none.
    """

    def __init__(
        self,
        part: Part,
        tables: Sequence[TableTerms],
        asked: AskedKeys,
        found: tf.Tensor,
        places: tf.Tensor,
    ) -> None:
        self._part, self._tables = part, tables
        self._evictions = [table.eviction for table in tables if table.eviction is not None]
        self._usage = Usage(part, tables)
        fields = [Field.TICK, Field.ROWS, Field.USED]
        numbers = part.gather_numbers(self._at(*fields))
        before, self._rows, self._used = tf.unstack(tf.reshape(numbers, [len(fields), -1]))
        self._ticks = before + 1
        # The tick of the first push whose rows stay: with synchronous updates, of the open joint.
        self._stay = self._ticks if asked.held is None else self._ticks - asked.held
        self._firsts = np.array([table.region.first for table in tables if table.region], np.int64)
        self._which, self._places = asked.which, places
        is_made = tf.equal(found, 0) & (places > 0)
        self._made = self._of_each(is_made)
        had_row = tf.zeros_like(is_made) if asked.had_row is None else asked.had_row
        self._remade = self._of_each(is_made & had_row)

    def settle(self) -> tf.Operation:
        """Note which rows the push uses, then give up others."""
        part = self._part
        used = tf.where(self._places > 0)[:, 0]
        ticks = tf.cast(tf.gather(self._ticks, tf.gather(self._which, used)), tf.int32)
        changes = [tf.ones_like(self._ticks), self._of_each(self._places >= 0), self._remade]
        with tf.control_dependencies([self._ticks, self._rows, self._used]):
            add = part.add_to_numbers(
                self._at(Field.TICK, Field.ASKED, Field.REMADE), tf.concat(changes, 0)
            )
        with tf.control_dependencies([add, self._usage.note(tf.gather(self._places, used), ticks)]):
            if any(e.ttl_steps or e.ttl_seconds for e in self._evictions):
                with tf.control_dependencies([self._give_up(*self._expired())]):
                    self._rows = tf.identity(part.gather_numbers(self._at(Field.ROWS)))
            over = self._over()
            done = tf.cond(
                tf.reduce_any(over > 0),
                lambda: self._give_up(*self._first_in_order(over)),
                lambda: tf.zeros([], tf.int64),
            )
        with tf.control_dependencies([done]):
            return tf.no_op()

    def _over(self) -> tf.Tensor:
        """Return how many rows each table is to give up now."""
        bounds = list(zip(self._evictions, self._tables, strict=True))
        low = np.array([max(int(eviction.low * t.most), t.least) for eviction, t in bounds])
        near = (low + np.array([table.most for table in self._tables])) // 2
        is_turn = tf.equal(self._ticks % _EVERY, 0)
        most = 2 * self._made * tf.where(is_turn, np.int64(_EVERY), 1) + _MORE
        over = tf.clip_by_value(self._rows - low, 0, most)
        # Near enough that another push of as many rows passes halfway.
        return tf.where(is_turn | (self._rows + self._made > near), over, 0)

    def _at(self, *fields: Field) -> list[int]:
        return [place_of_field(table.number, field) for field in fields for table in self._tables]

    def _of_each(self, values: tf.Tensor) -> tf.Tensor:
        """Return the sum of a number for each key, for each table."""
        return tf.math.unsorted_segment_sum(
            tf.cast(values, tf.int64), self._which, len(self._tables)
        )

    def _rows_at(self, places: tf.Tensor, which: tf.Tensor) -> tuple[tf.Tensor, UsageOfPlaces]:
        """Return whether each place has a row of its table, and the use of the row.

        Args:
            which: the index of the table of each place; may have fewer elements, as NumPy does.
        """
        numbers = of_tables([table.number for table in self._tables], which, np.int32)
        tags = self._part.store(self._part.tags).gather(places)
        return tf.equal(table_in(tags), numbers), self._usage.read(places)

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
        age = ticks - tf.cast(usage["used"], tf.int64)
        is_over = age > of_tables(limits, which, np.int64)
        if self._evictions[0].ttl_seconds is not None:  # the others keep seconds, too
            limits = [math.ceil(e.ttl_seconds or 0) for e in self._evictions]
            is_over |= this_second() - usage["second"] > of_tables(limits, which, np.int32)
        is_over &= usage["used"] < tf.cast(tf.gather(self._stay, which), tf.int32)
        expired = tf.where(is_row & is_over)[:, 0]
        least = np.array([table.least for table in self._tables])
        return self._at_most(
            self._rows - least, tf.gather(places, expired), tf.gather(which, expired)
        )

    def _at_most(
        self, most: tf.Tensor, places: tf.Tensor, which: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the first places of each table."""
        counts = tf.math.unsorted_segment_sum(tf.ones_like(places), which, len(self._tables))
        start = tf.gather(tf.cumsum(counts, exclusive=True), which)
        kept = tf.where(tf.range(tf.size(places, tf.int64)) - start < tf.gather(most, which))[:, 0]
        return tf.gather(places, kept), tf.gather(which, kept)

    def _first_in_order(self, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the places of rows to give up, `count` of each table, or fewer."""
        draws = (count + _TOGETHER - 1) // _TOGETHER
        which = tf.repeat(tf.range(len(self._tables)), draws)
        number = tf.range(tf.reduce_sum(draws)) - tf.gather(tf.cumsum(draws, exclusive=True), which)
        ticks, stay, used, of_table, wanted = (
            tf.gather(values, which)
            for values in (self._ticks, self._stay, self._used, draws, count)
        )
        seeds = mixed(mixed(ticks) + number)
        position = spread_positions(seeds, number, of_table, used, _DRAWS)
        firsts = tf.gather(tf.constant(self._firsts), which)[:, None]
        places = tf.where(position >= 0, firsts + position, tf.zeros_like(position))
        is_row, usage = self._rows_at(places, which[:, None])
        # No row that this push uses, or an earlier one that is not applied yet.
        may_go = is_row & (usage["used"] < tf.cast(stay, tf.int32)[:, None])
        scores = self._scores(places, usage)
        scores = tf.where(may_go, scores, scores.dtype.max)
        _, first = tf.math.top_k(-scores, _TOGETHER)
        goes = tf.gather(may_go, first, batch_dims=1)
        goes &= number[:, None] * _TOGETHER + tf.range(_TOGETHER, dtype=tf.int64) < wanted[:, None]
        at = tf.where(tf.reshape(goes, [-1]))[:, 0]
        chosen = tf.reshape(tf.gather(places, first, batch_dims=1), [-1])
        return tf.gather(chosen, at), tf.gather(which, at // _TOGETHER)

    def _scores(self, places: tf.Tensor, usage: UsageOfPlaces) -> tf.Tensor:
        """Return a number for each row; the smallest goes first."""
        order = self._evictions[0].order
        if order == "norm":
            rows = self._part.store(self._part.rows).gather(places)
            return tf.reduce_sum(tf.square(tf.cast(rows, tf.float32)), -1)
        return usage[{"lru": "used", "lfu": "updates", "age": "made"}[order]]

    def _give_up(self, places: tf.Tensor, which: tf.Tensor) -> tf.Tensor:
        """Remove rows; return how many."""
        holders, number = [table.holder for table in self._tables], len(self._tables)
        ages = tf.gather(self._ticks, which) - tf.cast(self._usage.read(places)["used"], tf.int64)
        counts, ages = (
            tf.math.unsorted_segment_sum(values, which, number)
            for values in (tf.ones_like(places), ages)
        )
        with tf.control_dependencies([ages]):
            removed = self._part.remove_at(holders, places, which)
        add = self._part.add_to_numbers(
            self._at(Field.EVICTED, Field.AGES), tf.concat([counts, ages], 0)
        )
        with tf.control_dependencies([add, removed]):
            return tf.reduce_sum(counts)
