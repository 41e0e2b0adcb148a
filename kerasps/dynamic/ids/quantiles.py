"""Quantiles of the normal distribution, whose bits are the same everywhere.

`tf.math.ndtri` computes the last elements of a vector, which do not fill a register of the
processor, by other instructions than the rest. So its bits depend on how many values come together.
Here are only operations that IEEE 754 rounds exactly.

TensorFlow's graph optimizer rewrites products of three factors with a constant, and sums likewise.
So scales are multiplied into coefficients here, and a minimum stands where two such would meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# Giles, "Approximating the erfinv function" (2012), for single precision: near 0, and in the tails.
_CENTRE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)
# `logf` of the Cephes library.
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1, -0.5),
)
# The bits of the square root of 0.5.
_ROOT = np.int32(0x3F3504F3)


def quantiles(x: tf.Tensor, scale: float, *, has_tail: bool) -> tf.Tensor:
    """Return `scale` times the quantiles at (1 + x) / 2, with an error of about 1e-6 of `scale`.

    Args:
        x: float32 between -1 and 1, both excluded.
        has_tail: some elements are beyond 0.99, or below -0.99.
    """
    scale *= math.sqrt(2.0)
    log = tf.minimum(_log((np.float32(1.0) - x) * (np.float32(1.0) + x)), np.float32(0.0))
    factor = _polynomial(_CENTRE, np.float32(-2.5) - log, scale)
    if has_tail:
        tail = _polynomial(_TAIL, tf.sqrt(-log) - np.float32(3.0), scale)
        factor = tf.where(log > np.float32(-5.0), factor, tail)
    return tf.minimum(factor, np.float32(3.4e38)) * x


def _log(values: tf.Tensor) -> tf.Tensor:
    """Return the logarithms of positive float32."""
    bits = tf.bitcast(values, tf.int32) - _ROOT
    exponent = tf.cast(tf.bitwise.right_shift(bits, np.int32(23)), tf.float32)
    mantissa = tf.bitwise.bitwise_and(bits, np.int32(2**23 - 1)) + _ROOT
    x = tf.bitcast(mantissa, tf.float32) - np.float32(1.0)
    of_mantissa = x * (np.float32(1.0) + _polynomial(_LOG, x) * x)
    return exponent * np.float32(math.log(2.0)) + of_mantissa


def _polynomial(coefficients: Sequence[float], x: tf.Tensor, scale: float = 1.0) -> tf.Tensor:
    value = tf.zeros_like(x) + np.float32(coefficients[0] * scale)
    for coefficient in coefficients[1:]:
        value = value * x + np.float32(coefficient * scale)
    return value
