"""Divides the rows of a variable into shards, and stores it as shards on several ps tasks."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.variables.rows.pooled_rows import PooledRows
from kerasps.variables.storage.tensor_like import TensorLike, new_value


@dataclass(frozen=True)
class Sharding(abc.ABC):
    """The assignment of rows (entries of the first axis) of a variable to shards."""

    num_rows: int
    num_shards: int  # the number of shards, at most `num_rows`

    @abc.abstractmethod
    def rows(self, shard: int) -> range:
        """Return the rows of a shard, in its order."""

    @abc.abstractmethod
    def merge(self, values: Sequence[tf.Tensor], rows: Sequence[range], first: int) -> tf.Tensor:
        """Return the values of contiguous rows of the variable, in order.

        Args:
            values: the values from each shard that has some of the rows.
            rows: the rows of each of `values`.
        """

    @abc.abstractmethod
    def locate(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the shard (int32) of each row id, and the row's place in it."""

    @abc.abstractmethod
    def locate_in_tables(
        self, ids: tf.Tensor, table_of: tf.Tensor, num_rows: Sequence[int]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the shard of each row id of several tables in such shards, and the place in it.

        Args:
            ids: rows, each of one table.
            table_of: the index of the table of each id.
        """

    def places(self, shard: int, rows: range) -> range:
        """Return the places in `shard` of those of `rows` that it has.

        Args:
            rows: rows of the variable, with a step of 1. In each shard such rows are contiguous.
        """
        shard_rows = self.rows(shard)
        # Both divisions round up: to the shard's first row at or after the start, and to its first
        # at or after the end. The second may be less if the shard has none of the rows.
        first = max(0, -((shard_rows.start - rows.start) // shard_rows.step))
        until = max(
            first, min(len(shard_rows), -((shard_rows.start - rows.stop) // shard_rows.step))
        )
        return range(first, until)

    def rows_in(self, value: Any, shard: int) -> Any:
        """Return the rows of `value` that are in `shard`."""
        rows = self.rows(shard)
        return value[rows.start : rows.stop : rows.step]

    def join(self, shards: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the whole value, given the values of the shards in order."""
        return self.merge(shards, [self.rows(shard) for shard in range(self.num_shards)], 0)


class InBlocks(Sharding):
    """A contiguous range of rows for each shard.

    If the rows do not divide evenly, the first shards get one more each, as in TensorFlow.
    """

    def rows(self, shard: int) -> range:
        base, extra = divmod(self.num_rows, self.num_shards)
        return range(base * shard + min(shard, extra), base * (shard + 1) + min(shard + 1, extra))

    def merge(self, values: Sequence[tf.Tensor], rows: Sequence[range], first: int) -> tf.Tensor:
        del rows, first
        return tf.concat(values, 0)

    def locate(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _locate_in_blocks(ids, *divmod(self.num_rows, self.num_shards))

    def locate_in_tables(
        self, ids: tf.Tensor, table_of: tf.Tensor, num_rows: Sequence[int]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        heights = zip(*(divmod(number, self.num_shards) for number in num_rows), strict=True)
        base, extra = (tf.gather(tf.constant(n, ids.dtype), table_of) for n in heights)
        return _locate_in_blocks(ids, base, extra)


class InTurn(Sharding):
    """The rows are dealt to the shards in turn, so that ids sorted by frequency spread evenly."""

    def rows(self, shard: int) -> range:
        return range(shard, self.num_rows, self.num_shards)

    def merge(self, values: Sequence[tf.Tensor], rows: Sequence[range], first: int) -> tf.Tensor:
        order = [tf.range(part.start - first, part.stop - first, part.step) for part in rows]
        return tf.dynamic_stitch(order, values)

    def locate(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(ids % self.num_shards, tf.int32), ids // self.num_shards

    def locate_in_tables(
        self, ids: tf.Tensor, table_of: tf.Tensor, num_rows: Sequence[int]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        del table_of, num_rows
        return self.locate(ids)


# By the argument `shard_layout`: the names of `tf.nn.embedding_lookup`'s `partition_strategy`.
LAYOUTS: dict[str, type[Sharding]] = {"div": InBlocks, "mod": InTurn}


def _locate_in_blocks(
    ids: tf.Tensor, base: int | tf.Tensor, extra: int | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the shard of each id, and its place there.

    Args:
        base: the number of rows of a shard.
        extra: the number of shards, the first ones, that have one more row.
    """
    # Each quotient is correct for shards of one height and never too high for the others, so the
    # larger of the two is correct.
    shard = tf.maximum(ids // (base + 1), (ids - extra) // base)
    return tf.cast(shard, tf.int32), tf.where(shard < extra, ids % (base + 1), (ids - extra) % base)


class ShardedStorage(TensorLike):
    """The storage of a variable as shards on ps tasks. Reading it joins the values of the shards.

    Args:
        shards: a `tf.Variable` per shard, or `PooledRows`. A whole variable that shares a storage
            with others has one shard.
    """

    def __init__(
        self, shards: Sequence[tf.Variable | PooledRows], sharding: Sharding, name: str
    ) -> None:
        self.shards = tuple(shards)
        self.sharding = sharding
        self._name = name
        # Optimizers identify a variable by it. It differs from that of the first shard, which is a
        # variable too.
        self._unique_id = f"{self.shards[0]._unique_id}_sharded"

    @property
    def name(self) -> str:
        """The name in messages."""
        return self._name

    @property
    def _shared_name(self) -> str:
        return self._name

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the elements."""
        return self.shards[0].dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole variable."""
        return tf.TensorShape([self.sharding.num_rows, *self.shards[0].shape[1:]])

    @property
    def device(self) -> str:
        """The device of the first shard."""
        return str(self.shards[0].device)

    @property
    def trainable(self) -> bool:
        """True if gradients are taken with respect to it."""
        return bool(self.shards[0].trainable)

    def read_value(self) -> tf.Tensor:
        """Return the whole value, on the current device."""
        return self.sharding.join([shard.read_value() for shard in self.shards])

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Return the rows `indices`, of shape `indices.shape + shape[1:]`; `tf.gather` calls it."""
        del name
        if len(self.shards) == 1:
            return tf.gather(self.shards[0], indices)
        flat = tf.reshape(indices, [-1])
        shard, place = self.sharding.locate(flat)
        count = len(self.shards)
        # One read per shard, of its rows only; `order` says where they go in the result.
        order = tf.dynamic_partition(tf.range(tf.size(flat)), shard, count)
        places = tf.dynamic_partition(place, shard, count)
        rows = tf.dynamic_stitch(
            order, [tf.gather(s, wanted) for s, wanted in zip(self.shards, places, strict=True)]
        )
        return tf.reshape(rows, tf.concat([tf.shape(indices), self.shape[1:]], 0))

    def assign(self, value: object, **unused: object) -> ShardedStorage:
        """Set the whole value."""
        value = new_value(self, value)
        for index, shard in enumerate(self.shards):
            shard.assign(self.sharding.rows_in(value, index), read_value=False)
        return self

    def assign_add(self, value: object, **unused: object) -> ShardedStorage:
        """Add a value of the variable's shape; atomic per shard."""
        value = new_value(self, value)
        for index, shard in enumerate(self.shards):
            shard.assign_add(self.sharding.rows_in(value, index), read_value=False)
        return self

    def assign_sub(self, value: object, **unused: object) -> ShardedStorage:
        """Subtract a value of the variable's shape; atomic per shard."""
        return self.assign_add(-new_value(self, value))

    def scatter_add(self, slices: tf.IndexedSlices) -> ShardedStorage:
        """Add slices to their rows; atomic per shard."""
        return self._scatter("scatter_add", slices)

    def scatter_sub(self, slices: tf.IndexedSlices) -> ShardedStorage:
        """Subtract slices from their rows; atomic per shard."""
        return self._scatter("scatter_sub", slices)

    def scatter_update(self, slices: tf.IndexedSlices) -> ShardedStorage:
        """Set rows to the values of slices."""
        return self._scatter("scatter_update", slices)

    def _scatter(self, method: str, slices: tf.IndexedSlices) -> ShardedStorage:
        if len(self.shards) == 1:
            getattr(self.shards[0], method)(slices)
            return self
        shard, place = self.sharding.locate(slices.indices)
        for index, target in enumerate(self.shards):
            picked = tf.where(shard == index)[:, 0]
            getattr(target, method)(
                tf.IndexedSlices(tf.gather(slices.values, picked), tf.gather(place, picked))
            )
        return self

    @property
    def watched(self) -> list[Any]:
        """The variables that a GradientTape watches for each shard: one, or a list of two."""
        return [s.watched if isinstance(s, PooledRows) else s for s in self.shards]

    def joined_gradient(self, gradients: Sequence[Any]) -> Any:
        """Return the gradient with respect to the whole, given those with respect to `watched`.

        Return None if all of them are None. `tf.IndexedSlices` of the shards become
        `tf.IndexedSlices` of the whole, whose indices are rows of the variable.
        """
        gradients = [
            shard.rows_gradient(*gradient) if isinstance(shard, PooledRows) else gradient
            for shard, gradient in zip(self.shards, gradients, strict=True)
        ]
        if all(gradient is None for gradient in gradients):
            return None
        # A dense gradient of one shard makes that of the whole dense: no type represents a mixture.
        if any(not isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            return self.sharding.join([tf.convert_to_tensor(gradient) for gradient in gradients])
        rows = [self.sharding.rows(shard) for shard in range(len(self.shards))]
        indices = [
            shard_rows.start + g.indices * shard_rows.step
            for shard_rows, g in zip(rows, gradients, strict=True)
        ]
        values = [g.values for g in gradients]
        return tf.IndexedSlices(
            tf.concat(values, 0),
            tf.concat(indices, 0),
            tf.constant(self.shape.as_list(), indices[0].dtype),
        )

    def get_shape(self) -> tf.TensorShape:
        """Return the shape, as a `tf.Variable` does; lookups in several variables call this."""
        return self.shape

    def _serialize_to_tensors(self) -> dict[str, WholeValue]:
        return {"VARIABLE_VALUE": WholeValue(self)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> ShardedStorage:
        return self.assign(restored["VARIABLE_VALUE"])

    def __repr__(self) -> str:
        return (
            f"<ShardedStorage '{self.name}' shape={self.shape} dtype={self.dtype.name} "
            f"shards={len(self.shards)}>"
        )


class WholeValue(_compat.base_class("CheckpointCallable")):  # type: ignore[misc]
    """The value of a sharded storage in a checkpoint: one tensor under one key.

    The writer of checkpoints recognises this class and writes `storage` in chunks.
    """

    def __init__(self, storage: ShardedStorage) -> None:
        super().__init__(storage.read_value, storage.dtype, storage.device)
        self.storage = storage


def shards_of(
    storage: tf.Variable | ShardedStorage | PooledRows,
) -> tuple[tf.Variable | PooledRows, ...]:
    """Return the shards of a storage; the only shard of a whole variable is that variable."""
    return storage.shards if isinstance(storage, ShardedStorage) else (storage,)


def from_start(ids: tf.Tensor, num_rows: int | tf.Tensor) -> tf.Tensor:
    """Return `ids` with negative ones, which count from the end, made to count from the start.

    Args:
        num_rows: the number of rows; a tensor of `ids`' dtype if it differs between ids.
    """
    if ids.dtype.is_unsigned:
        return ids
    # A narrower type may not hold the number of rows.
    ids = tf.cast(ids, tf.int32) if ids.dtype.size < 4 else ids
    # An id that is out of range is not changed, so that the error names it.
    return tf.where((ids < 0) & (ids >= -num_rows), ids + num_rows, ids)
