"""The use of the rows of tables with eviction, in a slot of the table (see `Eviction.columns`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from kerasps.dynamic.policies.terms import Field, Holder, SlotTerms, TableTerms, place_of_field
from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.storage.named import NamedVariable

# Seconds are counted from 1 January 2020, so that they fit into int32 until 2088.
_YEAR_2020 = 1_577_836_800


class Part(Protocol):
    """The part of a pool that has rows (see `KeyPart`)."""

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


class Usage:
    """The use of the rows of some tables, whose evictions keep the same columns."""

    def __init__(self, part: Part, tables: Sequence[TableTerms]) -> None:
        eviction, terms = tables[0].eviction, tables[0].usage
        assert eviction is not None  # of each of these tables
        assert terms is not None
        self._part, self._columns = part, eviction.columns
        self._holder = part.slot(terms)

    def read(self, places: tf.Tensor) -> UsageOfPlaces:
        """Return the use of the rows at some places."""
        return UsageOfPlaces(self._part.store(self._holder).gather(places), self._columns)

    def note(self, places: tf.Tensor, ticks: tf.Tensor) -> tf.Operation:
        """Note that rows are used at some ticks."""
        before = self.read(places)
        columns = {
            "used": lambda: ticks,
            "updates": lambda: before["updates"] + 1,
            "made": lambda: before["made"],
            "second": lambda: tf.fill(tf.shape(ticks), this_second()),
        }
        return self._write(places, [columns[name]() for name in self._columns])

    def begin(self, places: tf.Tensor, ticks: tf.Tensor) -> tf.Operation:
        """Note that rows are made at some ticks, and were not used before."""
        columns = {
            "used": lambda: ticks,
            "updates": lambda: tf.zeros_like(ticks),
            "made": lambda: ticks,
            "second": lambda: tf.fill(tf.shape(ticks), this_second()),
        }
        return self._write(places, [columns[name]() for name in self._columns])

    def _write(self, places: tf.Tensor, columns: Sequence[tf.Tensor]) -> tf.Operation:
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self._holder.handle, indices=places, updates=tf.stack(columns, 1)
        )


class UsageOfPlaces:
    """The use of the rows at some places, a tensor: int32 values by their names."""

    def __init__(self, values: tf.Tensor, names: Sequence[str]) -> None:
        self._values, self._names = values, names

    def __getitem__(self, name: str) -> tf.Tensor:
        return self._values[..., self._names.index(name)]


def this_second() -> tf.Tensor:
    """Return the second that it is on the ps, int32."""
    return tf.cast(tf.cast(tf.timestamp(), tf.int64) - _YEAR_2020, tf.int32)


def begin_usage(
    part: Part, tables: Sequence[TableTerms], places: tf.Tensor, local: tf.Tensor | None
) -> tf.Operation:
    """Note that rows of tables are made now."""
    ticks = part.gather_numbers([place_of_field(t.number, Field.TICK) for t in tables]) + 1
    which = tf.zeros_like(places, tf.int32) if local is None else local
    return Usage(part, tables).begin(places, tf.gather(tf.cast(ticks, tf.int32), which))


def last_use(part: Part, table: TableTerms, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return the last tick at which rows of a table among `count` places were used."""
    places, _ = part.piece(table.holder, first, count)
    ticks = Usage(part, [table]).read(places)["used"]
    return tf.cast(tf.reduce_max(tf.concat([[0], ticks], 0)), tf.int64)


def set_tick(part: Part, holder: Holder, tick: tf.Tensor) -> tf.Tensor:
    """Set the number of pushes to a table. Call under the lock."""
    at = [place_of_field(holder.number, Field.TICK)]
    with tf.control_dependencies([part.add_to_numbers(at, tick[None] - part.gather_numbers(at))]):
        return tf.identity(tick)


def remove_unused(
    part: Part,
    table: TableTerms,
    by_clock: bool,
    age: tf.Tensor,
    first: tf.Tensor,
    count: tf.Tensor,
) -> tf.Tensor:
    """Remove rows of a table among `count` places; return how many. Call under the lock.

    Args:
        by_clock: whether `age` is in seconds, and not in ticks.
        age: rows whose last use was longer ago are removed.
    """
    places, _ = part.piece(table.holder, first, count)
    usage = Usage(part, [table]).read(places)
    if by_clock:
        now, used = this_second(), usage["second"]
    else:
        tick = part.gather_numbers([place_of_field(table.number, Field.TICK)])[0]
        now, used = tf.cast(tick, tf.int32), usage["used"]
    is_old = tf.cast(now - used, tf.int64) > age
    return part.remove_at([table.holder], tf.boolean_mask(places, is_old), None)
