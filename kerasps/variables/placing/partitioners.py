"""Partitioners, which choose the number of shards of a variable.

They are those of `tf.distribute.experimental.partitioners`, with limits that follow the number of
ps and leave small variables whole. TensorFlow's code computes the sizes.
"""

from __future__ import annotations

import tensorflow as tf

from kerasps.checks import count

_tensorflow = tf.distribute.experimental.partitioners

# An estimate: 64 KiB take 50 microseconds over a network of 10 Gbit/s. One more shard means one
# more read and update in each step, which cost a worker and a ps about as much. For a smaller
# variable, splitting costs more than it saves. Biases, normalization layers and kernels below
# 128 × 128 stay whole.
DEFAULT_MIN_BYTES = 64 << 10


class FixedShardsPartitioner(tf.distribute.experimental.partitioners.Partitioner):
    """Splits each variable into `num_shards` shards, at most one per row; leaves small ones whole.

    ```python
    partitioner = kerasps.FixedShardsPartitioner(num_shards=4)
    partitioner(tf.TensorShape([1_000_000, 32]), tf.float32)  # [4, 1]
    partitioner(tf.TensorShape([32]), tf.float32)  # [1]: smaller than 64 KiB
    ```

    Args:
        num_shards: the number of shards.
        min_bytes: variables of fewer bytes stay whole. Defaults to 64 KiB; with 0 it behaves as
            TensorFlow's partitioner.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: `num_shards` is below 1, or `min_bytes` below 0.

    Follows `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.
    """

    def __init__(self, num_shards: int, *, min_bytes: int = DEFAULT_MIN_BYTES) -> None:
        self._num_shards = _integer(
            "num_shards", num_shards, 1, "Pass the number of shards of each variable."
        )
        self._min_bytes = _integer(
            "min_bytes", min_bytes, 0, "Pass 0 to split variables of every size."
        )

    @property
    def num_shards(self) -> int:
        """The number of shards into which a variable is split."""
        return self._num_shards

    @property
    def min_bytes(self) -> int:
        """The number of bytes below which a variable stays whole."""
        return self._min_bytes

    def for_num_ps(self, num_ps: int) -> FixedShardsPartitioner:
        """Return the partitioner to use on a cluster with `num_ps` ps: this one."""
        del num_ps
        return self

    def __call__(self, shape: tf.TensorShape, dtype: tf.DType, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis of a variable; `axis` is the one to split."""
        shape, dtype = _known(shape), tf.as_dtype(dtype)
        if not _can_split(shape, axis) or shape.num_elements() * dtype.size < self._min_bytes:
            return [1] * shape.rank
        partition = _tensorflow.FixedShardsPartitioner(self._num_shards)
        return list(partition(shape, dtype, axis))

    def __repr__(self) -> str:
        return f"FixedShardsPartitioner(num_shards={self._num_shards}, min_bytes={self._min_bytes})"


class MinSizePartitioner(tf.distribute.experimental.partitioners.Partitioner):
    """Splits a variable into as many shards as `min_shard_bytes` and `max_shards` allow.

    Each shard has at least one row. By default there is at most one shard per ps; TensorFlow's
    default, 1, splits nothing.

    ```python
    partitioner = kerasps.MinSizePartitioner(min_shard_bytes=256 << 10).for_num_ps(4)
    partitioner(tf.TensorShape([1_000_000, 32]), tf.float32)  # [4, 1]
    partitioner(tf.TensorShape([4096, 32]), tf.float32)  # [2, 1]: 512 KiB
    ```

    Args:
        min_shard_bytes: the smallest size of a shard. Defaults to 256 KiB.
        max_shards: the largest number of shards of a variable. Defaults to one per ps, which the
            strategy fills in (`for_num_ps`).

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is below 1.

    Follows `tf.distribute.experimental.partitioners.MinSizePartitioner`.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int | None = None) -> None:
        self._min_shard_bytes = _integer(
            "min_shard_bytes", min_shard_bytes, 1, "Pass the smallest size of a shard in bytes."
        )
        self._max_shards = _max_shards(max_shards, "Pass None for one shard per ps.")

    @property
    def min_shard_bytes(self) -> int:
        """The smallest size of a shard, in bytes."""
        return self._min_shard_bytes

    @property
    def max_shards(self) -> int | None:
        """The largest number of shards of a variable; None for one per ps."""
        return self._max_shards

    def for_num_ps(self, num_ps: int) -> MinSizePartitioner:
        """Return the partitioner to use on a cluster with `num_ps` ps.

        It is this one if it has a limit of shards, else a copy with the limit `num_ps`.
        """
        num_ps = _integer("num_ps", num_ps, 1, "Pass the number of ps of the cluster.")
        return (
            self
            if self._max_shards is not None
            else MinSizePartitioner(self._min_shard_bytes, num_ps)
        )

    def __call__(self, shape: tf.TensorShape, dtype: tf.DType, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis of a variable; `axis` is the one to split."""
        shape = _known(shape)
        if self._max_shards is None:
            raise ValueError(
                "The number of ps, which limits the number of shards, is not known. Expected: a "
                "partitioner with `max_shards`, or one that `for_num_ps(num_ps)` returned, which "
                f"`kerasps.ParameterServerStrategy` calls. Received: {self!r}. Pass "
                "`max_shards`."
            )
        if not _can_split(shape, axis):
            return [1] * shape.rank
        partition = _tensorflow.MinSizePartitioner(self._min_shard_bytes, self._max_shards)
        return list(partition(shape, dtype, axis))

    def __repr__(self) -> str:
        return (
            f"MinSizePartitioner(min_shard_bytes={self._min_shard_bytes}, "
            f"max_shards={self._max_shards})"
        )


class MaxSizePartitioner(tf.distribute.experimental.partitioners.Partitioner):
    """Splits a variable into as few shards as `max_shard_bytes` allows.

    Each shard has at least one row, of whatever size.

    ```python
    partitioner = kerasps.MaxSizePartitioner(max_shard_bytes=64 << 20)
    partitioner(tf.TensorShape([1_000_000, 32]), tf.float32)  # [2, 1]: 128 MB
    partitioner(tf.TensorShape([1_000, 32]), tf.float32)  # [1, 1]
    ```

    Args:
        max_shard_bytes: the largest size of a shard.
        max_shards: the largest number of shards of a variable; it overrides `max_shard_bytes`.
            Defaults to no limit; then there may be more shards than ps.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is below 1.

    Follows `tf.distribute.experimental.partitioners.MaxSizePartitioner`.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self._max_shard_bytes = _integer(
            "max_shard_bytes", max_shard_bytes, 1, "Pass the largest size of a shard in bytes."
        )
        self._max_shards = _max_shards(max_shards, "Pass None for no limit.")

    @property
    def max_shard_bytes(self) -> int:
        """The largest size of a shard, in bytes."""
        return self._max_shard_bytes

    @property
    def max_shards(self) -> int | None:
        """The largest number of shards of a variable; None for no limit."""
        return self._max_shards

    def for_num_ps(self, num_ps: int) -> MaxSizePartitioner:
        """Return the partitioner to use on a cluster with `num_ps` ps: this one."""
        del num_ps
        return self

    def __call__(self, shape: tf.TensorShape, dtype: tf.DType, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis of a variable; `axis` is the one to split."""
        shape = _known(shape)
        if not _can_split(shape, axis):
            return [1] * shape.rank
        partition = _tensorflow.MaxSizePartitioner(self._max_shard_bytes, self._max_shards)
        return list(partition(shape, dtype, axis))

    def __repr__(self) -> str:
        return (
            f"MaxSizePartitioner(max_shard_bytes={self._max_shard_bytes}, "
            f"max_shards={self._max_shards})"
        )


def _integer(name: str, value: object, least: int, advice: str) -> int:
    return count(
        f"Argument `{name}` must be an integer of {least} or more",
        value,
        least=least,
        expected=f"{name} >= {least}",
        received=f"{name}={value!r}",
        advice=advice,
    )


def _max_shards(value: int | None, advice: str) -> int | None:
    return None if value is None else _integer("max_shards", value, 1, advice)


def _known(shape: tf.TensorShape) -> tf.TensorShape:
    shape = tf.TensorShape(shape)
    if not shape.is_fully_defined():
        raise ValueError(
            "A variable of unknown size cannot be split. Expected: a fully defined shape. "
            f"Received: shape={shape}. Give the variable a shape without None."
        )
    return shape


def _can_split(shape: tf.TensorShape, axis: int) -> bool:
    """Return whether a variable of this shape can be split.

    Scalars have no axis, and TensorFlow's partitioners fail on a size of 0. Raises ValueError if
    `axis` is not an axis of `shape`.
    """
    if shape.rank and not -shape.rank <= axis < shape.rank:
        raise ValueError(
            f"Argument `axis` must be an axis of the variable. Expected: an axis of shape {shape}. "
            f"Received: axis={axis!r}. Pass 0 to split rows."
        )
    return bool(shape.num_elements()) and bool(shape.rank)
