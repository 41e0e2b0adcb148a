"""Creates the storage of a variable where the strategy says, whole or in shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasps.cluster import COORDINATOR_CPU, check_not_forked
from kerasps.variables.chunks import CHUNK_BYTES, chunks_of, read_rows, write_rows
from kerasps.variables.phase import creating_strategy, entering, strategy_of_new_variables
from kerasps.variables.sharding import ShardedStorage, Sharding

# Makes the initial value of one shard, given the sharding and the shard's index.
InitialShard = Callable[[Sharding, int], Any]


def create_storage(
    initial_value: Callable[[], Any],
    initial_shard: InitialShard,
    *,
    shape: tuple[int, ...],
    dtype: Any,
    trainable: bool,
    name: str,
    on_coordinator: bool,
) -> tf.Variable | ShardedStorage:
    """Create the storage of a variable.

    Args:
        initial_value: makes the whole initial value. It runs on the device that stores it.
        initial_shard: makes the initial value of one shard. It runs on the device that stores it.
        shape: the shape of the whole variable.
        dtype: its dtype.
        trainable: as for `tf.Variable`.
        name: the name of the variable; a shard's is `<name>/part_<index>`, as in TensorFlow.
        on_coordinator: store it whole on the coordinator, and not on ps.

    Raises:
        KeraspsError: this process was forked from a connected one.
    """
    check_not_forked()
    extended = strategy_of_new_variables().extended
    dtype = tf.as_dtype(dtype)

    def create(
        device: str | None, shape: tuple[int, ...], initial_value: Callable[[], Any], name: str
    ) -> tf.Variable:
        # The strategy is current already, in a step too, unless `creating_under` names another. No
        # phase: an initializer that reads other variables means their values.
        own = creating_strategy()
        scope = contextlib.nullcontext if own is None else own.scope
        with tf.init_scope(), scope(), extended.placing(device), entering(None):
            return tf.Variable(
                initial_value, shape=shape, dtype=dtype, trainable=trainable, name=name
            )

    if on_coordinator:
        return create(COORDINATOR_CPU, shape, initial_value, name)
    sharded = extended.shards(shape, dtype)
    if sharded is None:
        return create(None, shape, initial_value, name)
    sharding, devices = sharded
    shards = [
        create(
            device,
            (len(sharding.rows(shard)), *shape[1:]),
            functools.partial(initial_shard, sharding, shard),
            f"{name}/part_{shard}",
        )
        for shard, device in enumerate(devices)
    ]
    return ShardedStorage(shards, sharding, name)


def create_copy(
    value: tf.Variable, create: Callable[[Callable[[], Any], InitialShard], Any]
) -> Any:
    """Create a storage with the value that a `tf.Variable` has.

    A large value is copied in chunks, so that nobody holds it a second time.

    Args:
        value: the variable to copy.
        create: creates the storage, given functions that make its initial values.
    """
    shape = tuple(value.shape)
    if not shape or value.shape.num_elements() * value.dtype.size <= CHUNK_BYTES:

        def rows_of(sharding: Sharding, shard: int) -> tf.Tensor:
            with tf.device(value.device):  # so that a ps is sent its own rows alone
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
