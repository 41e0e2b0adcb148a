"""Reading and writing the storage of a variable a piece at a time, so that nobody has to hold the whole of it.

A piece is a range of rows of the whole variable, in their order, whichever shards they are in. The bytes go from the tasks that
hold them to the device that asks, or the other way round, and nowhere else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.sharding import ShardedStorage, Sharding, shards_of

# Memory is what it costs: a few pieces on the coordinator, or on each ps. A table of 1 GB is 64 pieces; each takes a few calls.
PIECE_BYTES = 16 << 20


class StoredRows(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that is in a file, of which a slice of rows can be read; whoever does anything else reads it whole.

    Args:
        dataset: a `h5py.Dataset`, or what can be sliced like one.
        dtype: the dtype of its elements, which the file may not know (bfloat16).
    """

    def __init__(self, dataset: Any, dtype: Any) -> None:
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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # what is read from a file is a copy
        return np.asarray(self[:], dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        whole = [np.asarray(value) if isinstance(value, StoredRows) else value for value in inputs]
        return getattr(ufunc, method)(*whole, **kwargs)


def row_bytes(storage: Any) -> int:
    """The bytes of a row; 1 where it has none, or the storage no rows."""
    return max(1, int(math.prod(storage.shape[1:]) * storage.dtype.size))


def num_bytes(storage: Any) -> int:
    """The bytes of the whole value."""
    return int(math.prod(storage.shape) * storage.dtype.size)


def pieces(storage: Any) -> list[range]:
    """The rows of the storage in ranges of `PIECE_BYTES` at most, as equal as possible; one row at least.

    There are as many, or a multiple, of them as there are shards, so that the n-th part of the pieces can be the work of the
    ps with the n-th shard.
    """
    num_rows, num_shards = int(storage.shape[0]), len(shards_of(storage))
    count = num_shards * math.ceil(num_bytes(storage) / num_shards / PIECE_BYTES)
    count = max(1, min(count, num_rows))
    return [range(num_rows * i // count, num_rows * (i + 1) // count) for i in range(count)]


def read_rows(storage: Any, rows: range, device: str | None) -> tf.Tensor:
    """The rows `rows` (with a step of 1) of the storage, on `device`."""
    sharding = _sharding_of(storage)
    parts, places = [], []
    for index, shard in enumerate(shards_of(storage)):
        own = sharding.places(index, rows)
        if len(own):
            with tf.device(shard.device):
                # Reading the variable would copy all of it, where an update by rows has asked for copies on reading.
                part = tf.raw_ops.ResourceGather(
                    resource=shard.handle, indices=tf.range(own.start, own.stop), dtype=shard.dtype
                )
            parts.append(part)
            places.append(sharding.rows(index)[own.start : own.stop])
    with tf.device(device):
        if len(parts) == 1:
            return tf.identity(parts[0])
        if sharding.layout == "div":
            return tf.concat(parts, 0)
        order = [tf.range(own.start - rows.start, own.stop - rows.start, own.step) for own in places]
        return tf.dynamic_stitch(order, parts)


def write_rows(storage: Any, rows: range, value: tf.Tensor, device: str | None) -> None:
    """Assigns `value`, which is on `device`, to the rows `rows` (with a step of 1) of the storage."""
    sharding = _sharding_of(storage)
    for index, shard in enumerate(shards_of(storage)):
        own = sharding.places(index, rows)
        if not len(own):
            continue
        taken = sharding.rows(index)[own.start : own.stop]
        with tf.device(device):
            part = value[taken.start - rows.start : taken.stop - rows.start : taken.step]
        with tf.device(shard.device):
            tf.raw_ops.ResourceStridedSliceAssign(ref=shard.handle, begin=[own.start], end=[own.stop], strides=[1], value=part)


def _sharding_of(storage: Any) -> Sharding:
    return storage.sharding if isinstance(storage, ShardedStorage) else Sharding(int(storage.shape[0]), 1, "div")
