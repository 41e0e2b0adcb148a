"""Bags of values along the last axis of a dense, ragged or sparse tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class Bags:
    """Values in bags.

    Attributes:
        values: the values of all bags, as a vector.
        bag_of: the number of the bag of each value.
        number: the number of bags.
        restored: puts a vector for each bag where the bag is.
    """

    values: tf.Tensor
    bag_of: tf.Tensor
    number: tf.Tensor
    restored: Callable[[tf.Tensor], tf.Tensor]


def bags_of(tensor: tf.Tensor) -> Bags:
    """Return the bags along the last axis."""
    if isinstance(tensor, tf.SparseTensor):
        return Bags(
            tensor.values,
            tensor.indices[:, 0],
            tensor.dense_shape[0],
            lambda rows: _with_axes(rows, tensor.shape[:1]),
        )
    if not isinstance(tensor, tf.RaggedTensor):
        tensor = tf.convert_to_tensor(tensor)
        axes = tf.shape(tensor)
        number = tf.reduce_prod(axes[:-1])
        return Bags(
            tf.reshape(tensor, [-1]),
            tf.repeat(tf.range(number), axes[-1]),
            number,
            lambda rows: _with_axes(
                tf.reshape(rows, tf.concat([axes[:-1], tf.shape(rows)[1:]], 0)), tensor.shape[:-1]
            ),
        )
    if tensor.flat_values.shape.rank > 1:
        inner = bags_of(tensor.flat_values)
        return Bags(
            inner.values,
            inner.bag_of,
            inner.number,
            lambda rows: tensor.with_flat_values(inner.restored(rows)),
        )
    *outer, last = tensor.nested_row_splits
    return Bags(
        tensor.flat_values,
        tensor.nested_value_rowids()[-1],
        tf.size(last) - 1,
        lambda rows: tf.RaggedTensor.from_nested_row_splits(rows, outer, validate=False),
    )


def _with_axes(rows: tf.Tensor, axes: tf.TensorShape) -> tf.Tensor:
    rows.set_shape(axes.concatenate(rows.shape[-1:]))
    return rows


def is_sparse(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is sparse. Keras says so of some symbolic ones that are not."""
    return isinstance(tensor, tf.SparseTensor)


def is_ragged(tensor: tf.Tensor) -> bool:
    """Return whether a tensor, or a symbolic one, is ragged."""
    return isinstance(tensor, tf.RaggedTensor) or bool(getattr(tensor, "ragged", False))


def are_alike(ids: tf.Tensor, weights: tf.Tensor) -> bool:
    """Return whether two tensors are of one kind, and of shapes that may be equal."""
    kinds_agree = all(kind(ids) == kind(weights) for kind in (is_sparse, is_ragged))
    shapes = tf.TensorShape(ids.shape), tf.TensorShape(weights.shape)
    return kinds_agree and shapes[0].is_compatible_with(shapes[1])


def described(tensor: tf.Tensor) -> str:
    """Return the kind and the shape of a tensor, for a message."""
    kind = "sparse" if is_sparse(tensor) else "ragged" if is_ragged(tensor) else "dense"
    return f"a {kind} tensor of shape {tuple(tensor.shape)}"
