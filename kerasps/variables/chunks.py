"""Reads and writes a variable in chunks of rows, so that nobody has to hold the whole of it.

A chunk is a range of rows of the whole variable, in their order, whichever shards they are in. The
bytes go from the tasks that hold them to the device that asks, or the other way round, and nowhere
else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from kerasps.variables.pooled_rows import assign_rows, held_by
from kerasps.variables.sharding import ShardedStorage, Sharding, shards_of

# A chunk costs memory: a few of them on the coordinator, or on each ps. A table of 1 GB is 64
# chunks, each of which takes a few calls; smaller ones would make saving a matter of round trips.
CHUNK_BYTES = 16 << 20


class StoredRows(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in a file, of which a slice of rows can be read; any other use reads it whole.

    Args:
        dataset: a `h5py.Dataset`, or what can be sliced like one.
        dtype: the dtype of its elements, which the file may not know (bfloat16).
    """

    def __init__(self, dataset: Any, dtype: DTypeLike) -> None:
        self._dataset = dataset
        self.dtype = np.dtype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self._dataset.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        read = np.asarray(self._dataset[index])
        return read if read.dtype == self.dtype else read.view(self.dtype)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy  # what is read from a file is a copy
        return np.asarray(self[:], dtype)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object
    ) -> Any:
        whole = [np.asarray(value) if isinstance(value, StoredRows) else value for value in inputs]
        return getattr(ufunc, method)(*whole, **kwargs)


def row_bytes(storage: tf.Variable | ShardedStorage) -> int:
    """Return the bytes of a row of a storage, at least 1 so that it can divide."""
    return max(1, int(math.prod(storage.shape[1:]) * storage.dtype.size))


def num_bytes(storage: tf.Variable | ShardedStorage) -> int:
    """Return the bytes of the whole value of a storage."""
    return int(math.prod(storage.shape) * storage.dtype.size)


def chunks_of(storage: tf.Variable | ShardedStorage) -> list[range]:
    """Return the chunks of a storage: ranges of rows, each of `CHUNK_BYTES` at most.

    A chunk has one row at least, and all are as equal as possible. There are as many of them as
    shards, or a multiple. So chunks can be dealt out evenly to the ps that hold the shards.
    """
    num_rows, num_shards = int(storage.shape[0]), len(shards_of(storage))
    count = num_shards * math.ceil(num_bytes(storage) / num_shards / CHUNK_BYTES)
    count = max(1, min(count, num_rows))
    return [range(num_rows * i // count, num_rows * (i + 1) // count) for i in range(count)]


def read_rows(storage: tf.Variable | ShardedStorage, rows: range, device: str | None) -> tf.Tensor:
    """Read a chunk of a storage.

    Args:
        storage: a `tf.Variable` or a `ShardedStorage`.
        rows: the rows of the chunk, with a step of 1.
        device: the device for the result, None for the one at hand.
    """
    sharding = _sharding_of(storage)
    values, own_rows = [], []
    for index, shard in enumerate(shards_of(storage)):
        places = sharding.places(index, rows)
        if len(places):
            holder, begin = held_by(shard)
            with tf.device(shard.device):
                # Not `shard[...]`: that reads the variable first. Once an update by rows has set
                # TensorFlow's mode of copies on reading, it would copy the whole shard.
                value = tf.raw_ops.ResourceGather(
                    resource=holder.handle,
                    indices=tf.range(begin + places.start, begin + places.stop),
                    dtype=shard.dtype,
                )
            values.append(value)
            own_rows.append(sharding.rows(index)[places.start : places.stop])
    with tf.device(device):
        if len(values) == 1:
            return tf.identity(values[0])
        if sharding.layout == "div":
            return tf.concat(values, 0)
        order = [
            tf.range(part.start - rows.start, part.stop - rows.start, part.step)
            for part in own_rows
        ]
        return tf.dynamic_stitch(order, values)


def write_rows(
    storage: tf.Variable | ShardedStorage, rows: range, value: tf.Tensor, device: str | None
) -> None:
    """Write a chunk of a storage.

    Args:
        storage: a `tf.Variable` or a `ShardedStorage`.
        rows: the rows of the chunk, with a step of 1.
        value: their new value.
        device: the device that `value` is on. It cuts the value up, so each ps gets its rows only.
    """
    sharding = _sharding_of(storage)
    for index, shard in enumerate(shards_of(storage)):
        places = sharding.places(index, rows)
        if not len(places) or not getattr(shard, "takes_values", True):
            continue
        taken = sharding.rows(index)[places.start : places.stop]
        with tf.device(device):
            own_value = value[taken.start - rows.start : taken.stop - rows.start : taken.step]
        assign_rows(shard, places, own_value)


def _sharding_of(storage: tf.Variable | ShardedStorage) -> Sharding:
    return (
        storage.sharding
        if isinstance(storage, ShardedStorage)
        else Sharding(int(storage.shape[0]), 1, "div")
    )
