"""The rows that a step asks for from a group of tables: each different one once, by shard.

The worker computes the request, with as many operations for a group of many tables as for one
table: all ids become rows of the group's row space (see `groups.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from kerasps.dynamic import MEETING, AskedKeys, keys_of_tables, part_of
from kerasps.runtime.errors import out_of_range
from kerasps.step.records.identity import ByIdentity
from kerasps.step.rows.groups import GroupShard, TableGroup
from kerasps.variables import ParameterServerVariable
from kerasps.variables.rows.pooled_rows import store_of
from kerasps.variables.rows.sharding import from_start


class LookupIds(NamedTuple):
    """The ids of a look-up."""

    ids: tf.Tensor  # integers of any shape
    from_end: bool  # whether negative ids count from the end


class Asked(NamedTuple):
    """The tensors of a `RowRequest`, as the function that computes them returns them."""

    # int32: for each shard, the places of the rows in their storage, table by table; of tables
    # without a vocabulary the keys (see `AskedKeys.sent`).
    ids: list[tf.Tensor]
    counts: list[tf.Tensor]  # int32: for each shard, the number of requested rows of each table
    # int32: for each shard, the indices of its rows among the different rows; empty for one shard.
    order: list[tf.Tensor]
    totals: tf.Tensor  # int32: the number of requested rows of each table, in all shards
    # int32, flat: for each look-up, table by table, the place of each id among the rows of its
    # table.
    positions: list[list[tf.Tensor]]
    # int32, flat: for all look-ups, end to end, the place of each id among the rows of all tables.
    all_positions: tf.Tensor
    sizes: tf.Tensor  # int32: the number of ids of each look-up


class RowRequest:
    """The rows of a group of tables that a step asks for: each once, shard by shard."""

    def __init__(self, group: TableGroup, asked: Asked) -> None:
        self.group = group
        self._asked = asked
        self._gradients: ByIdentity[tf.Tensor, list[tf.Tensor]] = ByIdentity()
        self._sums: ByIdentity[tf.Tensor, tf.Tensor] = ByIdentity()

    def ids_in(self, shard: GroupShard) -> tf.Tensor:
        """Return the places of the rows in the storages of the tables' shards, end to end."""
        return self._asked.ids[shard.index]

    def counts_in(self, shard: GroupShard) -> tf.Tensor:
        """Return the number of requested rows of each table in a shard."""
        return self._asked.counts[shard.index]

    def num_rows_in(self, shard: GroupShard) -> tf.Tensor:
        """Return the number of requested rows in a shard."""
        if self.group.is_keyed:
            return tf.reduce_sum(self.counts_in(shard))
        return tf.size(self.ids_in(shard))

    def counts_of_runs(self, shard: GroupShard) -> tf.Tensor:
        """Return the number of elements of `ids_in` for each run of tables in a shard."""
        if self.group.is_keyed:  # one run
            return tf.shape(self.ids_in(shard))
        counts, sizes = self.counts_in(shard), self.group.run_sizes[shard.index]
        if len(sizes) == len(self.group.tables):
            return counts
        run_of = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        with tf.device("/device:CPU:0"):
            return tf.math.segment_sum(counts, tf.constant(run_of))

    def num_rows(self, table: ParameterServerVariable) -> tf.Tensor:
        """Return the number of requested rows of a table, in all shards."""
        return self._asked.totals[self._number(table)]

    def positions(self, table: ParameterServerVariable) -> list[tf.Tensor]:
        """Return, for each look-up of a table, the place of each id among its rows."""
        return self._asked.positions[self._number(table)]

    def join(self, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return all rows, table by table, given the rows from each shard."""
        return tf.dynamic_stitch(self._asked.order, rows) if self._asked.order else rows[0]

    def split(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Return the rows of each table, given the result of `join`."""
        number = len(self.group.tables)
        return [rows] if number == 1 else list(tf.split(rows, self._asked.totals, num=number))

    def find(self, rows: tf.Tensor) -> list[list[tf.Tensor]]:
        """Return the rows of each look-up, table by table, given the result of `join`.

        A look-up finds the row of each of its ids, of shape `[num_ids] + table.shape[1:]`.
        """
        found = iter(self._by_lookup(tf.gather(rows, self._asked.all_positions)))
        return [[next(found) for _ in positions] for positions in self._asked.positions]

    def sum(self, addends: Sequence[tuple[Sequence[int], Sequence[tf.Tensor]]]) -> tf.Tensor:
        """Return the sums over look-ups, a row for each requested row.

        Args:
            addends: for each table, the indices of some of its look-ups, and for each of those a
                tensor with a row for each id. Addends of one row are summed in this order.
        """
        first = addends[0][1][0]
        if first in self._sums:
            return self._sums[first]
        starts = itertools.accumulate(
            (len(of_table) for of_table in self._asked.positions), initial=0
        )
        numbers = [
            start + number
            for start, (of_table, _) in zip(starts, addends, strict=False)
            for number in of_table
        ]
        values = [value for _, of_table in addends for value in of_table]
        positions = self._asked.all_positions
        if numbers != list(range(self._num_lookups)):
            by_lookup = self._by_lookup(positions)
            positions = tf.concat([by_lookup[number] for number in numbers], 0)
        joined = values[0] if len(values) == 1 else tf.concat(values, 0)
        totals = self._asked.totals
        total = totals[0] if len(self.group.tables) == 1 else tf.reduce_sum(totals)
        # Computed once for all shards.
        self._sums[first] = tf.math.unsorted_segment_sum(joined, positions, total)
        return self._sums[first]

    @property
    def _num_lookups(self) -> int:
        return sum(len(positions) for positions in self._asked.positions)

    def _by_lookup(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Return a value for each id, look-up by look-up."""
        number = self._num_lookups
        return [values] if number == 1 else list(tf.split(values, self._asked.sizes, num=number))

    def rows_in(self, shard: GroupShard, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the shard's values among those of some rows, in parts to be put end to end.

        Args:
            rows: for each table, a value for each of its rows, such as a gradient.
        """
        if not self._asked.order:
            return list(rows)
        if rows[0] not in self._gradients:
            # Joined once for all shards.
            joined = rows[0] if len(rows) == 1 else tf.concat(rows, 0)
            self._gradients[rows[0]] = [tf.gather(joined, places) for places in self._asked.order]
        return [self._gradients[rows[0]][shard.index]]

    def _number(self, table: ParameterServerVariable) -> int:
        return next(i for i, other in enumerate(self.group.tables) if other is table)


def ask(group: TableGroup, wanted: Sequence[Sequence[LookupIds]]) -> Asked:
    """Compute the tensors of a request."""
    if group.is_keyed:
        return _ask_for_keys(group, wanted)
    lookups = [looked_up for of_table in wanted for looked_up in of_table]
    flat = [
        tf.reshape(ids, [-1])
        for ids in _of_one_dtype([use.ids for use in lookups], sum(group.num_rows))
    ]
    from_end = np.array([use.from_end and not use.ids.dtype.is_unsigned for use in lookups])
    if len(group.tables) == 1:
        (num_rows,) = group.num_rows
        flat = [
            from_start(ids, num_rows) if is_from_end else ids
            for ids, is_from_end in zip(flat, from_end, strict=True)
        ]
    sizes = tf.stack([tf.size(f) for f in flat])
    together = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
    if len(group.tables) == 1:
        rows, all_positions = tf.unique(together)
        rows, table_of, totals = _in_range(rows, group.tables[0]), None, tf.shape(rows)
    else:
        # For each id, the index of its look-up; for each look-up, the index of its table.
        number_of = np.repeat(np.arange(len(wanted)), [len(of_table) for of_table in wanted])
        lookup_of = _part_of(tf.range(tf.size(together)), tf.cumsum(sizes))
        if from_end.any():
            back = np.where(from_end, np.array(group.num_rows)[number_of], 0)
            of_ids = tf.gather(tf.constant(back, together.dtype), lookup_of)
            together = from_start(together, of_ids)
        together = _all_in_range(together, lookup_of, [group.tables[n] for n in number_of])
        starts = tf.constant(np.array(group.starts)[number_of], together.dtype)
        rows, all_positions = tf.unique(together + tf.gather(starts, lookup_of))
        # The rows are in the order of the tables, since the ids are.
        ends = np.cumsum(group.num_rows)
        table_of = _part_of(rows, tf.constant(ends, rows.dtype))
    shard, places = group.locate(rows, table_of)
    order = [] if shard is None else _by_shard(tf.range(tf.size(rows)), shard, group)
    parts = _by_shard(places, shard, group)
    if table_of is None:
        counts, positions = [tf.shape(part) for part in parts], all_positions
    else:
        counts = _counts(shard, table_of, group)
        totals = counts[0] if shard is None else tf.add_n(counts)
        before = tf.gather(tf.cumsum(totals, exclusive=True), number_of)
        positions = all_positions - tf.gather(before, lookup_of)
    return Asked(
        [tf.cast(part, tf.int32) for part in parts],
        counts,
        order,
        totals,
        _by_table(positions, sizes, wanted),
        all_positions,
        sizes,
    )


def _ask_for_keys(group: TableGroup, wanted: Sequence[Sequence[LookupIds]]) -> Asked:
    """Compute the tensors of a request for rows of tables without a vocabulary."""
    flat = [tf.reshape(use.ids, [-1]) for of_table in wanted for use in of_table]
    sizes = tf.stack([tf.size(ids) for ids in flat])
    number_of = np.repeat(np.arange(len(wanted), dtype=np.int32), [len(uses) for uses in wanted])
    records = [table.storage.table for table in group.tables]
    together = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
    of_ids = None
    if len(wanted) == 1:
        keys = records[0].keys(together)
    else:
        of_ids = _table_of_ids(number_of, sizes)
        keys = keys_of_tables(records, together, of_ids)
    # The keys are in the order of the tables, since the ids are.
    keys, all_positions = tf.unique(keys)
    shard = part_of(keys, group.num_shards) if group.num_shards > 1 else None
    order = [] if shard is None else _by_shard(tf.range(tf.size(keys)), shard, group)
    parts, tables = _by_shard(keys, shard, group), [None] * group.num_shards
    if of_ids is None:
        counts, totals = [tf.shape(part) for part in parts], tf.shape(keys)
        positions = all_positions
    else:
        table_of = tf.math.unsorted_segment_max(of_ids, all_positions, tf.size(keys))
        check = tf.debugging.Assert(
            tf.reduce_all(tf.equal(tf.gather(table_of, all_positions), of_ids)),
            [MEETING],
        )
        with tf.control_dependencies([check]):
            table_of = tf.identity(table_of)
        tables, counts = _by_shard(table_of, shard, group), _counts(shard, table_of, group)
        totals = counts[0] if shard is None else tf.add_n(counts)
        positions = all_positions - tf.gather(tf.cumsum(totals, exclusive=True), of_ids)
    return Asked(
        [AskedKeys(part, of_part).sent() for part, of_part in zip(parts, tables, strict=True)],
        counts,
        order,
        totals,
        _by_table(positions, sizes, wanted),
        all_positions,
        sizes,
    )


def _by_shard(values: tf.Tensor, shard: tf.Tensor | None, group: TableGroup) -> list[tf.Tensor]:
    """Return the values of the rows in each shard; `shard` is None if there is one."""
    return [values] if shard is None else tf.dynamic_partition(values, shard, group.num_shards)


def _table_of_ids(number_of: np.ndarray, sizes: tf.Tensor) -> tf.Tensor:
    """Return the index of the table of each id, given that of each look-up."""
    static = tf.get_static_value(sizes)
    if static is not None:
        return tf.constant(np.repeat(number_of, static))
    lookup_of = _part_of(tf.range(tf.reduce_sum(sizes)), tf.cumsum(sizes))
    return tf.gather(tf.constant(number_of), lookup_of)


def _by_table(
    positions: tf.Tensor, sizes: tf.Tensor, wanted: Sequence[Sequence[object]]
) -> list[list[tf.Tensor]]:
    """Return the positions of each look-up, table by table."""
    number = sum(len(of_table) for of_table in wanted)
    parts = iter([positions] if number == 1 else tf.split(positions, sizes, num=number))
    return [[next(parts) for _ in of_table] for of_table in wanted]


def checked(ids: tf.Tensor, variable: ParameterServerVariable) -> tf.Tensor:
    """Return `ids`, integers of any shape, after a check that they are rows of `variable`.

    Other ids end the step with the error that becomes `kerasps.InputError`.
    """
    (ids,) = _of_one_dtype([ids])
    return _in_range(ids, variable)


def _of_one_dtype(ids: Sequence[tf.Tensor], num_rows: int = 0) -> list[tf.Tensor]:
    is_wide = num_rows > tf.int32.max or any(i.dtype.size > 4 or i.dtype == tf.uint32 for i in ids)
    return [tf.cast(i, tf.int64 if is_wide else tf.int32) for i in ids]


def _part_of(values: tf.Tensor, ends: tf.Tensor) -> tf.Tensor:
    """Return, for each of some values, the index (int32) of its part, given each part's end."""
    # The operation takes the rows of several searches.
    return tf.raw_ops.UpperBound(sorted_inputs=ends[None], values=values[None])[0]


def _counts(shard: tf.Tensor | None, table_of: tf.Tensor, group: TableGroup) -> list[tf.Tensor]:
    """Return, for each shard, the number of some rows that each table has there."""
    num_tables, num_shards = len(group.tables), group.num_shards
    counts = tf.raw_ops.DenseBincount(
        input=table_of if shard is None else shard * num_tables + table_of,
        size=num_shards * num_tables,
        weights=tf.zeros([0], tf.int32),
    )
    return list(tf.split(counts, num_shards)) if num_shards > 1 else [counts]


def _in_range(ids: tf.Tensor, table: ParameterServerVariable) -> tf.Tensor:
    # As unsigned numbers, negative ids are larger than any other.
    largest = tf.reduce_max(_unsigned(ids))
    check = tf.debugging.Assert(
        largest < tf.constant(table.shape[0], largest.dtype),
        [_out_of_range(table), tf.bitcast(largest, ids.dtype)],
    )
    with tf.control_dependencies([check]):
        return tf.identity(ids)


def _all_in_range(
    ids: tf.Tensor, lookup_of: tf.Tensor, tables: Sequence[ParameterServerVariable]
) -> tf.Tensor:
    """Return `ids` after a check that each is a row of the table in which it is looked up.

    Args:
        lookup_of: the index of the look-up of each id.
    """
    unsigned = _unsigned(ids)
    num_rows = tf.constant([table.shape[0] for table in tables], unsigned.dtype)
    is_wrong = unsigned >= tf.gather(num_rows, lookup_of)

    def say() -> tf.Tensor:
        first = tf.argmax(tf.cast(is_wrong, tf.int32))
        messages = tf.constant([_out_of_range(table) for table in tables])
        check = tf.debugging.Assert(False, [tf.gather(messages, lookup_of[first]), ids[first]])
        with tf.control_dependencies([check]):
            return tf.constant(0)

    check = tf.cond(tf.reduce_any(is_wrong), say, lambda: tf.constant(0))
    with tf.control_dependencies([check]):
        return tf.identity(ids)


def _unsigned(ids: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(ids, tf.uint64 if ids.dtype == tf.int64 else tf.uint32)


def _out_of_range(table: ParameterServerVariable) -> str:
    num_rows, first = table.shape[0], store_of(table.shards[0])
    return out_of_range(
        f"{getattr(first.holder, 'shared_name', table.path)}:{first.begin}",
        f"'{table.path}' has {num_rows} rows. Expected: ids from 0 to {num_rows - 1} "
        "(`keras.ops.take` counts negative ones from the end). Received: id",
    )
