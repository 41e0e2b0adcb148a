"""`class_weight`: the weight of an example by its class, for arrays and for datasets.

The rules are those of Keras, written again because its functions are private.
`tests/unit/test_keras_rules.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def sample_weights(y: object, class_weight: Mapping[int, float]) -> np.ndarray[Any, Any]:
    """Return the weight of each example of an array.

    Args:
        y: classes, shape [examples] or [examples, 1], or one-hot vectors, [examples, classes].
        class_weight: the weight of each class; classes that are not in it have weight 1.
    """
    classes = keras.ops.convert_to_numpy(y)
    if classes.ndim > 1:
        one_hot = classes.shape[-1] != 1
        classes = np.argmax(classes, axis=-1) if one_hot else np.squeeze(classes, axis=-1)
    classes = np.round(classes).astype("int32")
    weights = [class_weight.get(int(each), 1.0) for each in classes]
    return np.array(weights, dtype=keras.config.floatx())


def weighing(class_weight: Mapping[int, float]) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a function for `tf.data.Dataset.map` that adds weights to batches."""
    table = tf.convert_to_tensor(
        [class_weight.get(each, 1.0) for each in range(max(class_weight) + 1)]
    )

    def weigh(*element: object) -> tuple[Any, Any, Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(element)
        if sample_weight is not None:
            raise ValueError(
                "Argument `class_weight` does not go with a dataset of (x, y, sample_weight). "
                "Expected: elements (x, y). Received: a third entry. Leave out one of the two."
            )
        if keras.tree.is_nested(y):
            raise ValueError(
                "Argument `class_weight` is for models with a single output. Expected: elements "
                f"(x, y) with one tensor y. Received: y of type {type(y).__name__}. Put "
                "`sample_weight` into the dataset."
            )
        return x, y, tf.gather(table, _classes(y))

    return weigh


def _classes(y: tf.Tensor) -> tf.Tensor:
    if y.shape.rank < 2:
        return tf.cast(tf.round(y), tf.int32)

    def largest() -> tf.Tensor:
        return tf.argmax(y, axis=-1, output_type=tf.int32)

    def alone() -> tf.Tensor:
        return tf.cast(tf.round(tf.squeeze(y, axis=-1)), tf.int32)

    if y.shape[-1] is None:  # each batch decides whether these are one-hot vectors
        return tf.cond(tf.shape(y)[-1] > 1, largest, alone)
    return largest() if y.shape[-1] > 1 else alone()
