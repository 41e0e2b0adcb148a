"""Reads and writes a variable in chunks of rows, so that no process has to hold the whole value.

A chunk is a range of rows of the whole variable, in their order, whichever shards they are in. The
bytes go directly between the tasks that hold them and the device that reads or writes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from kerasps.variables.rows.pooled_rows import store_of
from kerasps.variables.rows.sharding import InBlocks, ShardedStorage, Sharding, shards_of

# Chunks cost memory: the coordinator, or each ps, holds a few at a time. A table of 1 GB is 64
# chunks of a few calls each. With smaller chunks, round trips would dominate the time of saving.
CHUNK_BYTES = 16 << 20


class StoredRows(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in a file. A slice of rows reads only these; any other use reads the whole array.

    Args:
        dataset: a `h5py.Dataset`, or an object that can be sliced like one.
        dtype: the dtype of its elements, which the file may not support (bfloat16).
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
        del copy  # a value read from a file is a copy
        return np.asarray(self[:], dtype)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object
    ) -> Any:
        whole = [np.asarray(value) if isinstance(value, StoredRows) else value for value in inputs]
        return getattr(ufunc, method)(*whole, **kwargs)


def row_bytes(storage: tf.Variable | ShardedStorage) -> int:
    """Return the bytes of a row of a storage, at least 1 so that callers can divide by it."""
    return max(1, int(math.prod(storage.shape[1:]) * storage.dtype.size))


def num_bytes(storage: tf.Variable | ShardedStorage) -> int:
    """Return the bytes of the whole value of a storage."""
    return int(math.prod(storage.shape) * storage.dtype.size)


def chunks_of(storage: tf.Variable | ShardedStorage) -> list[range]:
    """Return the chunks of a storage: ranges of rows, each of at most `CHUNK_BYTES`.

    A chunk has at least one row, and all are as equal as possible. Their number is that of the
    shards, or a multiple of it, so that they can be distributed evenly to the ps of the shards.
    """
    num_rows, num_shards = int(storage.shape[0]), len(shards_of(storage))
    count = num_shards * math.ceil(num_bytes(storage) / num_shards / CHUNK_BYTES)
    count = max(1, min(count, num_rows))
    return [range(num_rows * i // count, num_rows * (i + 1) // count) for i in range(count)]


def read_rows(storage: tf.Variable | ShardedStorage, rows: range, device: str | None) -> tf.Tensor:
    """Read a chunk of a storage.

    Args:
        rows: the rows of the chunk, with a step of 1.
        device: the device for the result, None for the current one.
    """
    sharding = _sharding_of(storage)
    values, shard_rows = [], []
    for index, shard in enumerate(shards_of(storage)):
        places = sharding.places(index, rows)
        if len(places):
            values.append(store_of(shard).read(places))
            shard_rows.append(sharding.rows(index)[places.start : places.stop])
    with tf.device(device):
        if len(values) == 1:
            return tf.identity(values[0])
        return sharding.merge(values, shard_rows, rows.start)


def write_rows(
    storage: tf.Variable | ShardedStorage, rows: range, value: tf.Tensor, device: str | None
) -> None:
    """Write a chunk of a storage.

    Args:
        device: the device of `value`. The value is sliced there, so each ps gets only its rows.
    """
    sharding = _sharding_of(storage)
    for index, shard in enumerate(shards_of(storage)):
        places = sharding.places(index, rows)
        if not len(places) or not getattr(shard, "takes_values", True):
            continue
        taken = sharding.rows(index)[places.start : places.stop]
        with tf.device(device):
            shard_value = value[taken.start - rows.start : taken.stop - rows.start : taken.step]
        store_of(shard).write(places, shard_value)


def _sharding_of(storage: tf.Variable | ShardedStorage) -> Sharding:
    return (
        storage.sharding
        if isinstance(storage, ShardedStorage)
        else InBlocks(int(storage.shape[0]), 1)
    )
