"""Concatenates the outputs of several steps of `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def concatenated(outputs: Sequence[object]) -> Any:
    """Concatenate the outputs of several steps along the first axis, leaf by leaf.

    Arrays are new even for a single step, so that callers may write to them without changing those
    of a callback.
    """
    first, *_ = outputs
    columns = zip(*(tf.nest.flatten(step) for step in outputs), strict=True)
    leaves = [list(parts) for parts in columns]
    return tf.nest.pack_sequence_as(first, [_concatenate(parts) for parts in leaves])


def _concatenate(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, (tf.RaggedTensor, tf.SparseTensor)):
        return _joined(parts)
    if np.ndim(first) and len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    joined = _joined([tf.convert_to_tensor(part) for part in parts])
    return joined.numpy() if isinstance(joined, tf.Tensor) else joined


def _joined(tensors: Sequence[tf.Tensor]) -> Any:
    """Concatenate tensors along the first axis as Keras's private function for `predict` does.

    Dense tensors whose rows differ in shape become one ragged tensor.
    `tests/unit/test_keras_rules.py` compares the two.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, tensors)
    if isinstance(first, tf.RaggedTensor):
        return tf.concat(tensors, 0)
    row_shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(row_shapes) == 1:
        return tf.stack(tensors) if first.shape.rank == 0 else tf.concat(tensors, 0)
    # The axes behind the last one that differs in size are not ragged.
    num_same = 0
    for sizes in zip(*(reversed(shape) for shape in row_shapes), strict=True):
        if len(set(sizes)) > 1:
            break
        num_same += 1
    inner_shape = first.shape[-num_same:] if num_same else None
    values = [row for tensor in tensors for row in tensor.numpy()]
    return tf.ragged.constant(values, inner_shape=inner_shape)
