"""First rows: what a row of a table without a vocabulary is before its first update.

A first row follows from the seed of the table and the id alone. So it has the same bits on every
machine, in whatever order ids come, in a step, in one process and in an export. No operation here
is compiled by XLA, which joins multiplications and additions and so changes last bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import mixed, salt_of
from kerasps.dynamic.ids.quantiles import quantiles
from kerasps.errors import UnsupportedError

_CONSTANT, _UNIFORM, _NORMAL, _TRUNCATED = "constant", "uniform", "normal", "truncated normal"
# The bits of a random number that become a float32 in [0, 1).
_BITS = 24
# What `keras.initializers.VarianceScaling` divides by, so that a normal distribution that is cut
# at two standard deviations has the standard deviation that was asked for.
_STDDEV_OF_TRUNCATED = 0.87962566103423978


@dataclass(frozen=True)
class FirstRows:
    """Makes the first rows of ids.

    Attributes:
        kind: the distribution of the elements.
        first: the constant; the lower bound of a uniform distribution; the mean.
        second: the upper bound of a uniform distribution; the standard deviation.
        width: the number of elements of a row.
        dtype: the name of their dtype.
    """

    kind: str
    first: float
    second: float
    width: int
    dtype: str

    @classmethod
    def of(cls, initializer: Any, width: int, dtype: str) -> FirstRows:
        """Return the first rows that a Keras initializer describes.

        Args:
            initializer: one of Zeros, Ones, Constant with a number, RandomUniform, RandomNormal,
                TruncatedNormal, VarianceScaling (also Glorot, He and Lecun), whose fans are those
                of a matrix with one row: 1 and `width`. Its own seed is not used.

        Raises:
            UnsupportedError: it is another initializer.
        """
        kinds, kind = keras.initializers, type(initializer)
        if kind is kinds.Zeros:
            return cls(_CONSTANT, 0.0, 0.0, width, dtype)
        if kind is kinds.Ones:
            return cls(_CONSTANT, 1.0, 0.0, width, dtype)
        if kind is kinds.Constant and np.ndim(initializer.value) == 0:
            return cls(_CONSTANT, float(initializer.value), 0.0, width, dtype)
        if kind is kinds.RandomUniform:
            return cls(_UNIFORM, float(initializer.minval), float(initializer.maxval), width, dtype)
        if kind is kinds.RandomNormal:
            return cls(_NORMAL, float(initializer.mean), float(initializer.stddev), width, dtype)
        if kind is kinds.TruncatedNormal:
            return cls(_TRUNCATED, float(initializer.mean), float(initializer.stddev), width, dtype)
        if isinstance(initializer, kinds.VarianceScaling):
            return cls._of_scale(initializer, width, dtype)
        raise UnsupportedError(
            "A table without a vocabulary makes each first row from its id alone, which this "
            "initializer cannot do. Expected as `embeddings_initializer`: Zeros, Ones, Constant "
            "of a number, RandomUniform, RandomNormal, TruncatedNormal or VarianceScaling. "
            f"Received: {kind.__name__}. Pass one of those, such as 'uniform'."
        )

    @classmethod
    def _of_scale(cls, initializer: Any, width: int, dtype: str) -> FirstRows:
        fans = {"fan_in": 1.0, "fan_out": float(width), "fan_avg": (1.0 + width) / 2.0}
        scale = initializer.scale / max(1.0, fans[initializer.mode])
        if initializer.distribution == "uniform":
            limit = math.sqrt(3.0 * scale)
            return cls(_UNIFORM, -limit, limit, width, dtype)
        if initializer.distribution == "truncated_normal":
            return cls(_TRUNCATED, 0.0, math.sqrt(scale) / _STDDEV_OF_TRUNCATED, width, dtype)
        return cls(_NORMAL, 0.0, math.sqrt(scale), width, dtype)

    def __call__(self, ids: tf.Tensor, salts: Any) -> tf.Tensor:
        """Return the first rows of ids, of shape `[len(ids), width]`.

        Args:
            ids: an int64 vector.
            salts: the salt of the seed of the table (see `keys.salt_of`), or one for each id.
        """
        if self.kind == _CONSTANT:
            shape = tf.stack([tf.size(ids), self.width])
            number = np.array(self.first, tf.as_dtype(self.dtype).as_numpy_dtype)
            rows = tf.fill(shape, tf.constant(number))
        else:
            rows = tf.cast(self._drawn(mixed(ids + salts)), self.dtype)
        rows.set_shape([None, self.width])
        return rows

    def _drawn(self, keys: tf.Tensor) -> tf.Tensor:
        # Each 64-bit number gives two elements.
        count = (self.width + 1) // 2
        steps = np.array([salt_of(number) for number in range(count)], np.int64)
        bits = tf.bitcast(mixed(keys[:, None] + steps), tf.int32)
        bits = tf.reshape(bits, [-1, 2 * count])[:, : self.width]
        whole = tf.bitwise.bitwise_and(
            tf.bitwise.right_shift(bits, np.int32(32 - _BITS)), np.int32(2**_BITS - 1)
        )
        if self.kind == _UNIFORM:
            span = np.float32(self.second) - np.float32(self.first)
            numbers = tf.cast(whole, tf.float32)
            return numbers * np.float32(span * 2.0**-_BITS) + np.float32(self.first)
        # In the middle of each interval of (-1, 1), whose bounds have no quantile. Exact.
        numbers = tf.cast(whole - 2 ** (_BITS - 1), tf.float32) + np.float32(0.5)
        is_cut = self.kind == _TRUNCATED
        share = math.erf(2.0 / math.sqrt(2.0)) if is_cut else 1.0
        x = numbers * np.float32(share * 2.0 ** (1 - _BITS))
        return quantiles(x, self.second, has_tail=not is_cut) + np.float32(self.first)
