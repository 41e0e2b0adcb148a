"""Groups of tables: those with the same placement and update are pulled and updated as one.

A step of many tables costs what one table costs, with as many ids: an operation on a tensor of a
few kilobytes takes longer to start than to run. The rows of a group's tables are one row space, in
which each table begins where the one before ends. Rows of a request are in the order of the tables,
so the rows of one table are contiguous.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from kerasps.dynamic import AskedKeys, KeyedRows
from kerasps.step.records.specs import sent_rows
from kerasps.step.updates.optimizers import has_uniform_updates, may_update_rows
from kerasps.step.updates.update import Update
from kerasps.variables import ParameterServerVariable, Shard, slots_of
from kerasps.variables.rows.pooled_rows import PooledRows, store_of
from kerasps.variables.rows.row_store import RowStore


@dataclass(frozen=True, eq=False)
class TableGroup:
    """Tables with the same placement and the same update; mostly one."""

    # The tables: of one row shape and dtype, in shards of one layout on the same ps.
    tables: tuple[ParameterServerVariable, ...]
    # For each shard, the first place of each table's rows in their storage.
    begins: tuple[tuple[int, ...], ...]
    # For each shard, the number of adjacent tables in each run (see `ShardRun`).
    run_sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, members: Iterable[Sequence[ParameterServerVariable]]) -> TableGroup:
        """Return the group of some tables, with their current placement.

        Args:
            members: each table, followed by its slots if the group is updated as one.
        """
        # Tables in one storage become adjacent, in its order.
        members = sorted(members, key=lambda member: _place_of(member[0]))
        tables = tuple(member[0] for member in members)
        shards = range(len(tables[0].shards))
        return cls(
            tables,
            tuple(tuple(store_of(table.shards[i]).begin for table in tables) for i in shards),
            tuple(
                _run_sizes([[v.shards[i] for v in member] for member in members]) for i in shards
            ),
        )

    @property
    def is_keyed(self) -> bool:
        """True if the tables have no vocabulary, so that the ps find rows by keys."""
        return not self.tables[0].has_whole_value

    @property
    def num_shards(self) -> int:
        """The number of shards that each table has."""
        return len(self.tables[0].shards)

    @property
    def shards(self) -> list[GroupShard]:
        """The group's part of each shard."""
        return [GroupShard(self, index) for index in range(self.num_shards)]

    @property
    def num_rows(self) -> list[int]:
        """The number of rows of each table."""
        return [int(table.shape[0]) for table in self.tables]

    @property
    def starts(self) -> list[int]:
        """The first row of each table in the row space."""
        return list(itertools.accumulate(self.num_rows, initial=0))[:-1]

    def locate(
        self, rows: tf.Tensor, table_of: tf.Tensor | None
    ) -> tuple[tf.Tensor | None, tf.Tensor]:
        """Return the shard (int32) of each of some rows, and its place in the shard's storage.

        Args:
            rows: rows of the row space.
            table_of: the index of each row's table; None if there is one table.
        """
        begins = np.array(self.begins)
        if self.tables[0].sharding is None:
            # From the place in the row space directly to that in the storage.
            moves = begins[0] - np.array(self.starts)
            if table_of is not None:
                return None, rows + tf.gather(tf.constant(moves, rows.dtype), table_of)
            return None, rows + tf.constant(moves[0], rows.dtype) if moves[0] else rows
        if table_of is not None:
            rows -= tf.gather(tf.constant(self.starts, rows.dtype), table_of)
        if table_of is None:
            shard, places = self.tables[0].sharding.locate(rows)
        else:
            shard, places = self.tables[0].sharding.locate_in_tables(rows, table_of, self.num_rows)
        if begins.any():
            number = shard * len(self.tables) + (0 if table_of is None else table_of)
            places += tf.gather(tf.constant(begins.reshape(-1), rows.dtype), number)
        return shard, places


@dataclass(frozen=True)
class ShardRun:
    """Shards of adjacent tables that share one storage, as do their slots; mostly a single shard.

    One operation reads or writes rows of all of them.
    """

    shards: tuple[Shard, ...]

    @property
    def device(self) -> str:
        """The device of the ps that has the shards."""
        return self.shards[0].device

    @property
    def store(self) -> RowStore:
        """The rows of the shards, by place; the first place is that of the first shard."""
        return self.shards[0].store

    @property
    def is_keyed(self) -> bool:
        """True if the ps finds rows by keys."""
        return not self.shards[0].variable.has_whole_value

    @property
    def may_leave(self) -> bool:
        """True if the ps gives up rows, so that one may be there in a pull and not in the push."""
        return self.is_keyed and self._keyed()[0].may_leave

    def asked(self, ids: tf.Tensor) -> tf.Tensor | AskedKeys:
        """Return what a message asks for: places, or keys. Runs on the ps."""
        return AskedKeys.of(ids, len(self.shards)) if self.is_keyed else ids

    def read(self, asked: tf.Tensor | AskedKeys) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the rows that are asked for, and of those that may leave which are there.

        Runs on the ps.
        """
        if isinstance(asked, AskedKeys):
            keyed = self._keyed()
            rows, has_row = keyed[0].look_up(keyed, asked)
            return rows, [has_row] if self.may_leave else []
        return self.store.gather(asked), []

    def places(self, asked: tf.Tensor | AskedKeys) -> tf.Tensor:
        """Return the places of rows to update; make missing ones. On the ps, under its lock."""
        if isinstance(asked, AskedKeys):
            keyed = self._keyed()
            return keyed[0].made(keyed, asked)
        return asked

    def note_change(self, places: tf.Tensor) -> None:
        """Note that rows change some time after `places`. On the ps, under its lock."""
        if self.is_keyed:
            self._keyed()[0].note_change(places)

    def _keyed(self) -> list[KeyedRows]:
        return [shard.storage for shard in self.shards]

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of some rows of the shards, as they are sent."""
        return sent_rows(self.shards[0].variable)


