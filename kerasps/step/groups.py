"""Groups of tables: what lies, and is updated, alike is asked for and updated as one.

A step of many tables costs what one table costs, with as many ids: an operation on a tensor of a
few kilobytes takes longer to start than to do. The rows of a group's tables are one row space, in
which each table begins where the one before ends. Rows of a request are in the order of the tables,
so that those of one table are neighbours.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from kerasps.step.compute_messages import Update
from kerasps.step.inventory import rows_spec
from kerasps.step.optimizers import has_uniform_updates, may_update_rows
from kerasps.variables import ParameterServerVariable, Shard, slots_of


@dataclass(frozen=True, eq=False)
class TableGroup:
    """Tables that lie, and are updated, alike; mostly one.

    Attributes:
        tables: the tables: of one row shape and dtype, in shards of one layout on the same ps.
    """

    tables: tuple[ParameterServerVariable, ...]

    @property
    def num_shards(self) -> int:
        """How many shards each of the tables has."""
        return len(self.tables[0].shards)

    @property
    def shards(self) -> list[GroupShard]:
        """The group's part of each shard."""
        return [GroupShard(self, index) for index in range(self.num_shards)]

    @property
    def num_rows(self) -> list[int]:
        """How many rows each table has."""
        return [int(table.shape[0]) for table in self.tables]

    @property
    def starts(self) -> list[int]:
        """Where each table begins in the row space."""
        return list(itertools.accumulate(self.num_rows, initial=0))[:-1]

    def locate(
        self, rows: tf.Tensor, table_of: tf.Tensor | None
    ) -> tuple[tf.Tensor | None, tf.Tensor]:
        """Return the shard (int32) of each of some rows, and its place in its table's shard.

        Args:
            rows: rows of the row space.
            table_of: which table each is of; None where there is one table.
        """
        if table_of is not None:
            rows -= tf.gather(tf.constant(self.starts, rows.dtype), table_of)
        sharding = self.tables[0].sharding
        if sharding is None:
            return None, rows
        if sharding.layout == "mod" or table_of is None:
            return sharding.locate(rows)
        # As in `Sharding.locate`, with the numbers of each row's own table.
        heights = [divmod(number, sharding.num_shards) for number in self.num_rows]
        base, extra = (
            tf.gather(tf.constant(numbers, rows.dtype), table_of)
            for numbers in zip(*heights, strict=True)
        )
        shard = tf.maximum(rows // (base + 1), (rows - extra) // base)
        return tf.cast(shard, tf.int32), tf.where(
            shard < extra, rows % (base + 1), (rows - extra) % base
        )


@dataclass(frozen=True)
class GroupShard:
    """What one ps holds of a group: the `index`-th shard of each of its tables."""

    group: TableGroup
    index: int

    @property
    def shards(self) -> list[Shard]:
        """The shards, in the order of the tables."""
        return [Shard(table, self.index) for table in self.group.tables]

    @property
    def device(self) -> str:
        """The device of the ps where they lie."""
        return self.shards[0].device

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of some rows of them."""
        return rows_spec(self.group.tables[0])


def grouping(
    updates: Sequence[Update], sparse_updates: str
) -> Callable[[Iterable[ParameterServerVariable]], list[TableGroup]]:
    """Return a function that divides tables into groups.

    Args:
        updates: what the step's optimizers apply, in order.
        sparse_updates: the strategy's argument of that name.
    """
    times_updated = Counter(id(v) for update in updates for v in update.variables)
    number_of = {id(v): i for i, update in enumerate(updates) for v in update.variables}

    def key(table: ParameterServerVariable) -> Hashable:
        sharding = table.sharding
        lies = (
            *(table.storage.shape[1:], table.storage.dtype),
            *(() if sharding is None else (sharding.num_shards, sharding.layout)),
            *(shard.device for shard in table.shards),
        )
        times = times_updated[id(table)]
        if times == 0:
            return "read", lies
        update = updates[number_of[id(table)]]
        rule = _rule(update, table, sparse_updates) if times == 1 else None
        # A table whose update is no other table's is alone.
        return id(table) if rule is None else (number_of[id(table)], rule, lies)

    def divide(tables: Iterable[ParameterServerVariable]) -> list[TableGroup]:
        groups: dict[Hashable, list[ParameterServerVariable]] = {}
        for table in tables:
            groups.setdefault(key(table), []).append(table)
        return [TableGroup(tuple(own)) for own in groups.values()]

    return divide


def _rule(update: Update, table: ParameterServerVariable, sparse_updates: str) -> Hashable | None:
    """Return what tells how rows of a table are updated; None where that is for itself to know."""
    optimizer = update.optimizer
    if (
        not has_uniform_updates(optimizer)
        or not may_update_rows(optimizer, sparse_updates)
        or table in update.coupled
        or table.constraint is not None
    ):
        return None
    slots = slots_of(optimizer)[optimizer._get_variable_index(table)]
    if any(slot.storage.shape != table.storage.shape for slot in slots):
        return None
    decays = optimizer.weight_decay is not None and bool(optimizer._use_weight_decay(table))
    return decays, tuple(slot.storage.dtype for slot in slots)
