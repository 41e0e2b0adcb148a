"""Keys: 64-bit integers that ids become, spread evenly over all values.

A key is the result of SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014), a bijection. So different ids of a table have different keys, and the id
is found again from the key. Arithmetic is modulo 2**64, on int64.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from kerasps.errors import InputError

_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GAMMA = 0x9E3779B97F4A7C15


def _int64(number: int) -> np.int64:
    """Return the int64 with the bits of an unsigned number."""
    return np.uint64(number % 2**64).astype(np.int64)


def salt_of(number: int) -> np.int64:
    """Return the salt of a number, such as a seed: what is added to ids before they are mixed."""
    value = (number * _GAMMA + _GAMMA) % 2**64
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = (value ^ (value >> shift)) * multiplier % 2**64
    return _int64(value ^ (value >> 31))


def mixed(values: tf.Tensor) -> tf.Tensor:
    """Return int64 values mixed, so that each bit of a result depends on all bits of its value."""
    values = _xor_shifted(values, 30) * _int64(_MULTIPLIERS[0])
    values = _xor_shifted(values, 27) * _int64(_MULTIPLIERS[1])
    return _xor_shifted(values, 31)


def unmixed(values: tf.Tensor) -> tf.Tensor:
    """Return the values whose `mixed` are given."""
    values = _un_xor_shifted(values, 31) * _int64(pow(_MULTIPLIERS[1], -1, 2**64))
    values = _un_xor_shifted(values, 27) * _int64(pow(_MULTIPLIERS[0], -1, 2**64))
    return _un_xor_shifted(values, 30)


def part_of(keys: tf.Tensor, num_parts: int) -> tf.Tensor:
    """Return the index (int32) of the part that each key belongs to."""
    return tf.cast(_shifted(keys, 33) % num_parts, tf.int32)


def halves(keys: tf.Tensor) -> tf.Tensor:
    """Return keys as an int32 vector with two elements for each."""
    return tf.reshape(tf.bitcast(keys, tf.int32), [-1])


def from_halves(values: tf.Tensor) -> tf.Tensor:
    """Return the keys whose `halves` are given."""
    return tf.bitcast(tf.reshape(values, [-1, 2]), tf.int64)


def as_ids(values: tf.Tensor) -> tf.Tensor:
    """Return ids as int64: integers as they are, strings as their 64-bit fingerprints.

    Raises:
        InputError: `values` are neither integers nor strings.
    """
    if values.dtype == tf.string:
        flat = tf.fingerprint(tf.reshape(values, [-1]))
        return tf.reshape(tf.bitcast(flat, tf.int64), tf.shape(values))
    if values.dtype == tf.uint64:
        return tf.bitcast(values, tf.int64)
    if not values.dtype.is_integer:
        raise InputError(
            "Ids of a table without a vocabulary are of another type. Expected: integers or "
            f"strings. Received: {values.dtype.name}. Convert them, such as with "
            "`keras.ops.cast(ids, 'int64')`."
        )
    return tf.cast(values, tf.int64)


def ids_of(values: ArrayLike) -> np.ndarray:
    """Return int64 ids, given a vector of integers or strings.

    Raises:
        InputError: it is no vector, or of another type.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise InputError(
            "Ids are not a vector. Expected: a list or an array of one axis. Received: an array of "
            f"shape {array.shape}. Flatten them."
        )
    return np.asarray(as_ids(tf.convert_to_tensor(array))) if array.size else np.zeros(0, np.int64)


def _shifted(values: tf.Tensor, bits: int) -> tf.Tensor:
    """Shift to the right; bits from the left are 0."""
    # Of int64, the operation repeats the sign.
    mask = _int64((1 << (64 - bits)) - 1)
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(values, np.int64(bits)), mask)


def _xor_shifted(values: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(values, _shifted(values, bits))


def _un_xor_shifted(values: tf.Tensor, bits: int) -> tf.Tensor:
    found = values
    for _ in range(64 // bits):
        found = tf.bitwise.bitwise_xor(values, _shifted(found, bits))
    return found