@dataclass(frozen=True)
class GroupShard:
    """The shards of a group on one ps: the `index`-th shard of each of its tables."""

    group: TableGroup
    index: int

    @property
    def shards(self) -> list[Shard]:
        """The shards, in the order of the tables."""
        return [Shard(table, self.index) for table in self.group.tables]

    @property
    def runs(self) -> list[ShardRun]:
        """The runs of the shards."""
        shards = iter(self.shards)
        return [
            ShardRun(tuple(itertools.islice(shards, size)))
            for size in self.group.run_sizes[self.index]
        ]

    @property
    def device(self) -> str:
        """The device of the ps that has the shards."""
        return self.shards[0].device

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of some rows of the shards, as they are sent."""
        return sent_rows(self.group.tables[0])


def grouping(
    updates: Sequence[Update], sparse_updates: str
) -> Callable[[Iterable[ParameterServerVariable]], list[TableGroup]]:
    """Return a function that divides tables into groups."""
    times_updated = Counter(id(v) for update in updates for v in update.variables)
    number_of = {id(v): i for i, update in enumerate(updates) for v in update.variables}

    def key(table: ParameterServerVariable) -> Hashable:
        sharding = table.sharding
        layout = (
            *(table.storage.shape[1:], table.storage.dtype),
            *(() if sharding is None else (sharding.num_shards, type(sharding))),
            *(shard.device for shard in table.shards),
            *_kind_of_keys(table),
        )
        times = times_updated[id(table)]
        if times == 0:
            return "read", layout
        update = updates[number_of[id(table)]]
        rule = _rule(update, table, sparse_updates) if times == 1 else None
        # A table without a rule for its update gets its own group.
        return id(table) if rule is None else (number_of[id(table)], rule, layout)

    def divide(tables: Iterable[ParameterServerVariable]) -> list[TableGroup]:
        groups: dict[Hashable, list[ParameterServerVariable]] = {}
        for table in tables:
            groups.setdefault(key(table), []).append(table)
        return [TableGroup.of(with_slots(members)) for members in groups.values()]

    def with_slots(
        tables: list[ParameterServerVariable],
    ) -> list[list[ParameterServerVariable]]:
        if len(tables) == 1 or not times_updated[id(tables[0])]:
            return [[table] for table in tables]
        optimizer = updates[number_of[id(tables[0])]].optimizer
        slots = slots_of(optimizer)
        return [[table, *slots[optimizer._get_variable_index(table)]] for table in tables]

    return divide


def _place_of(table: ParameterServerVariable) -> tuple[int, int]:
    """Return a sort key for a table: tables in no pool first, then those of each pool."""
    first = table.shards[0]
    if isinstance(first, KeyedRows):
        return first.pool.number, first.table.number
    return (first.pool.number, first.store.begin) if isinstance(first, PooledRows) else (0, 0)


def _kind_of_keys(table: ParameterServerVariable) -> tuple[Hashable, ...]:
    """Return what tables without a vocabulary must have in common to be one group."""
    first = table.shards[0]
    if not isinstance(first, KeyedRows):
        return ()
    begins = first.table.rows_of_ids
    eviction = begins.eviction
    kind = None if eviction is None else (eviction.order, eviction.columns)
    how = type(begins.admission).__name__, begins.reads_zeros, kind
    return (first.pool.number, begins.first_rows, *how)


def _run_sizes(members: Sequence[Sequence[tf.Variable | PooledRows]]) -> tuple[int, ...]:
    """Return the number of adjacent members in each run."""
    sizes = [1]
    for one, other in itertools.pairwise(members):
        if _lie_alike(one, other):
            sizes[-1] += 1
        else:
            sizes.append(1)
    return tuple(sizes)


def _lie_alike(
    one: Sequence[tf.Variable | PooledRows], other: Sequence[tf.Variable | PooledRows]
) -> bool:
    """Return True if one operation can read rows of two tables' shards, and one of each slot."""
    if len(one) != len(other):
        return False
    moves = set()
    for a, b in zip(map(store_of, one), map(store_of, other), strict=True):
        if a.holder is not b.holder:
            return False
        moves.add(b.begin - a.begin)
    return len(moves) == 1


def _rule(update: Update, table: ParameterServerVariable, sparse_updates: str) -> Hashable | None:
    """Return a key of how rows of a table are updated; None if no other table can share it."""
    optimizer = update.optimizer
    if (
        not has_uniform_updates(optimizer)
        or not may_update_rows(optimizer, sparse_updates)
        or table.constraint is not None
    ):
        return None
    slots = slots_of(optimizer)[optimizer._get_variable_index(table)]
    if any(slot.storage.shape != table.storage.shape for slot in slots):
        return None
    decays = optimizer.weight_decay is not None and bool(optimizer._use_weight_decay(table))
    kinds = tuple(getattr(slot.storage, "terms", slot.storage.dtype) for slot in slots)
    return decays, table.wire_dtype, kinds
