"""Creates the storage of a variable, whole or in shards, on devices that the strategy chooses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.forks import check_not_forked
from kerasps.variables.lanes.phase import creating_strategy, entering, strategy_of_new_variables
from kerasps.variables.rows.chunks import CHUNK_BYTES, chunks_of, read_rows, write_rows
from kerasps.variables.rows.pooled_rows import PooledRows
from kerasps.variables.rows.sharding import InBlocks, ShardedStorage, Sharding
from kerasps.variables.storage.kinds import MOST_ROWS
from kerasps.variables.storage.named import make_initial

# Makes the initial value of one shard, given the sharding and the shard's index.
InitialShard = Callable[[Sharding, int], Any]


def create_storage(
    initial_value: Callable[[], object],
    initial_shard: InitialShard,
    *,
    shape: tuple[int, ...],
    dtype: tf.DType | str,
    trainable: bool,
    name: str,
    on_coordinator: bool,
) -> tf.Variable | ShardedStorage:
    """Create the storage of a variable.

    Args:
        initial_value: makes the whole initial value. It runs on the device that stores the value,
            or on the coordinator if the value is small.
        initial_shard: makes the initial value of one shard, on the same devices.
        name: the name of the variable; a shard's is `<name>/part_<index>`, as in TensorFlow.
        on_coordinator: whether to store it whole on the coordinator instead of on ps.

    Raises KeraspsError if this process was forked from a connected one.
    """
    check_not_forked()
    if MOST_ROWS in shape:
        raise UnsupportedError(
            f"The variable '{name}' would have an element for each row of a table without a "
            f"vocabulary. Expected: an optimizer whose slots have the shape of the table. "
            f"Received: shape {shape}. Take one that treats rows alone, such as Adam or Adagrad."
        )
    extended = strategy_of_new_variables().extended
    dtype = tf.as_dtype(dtype)
    is_table = not on_coordinator and extended.takes_table(name, shape, dtype)
    new = _New(extended, dtype, trainable, is_table)
    if on_coordinator:
        return new.separate_variable(COORDINATOR_CPU, shape, initial_value, name)
    sharding, devices = extended.shards(shape, dtype, name) or (None, [None])
    beside = extended.shards_beside(shape, len(devices))
    if sharding is None or sharding.num_shards == 1:
        whole = new.shard(devices[0], shape, initial_value, name, beside[0])
        if isinstance(whole, PooledRows):
            return ShardedStorage([whole], InBlocks(shape[0], 1), name)
        return whole
    shards = [
        new.shard(
            device,
            (len(sharding.rows(shard)), *shape[1:]),
            functools.partial(initial_shard, sharding, shard),
            f"{name}/part_{shard}",
            beside[shard],
        )
        for shard, device in enumerate(devices)
    ]
    return ShardedStorage(shards, sharding, name)


@dataclass(frozen=True)
class _New:
    """The properties that all shards of a new variable have in common."""

    extended: Any  # the `Extended` of the strategy, which chooses devices
    dtype: tf.DType
    trainable: bool  # as for `tf.Variable`
    is_table: bool  # whether it may share a storage with other tables

    def shard(
        self,
        device: str | None,
        shape: tuple[int, ...],
        initial_value: Callable[[], object],
        name: str,
        beside: tf.Variable | PooledRows | None,
    ) -> tf.Variable | PooledRows:
        """Create a shard, or a whole variable; create a slot in the pool of its table, if any."""
        pools, rows = self.extended.row_pools, None
        if self.is_table:
            target = device or self.extended.next_device(shape, self.dtype)
            rows = pools.add(target, shape, self.dtype, trainable=self.trainable, name=name)
        elif isinstance(beside, PooledRows):
            rows = pools.add_slot(beside, self.dtype, name)
        if rows is not None:
            if rows.takes_values:
                with tf.init_scope(), entering(None), tf.device(rows.device):
                    rows.assign(make_initial(initial_value, rows.shape, rows.dtype))
            self.extended.ledger.add(rows, is_placed=self.is_table and device is None)
            return rows
        variable = self.separate_variable(device, shape, initial_value, name)
        if self.is_table:
            pools.note_separate(variable)
        return variable

    def separate_variable(
        self,
        device: str | None,
        shape: tuple[int, ...],
        initial_value: Callable[[], object],
        name: str,
    ) -> tf.Variable:
        """Create a variable in a separate storage."""
        # The strategy is current already, in a step too, unless `creating_under` names another. No
        # phase: an initializer that reads other variables needs their stored values.
        strategy = creating_strategy()
        scope = contextlib.nullcontext if strategy is None else strategy.scope
        with tf.init_scope(), scope(), self.extended.placing(device), entering(None):
            return tf.Variable(
                initial_value, shape=shape, dtype=self.dtype, trainable=self.trainable, name=name
            )


def create_copy(
    value: tf.Variable, create: Callable[[Callable[[], object], InitialShard], object]
) -> Any:
    """Create a storage with the value of a `tf.Variable`.

    Copy a large value in chunks, so that no process holds it twice.
    """
    shape = tuple(value.shape)
    if not shape or value.shape.num_elements() * value.dtype.size <= CHUNK_BYTES:

        def rows_of(sharding: Sharding, shard: int) -> tf.Tensor:
            with tf.device(value.device):  # slice here, so that each ps gets only its rows
                return sharding.rows_in(value.read_value(), shard)

        return create(value.read_value, rows_of)

    def empty(shape: tuple[int, ...]) -> tf.Tensor:
        return tf.zeros(shape, value.dtype)

    storage = create(
        lambda: empty(shape),
        lambda sharding, shard: empty((len(sharding.rows(shard)), *shape[1:])),
    )
    with tf.init_scope():
        for rows in chunks_of(storage):
            write_rows(storage, rows, read_rows(value, rows, COORDINATOR_CPU), COORDINATOR_CPU)
    return storage
