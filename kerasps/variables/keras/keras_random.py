"""The seed and the scale that Keras's random initializers compute before they draw.

The rules are those of Keras, written again because its functions are private.
`tests/unit/test_keras_rules.py` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import tensorflow as tf


def drawn_seed(seed: object) -> tf.Tensor:
    """Return the seed that an initializer draws with, as TensorFlow's stateless functions take it.

    Args:
        seed: the `seed` of a Keras initializer, an integer or a `keras.random.SeedGenerator`, which
            advances.

    Returns an int32 tensor of shape [2].
    """
    if isinstance(seed, keras.random.SeedGenerator):
        pair = tf.convert_to_tensor(seed.next())
    else:
        pair = tf.constant([seed, 0], tf.int64)
    if pair.dtype == tf.int32:
        return pair
    return tf.cast(tf.math.floormod(pair, tf.int32.max - 1), tf.int32)


def fans(
    shape: Sequence[int],
    input_axes: Sequence[int] | None = None,
    output_axes: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Return the fan in and the fan out of a weight: the numbers of units that it connects.

    Args:
        input_axes: the axes of the input units. Default: by the rank, as for Keras's layers.
        output_axes: the axes of the output units. Both are used, or neither if one is None.
    """
    if input_axes is not None and output_axes is not None:
        return (
            math.prod(shape[axis] for axis in input_axes),
            math.prod(shape[axis] for axis in output_axes),
        )
    if len(shape) < 2:
        size = shape[0] if shape else 1
        return size, size
    # Each unit of a convolution sees its whole receptive field.
    field = math.prod(shape[:-2])
    return shape[-2] * field, shape[-1] * field
