"""Converts a batch to the examples that metrics add up: labels, predictions and weights."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf
from keras import ops


class Examples(NamedTuple):
    """Labels, predictions and weights of a batch, all of one shape and in float64."""

    labels: tf.Tensor
    predictions: tf.Tensor
    weights: tf.Tensor


def as_examples(
    name: str, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None
) -> Examples:
    """Return a batch in one shape, in float64.

    In float32 the logarithm of a number depends on its place in the batch: TensorFlow computes the
    last few numbers differently from those that fill vectors of the processor.
    """
    predictions = squeezed(ops.convert_to_tensor(y_pred))
    labels = squeezed(ops.convert_to_tensor(y_true))
    check_shapes(name, "y_true", labels, predictions)
    if sample_weight is None:
        weights = ops.ones_like(predictions, dtype="float64")
    else:
        weights = ops.convert_to_tensor(sample_weight)
        if len(weights.shape) > len(predictions.shape):
            weights = squeezed(weights)
        while 0 < len(weights.shape) < len(predictions.shape):
            weights = ops.expand_dims(weights, -1)
        if len(weights.shape) > 0:
            check_shapes(name, "sample_weight", weights, predictions, broadcasts=True)
        weights = ops.broadcast_to(ops.cast(weights, "float64"), ops.shape(predictions))
    return Examples(ops.cast(labels, "float64"), ops.cast(predictions, "float64"), weights)


def squeezed(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor of shape (n, 1) as one of shape (n,)."""
    shape = tensor.shape
    return ops.squeeze(tensor, -1) if len(shape) > 1 and shape[-1] == 1 else tensor


def check_shapes(
    name: str, argument: str, tensor: tf.Tensor, predictions: tf.Tensor, broadcasts: bool = False
) -> None:
    """Check that `tensor` has a value for each prediction; unknown sizes match any size."""
    fits = len(tensor.shape) == len(predictions.shape) and all(
        None in (size, expected) or size == expected or (broadcasts and size == 1)
        for size, expected in zip(tensor.shape, predictions.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"Arguments of the metric `{name}` have shapes that do not go together. Expected: a "
            f"value of `{argument}` for each prediction, of shape {predictions.shape}. Received: "
            f"shape {tensor.shape}. Give both in shape (n,) or (n, 1)."
        )
