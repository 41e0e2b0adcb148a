"""Makes initial values of some rows of a variable, without the other rows.

A ps that holds a shard of a variable makes only the values of its rows. They equal those of the
whole variable: Keras's initializers draw from counter-based generators, which can start anywhere.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kerasps.runtime.devices import connected_devices
from kerasps.variables.keras.keras_random import drawn_seed, fans

# Warn about whole values larger than this: with the shard, they fill the memory of a small ps.
LARGE_VALUE_BYTES = 1_000_000_000

# The size of the chunks in which random values are made. Processor time was the same within a tenth
# from 1 MB to 64 MB (2 million rows of 32 values, contiguous or every other row). The memory used
# beyond the shard is two to five times this.
CHUNK_BYTES = 8 << 20

# The amounts of numbers that TensorFlow's kernels take from Philox (`random_distributions.h`,
# `random_op_cpu.h`). One count of the counter gives four numbers of 32 bits. A truncated normal
# draws again up to a limit, so 256 numbers are reserved for each of its values.
_NUMBERS_PER_COUNT = 4
_NUMBERS_PER_TRUNCATED_NORMAL = 256
_VALUES_PER_GROUP = {"float16": 4, "bfloat16": 4, "float32": 4, "float64": 2}


class RowInitializer:
    """Makes some rows of `initializer(shape, dtype=dtype)`, on the current device.

    Create one per variable, on the coordinator, then call it once for each shard under the device
    of its ps. All shards together are one draw of the initializer: a `keras.random.SeedGenerator`
    advances once, as for a whole variable.

    Some initializers make only the wanted rows, bit for bit those of the whole: `Zeros`, `Ones`,
    `Constant`, `RandomNormal`, `RandomUniform`, `TruncatedNormal`, `VarianceScaling` and the
    classes derived from it (Glorot, He, LeCun). The fans are those of the whole shape.

    Any other initializer makes the whole value for each shard, and all but the shard's rows are
    dropped. So does a derived class that overrides `__call__`. Such an initializer must return the
    same value each time. If its attribute `seed` is a `SeedGenerator`, each call gets the same
    seeds again.

    ```python
    make_rows = RowInitializer(keras.initializers.GlorotUniform(seed=1), (1000, 16), "float32")
    with tf.device("/job:ps/task:0"):
        first_half = make_rows(range(0, 500))
    with tf.device("/job:ps/task:1"):
        odd_rows = make_rows(range(1, 1000, 2))
    ```

    Args:
        initializer: a callable of `shape` and `dtype`, such as a `keras.initializers.Initializer`.
        shape: the shape of the whole variable; one axis at least.

    Raises:
        TypeError: `initializer` cannot be called.
        ValueError: `shape` has no axis to take rows of.
    """

    def __init__(self, initializer: object, shape: Sequence[int], dtype: str) -> None:
        if not callable(initializer):
            raise TypeError(
                "Argument `initializer` cannot be called. Expected: a callable of `shape` and "
                "`dtype`, such as `keras.initializers.GlorotUniform()`. Received: "
                f"initializer={initializer!r}. `keras.initializers.get` makes one of a name or an "
                "array."
            )
        self._shape = tuple(int(size) for size in shape)
        self._dtype: str = keras.backend.standardize_dtype(dtype)
        if not self._shape:
            raise ValueError(
                "A scalar has no rows. Expected: a shape with one axis at least. Received: "
                f"shape={shape!r}. Call the initializer itself."
            )
        with tf.init_scope():
            make_rows = _constant(initializer, self._shape, self._dtype) or _random(
                initializer, self._shape, self._dtype
            )
        # True if a call makes only its rows; else it makes the whole value and drops the rest.
        self.is_exact_by_rows = make_rows is not None
        self._make_rows = make_rows or _sliced(initializer, self._shape, self._dtype)

    def __call__(self, rows: range) -> tf.Tensor:
        """Make the rows `rows` of the whole value, ascending, on the current device."""
        if rows.step < 1 or (rows and (rows[0] < 0 or rows[-1] >= self._shape[0])):
            raise ValueError(
                "Argument `rows` must name rows of the variable, in ascending order. Expected: a "
                f"range within range({self._shape[0]}) with a step of 1 or more. Received: "
                f"rows={rows!r}. Leave out rows that do not exist."
            )
        return self._make_rows(rows)

    def __repr__(self) -> str:
        return (
            f"<RowInitializer shape={self._shape} dtype={self._dtype} "
            f"is_exact_by_rows={self.is_exact_by_rows}>"
        )


_MakeRows = Callable[[range], tf.Tensor]


def _calls(initializer: object, cls: type) -> bool:
    """Return whether `initializer(...)` runs the `__call__` of `cls` and not an override."""
    return bool(type(initializer).__call__ is cls.__call__)


def _constant(
    initializer: keras.initializers.Initializer, shape: tuple[int, ...], dtype: str
) -> _MakeRows | None:
    """Return a maker of rows of a constant or a given value; None for another initializer."""
    if _calls(initializer, keras.initializers.Zeros) or _calls(
        initializer, keras.initializers.Ones
    ):
        return lambda rows: initializer((len(rows), *shape[1:]), dtype=dtype)
    if not _calls(initializer, keras.initializers.Constant):
        return None
    value = keras.ops.cast(initializer.value, dtype)
    if not _broadcasts(value.shape, shape):
        return None  # making the whole value then raises Keras's error
    by_row = len(value.shape) == len(shape) and value.shape[0] == shape[0]

    def make_rows(rows: range) -> tf.Tensor:
        part = value[rows.start : rows.stop : rows.step] if by_row else value
        return keras.initializers.Constant(part)((len(rows), *shape[1:]), dtype=dtype)

    return make_rows


def _broadcasts(shape: tf.TensorShape, to: tuple[int, ...]) -> bool:
    try:
        return bool(tf.broadcast_static_shape(shape, tf.TensorShape(to)) == to)
    except ValueError:
        return False


@dataclass(frozen=True)
class _Distribution:
    """The distribution that an initializer draws from: `kind`, times `scale`, plus `shift`."""

    kind: str
    scale: tf.Tensor
    shift: tf.Tensor


def _random(
    initializer: keras.initializers.Initializer, shape: tuple[int, ...], dtype: str
) -> _MakeRows | None:
    """Draw the seed, and return a maker of rows of random values; None for other initializers."""
    if dtype not in _VALUES_PER_GROUP:
        return None  # Keras's error says that the values are not integers
    distribution = _distribution(initializer, shape, dtype)
    if distribution is None:
        return None
    seed = drawn_seed(initializer.seed)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    # Three small arrays instead of a dozen scalars: each is sent to the ps separately.
    start = tf.concat([key, counter], 0).numpy()
    scale_and_shift = tf.stack([distribution.scale, distribution.shift]).numpy()
    row_size = math.prod(shape[1:])

    def make_rows(rows: range) -> tf.Tensor:
        # For every n-th row, the n - 1 rows between are drawn too: the generator passes them.
        generated_row_bytes = max(1, row_size * tf.as_dtype(dtype).size) * rows.step
        rows_per_chunk = max(1, CHUNK_BYTES // generated_row_bytes)
        layout = tf.constant([rows.start, rows.step, len(rows), row_size, rows_per_chunk], tf.int64)
        generate = _generator(distribution.kind, dtype, connected_devices())
        values = generate(layout, tf.constant(start), tf.constant(scale_and_shift, dtype))
        return tf.reshape(values, (len(rows), *shape[1:]))

    return make_rows


def _distribution(
    initializer: keras.initializers.Initializer, shape: tuple[int, ...], dtype: str
) -> _Distribution | None:
    # Convert each number to a tensor as Keras's `random.uniform` and `tf.random.stateless_normal`
    # do. They round differently (`tf.cast` goes through float32), and the values must be the same
    # bit for bit.
    if _calls(initializer, keras.initializers.RandomUniform):
        return _uniform(initializer.minval, initializer.maxval, dtype)
    if _calls(initializer, keras.initializers.RandomNormal):
        return _normal("Normal", initializer.mean, initializer.stddev, dtype)
    if _calls(initializer, keras.initializers.TruncatedNormal):
        return _normal("TruncatedNormal", initializer.mean, initializer.stddev, dtype)
    if not _calls(initializer, keras.initializers.VarianceScaling):
        return None
    # Some supported versions of Keras do not have these; they are None unless given.
    axes = {name: getattr(initializer, name, None) for name in ("input_axes", "output_axes")}
    fan_in, fan_out = fans(
        shape, **{name: value for name, value in axes.items() if value is not None}
    )
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2.0}[
        initializer.mode
    ]
    variance = initializer.scale / max(1.0, fan)
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return _uniform(-limit, limit, dtype)
    if initializer.distribution == "untruncated_normal":
        return _normal("Normal", 0.0, math.sqrt(variance), dtype)
    # The standard deviation of a standard normal that is truncated at -2 and 2, as Keras writes it.
    return _normal("TruncatedNormal", 0.0, math.sqrt(variance) / 0.87962566103423978, dtype)


def _uniform(minval: float, maxval: float, dtype: str) -> _Distribution | None:
    minval, maxval = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return _scalars(_Distribution("Uniform", maxval - minval, minval))


def _normal(kind: str, mean: float, stddev: float, dtype: str) -> _Distribution | None:
    mean, stddev = (
        tf.convert_to_tensor(mean, dtype=dtype),
        tf.convert_to_tensor(stddev, dtype=dtype),
    )
    return _scalars(_Distribution(kind, stddev, mean))


def _scalars(distribution: _Distribution) -> _Distribution | None:
    """Return `distribution`, or None if its mean or limits are arrays.

    Keras broadcasts arrays, so their values may differ from row to row.
    """
    return (
        distribution
        if not distribution.scale.shape.rank and not distribution.shift.shape.rank
        else None
    )


def _value_source(kind: str, dtype: str) -> Callable[..., tf.Tensor]:
    """Return a function that draws values of a distribution, from any place in their sequence on.

    The function takes the place and the number of values (both int64 scalars), and the key and the
    counter of the sequence (uint64, shape `[3]`). It returns a vector of `dtype`.
    """
    draw = {
        "Uniform": tf.raw_ops.StatelessRandomUniformV2,
        "Normal": tf.raw_ops.StatelessRandomNormalV2,
        "TruncatedNormal": tf.raw_ops.StatelessTruncatedNormalV2,
    }[kind]
    group = _VALUES_PER_GROUP[dtype]
    counts_per_group = (
        group * _NUMBERS_PER_TRUNCATED_NORMAL // _NUMBERS_PER_COUNT
        if kind == "TruncatedNormal"
        else 1
    )

    def values_from(index: tf.Tensor, size: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        # The counter has 128 bits in two halves; if the lower one wraps around, carry one.
        low, high = start[1], start[2]
        moved = low + tf.cast(index // group * counts_per_group, tf.uint64)
        counter = tf.stack([moved, high + tf.cast(moved < low, tf.uint64)])
        drop = index % group
        values = draw(
            shape=[drop + size],
            key=start[:1],
            counter=counter,
            alg=tf.random.Algorithm.PHILOX.value,
            dtype=dtype,
        )
        return values[drop:]

    return values_from


@functools.cache
def _generator(kind: str, dtype: str, connected: tuple[str, ...]) -> Any:
    """Return a function that makes rows of a distribution in chunks, for every shape and device.

    It is a graph, whose loop writes each chunk into the result in place: memory holds the result
    and a few chunks. Separate operations would hold the result three times, and with the `mod`
    layout also all rows between the shard's rows.
    """
    del connected  # in the key of the cache only
    values_from = _value_source(kind, dtype)

    def generate(layout: tf.Tensor, start: tf.Tensor, scale_and_shift: tf.Tensor) -> tf.Tensor:
        first, step, num_rows, row_size, rows_per_chunk = tf.unstack(layout)
        scale, shift = tf.unstack(scale_and_shift)

        def write_chunk(done: tf.Tensor, result: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            until = tf.minimum(done + rows_per_chunk, num_rows)
            span = (until - done - 1) * step + 1  # the rows from the first of the chunk to its last
            values = values_from((first + done * step) * row_size, span * row_size, start)
            values = tf.reshape(values, tf.stack([span, row_size]))[::step]
            result = tf.raw_ops.TensorStridedSliceUpdate(
                input=result, begin=[done], end=[until], strides=[1], value=values * scale + shift
            )
            return until, result

        result = tf.raw_ops.Empty(shape=tf.cast([num_rows, row_size], tf.int32), dtype=dtype)
        # One iteration at a time, else several chunks would be in memory.
        _, result = tf.while_loop(
            lambda done, _: done < num_rows,
            write_chunk,
            (tf.constant(0, tf.int64), result),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, None])),
            parallel_iterations=1,
        )
        return result

    signature = [
        tf.TensorSpec([5], tf.int64),
        tf.TensorSpec([3], tf.uint64),
        tf.TensorSpec([2], dtype),
    ]
    # Traced without a device, so that one graph serves every ps.
    with tf.init_scope(), tf.device(None):
        return tf.function(
            generate, autograph=False, input_signature=signature
        ).get_concrete_function()


def _sliced(
    initializer: keras.initializers.Initializer, shape: tuple[int, ...], dtype: str
) -> _MakeRows:
    """Return a maker of rows that makes the whole value in each call and drops the rest.

    Warn if the whole value has more than 1 GB.
    """
    num_bytes = math.prod(shape) * tf.as_dtype(dtype).size
    if num_bytes > LARGE_VALUE_BYTES:
        warnings.warn(
            "Each ps that holds a shard of this variable makes the whole initial value of "
            f"{num_bytes:,} bytes, and then drops the rows of the other shards. Expected: one of "
            "Keras's initializers, which can make some rows only. Received: "
            f"{_name(initializer)} for shape {shape} and dtype {dtype}. Use "
            "`keras.initializers.VarianceScaling`, "
            "`RandomNormal`, `RandomUniform` or another built-in initializer, or give each ps "
            "that much memory.",
            stacklevel=3,
        )
    seeds = None
    if isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator):
        seeds = _ReplayedSeeds(initializer.seed)
        initializer = copy.copy(initializer)
        initializer.seed = seeds

    def make_rows(rows: range) -> tf.Tensor:
        if seeds is not None:
            seeds.rewind()
        whole = keras.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype=dtype)
        if tuple(whole.shape) != shape:
            raise ValueError(
                f"The initializer {_name(initializer)} returned a value of another shape than the "
                f"variable's. Expected: {shape}. Received: {tuple(whole.shape)}. Make it return "
                "the shape that it is called with."
            )
        # A slice could share the memory of the whole value, and keep it while the variable exists.
        return tf.gather(whole, tf.range(rows.start, rows.stop, rows.step))

    return make_rows


def _name(initializer: object) -> str:
    return str(getattr(initializer, "__name__", type(initializer).__name__))


class _ReplayedSeeds(keras.random.SeedGenerator):
    """Returns the seeds of a `SeedGenerator`, and after `rewind` the same ones again."""

    def __init__(self, generator: keras.random.SeedGenerator) -> None:
        # No `super().__init__()`, which would make a variable: the state is in `generator`.
        self._generator = generator
        self._drawn: list[tf.Tensor] = []
        self._num_given = 0

    def rewind(self) -> None:
        self._num_given = 0

    def next(self, ordered: bool = True) -> tf.Tensor:
        if self._num_given == len(self._drawn):
            self._drawn.append(self._generator.next(ordered))
        self._num_given += 1
        return self._drawn[self._num_given - 1]
