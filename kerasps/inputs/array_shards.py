"""Shards of arrays: a worker slices its examples out of them, instead of skipping the others.

`Dataset.shard` reads every element of its input and keeps one of `num_shards`. If that input is
`from_tensor_slices`, skipping an element takes as long as reading it, some half a microsecond: with
n workers, each takes n times as long for an example. The shard of an array is a slice with a step,
which one operation makes.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

# Larger arrays are not sliced: each time a dataset is opened, a slice takes time and memory.
MAX_BYTES = 2**26
# The assumed size of a string.
_BYTES_OF_A_STRING = 32


def cut_arrays(dataset: tf.data.Dataset) -> None:
    """Make each `shard` of `from_tensor_slices` in a dataset read only its examples.

    The dataset yields the same elements in the same order. Call in the graph where it was made.
    """
    for op in _operations(tf.data.experimental.to_variant(dataset).op):
        if op.type == "ShardDataset" and op.inputs[0].op.type == "TensorSliceDataset":
            _cut(op)


def _operations(op: tf.Operation) -> list[Any]:
    """Return the operation that makes a dataset, and all that it depends on."""
    found, pending = {op.name: op}, [op]
    while pending:
        for tensor in pending.pop().inputs:
            if tensor.op.name not in found:
                found[tensor.op.name] = tensor.op
                pending.append(tensor.op)
    return [*found.values()]


def _cut(shard: tf.Operation) -> None:
    slices = shard.inputs[0].op
    arrays = slices.inputs
    num_shards, index = (tf.get_static_value(tensor) for tensor in shard.inputs[1:])
    if (
        num_shards is None
        or index is None
        or not 0 <= index < num_shards > 1
        or slices.get_attr("is_files")
        or shard.get_attr("require_non_empty")
        or sum(map(_num_bytes, arrays)) > MAX_BYTES
    ):
        return
    # Else a worker with a GPU would make the slice there.
    with tf.device(shard.device or None), tf.device("CPU:0"):
        piece = tf.raw_ops.TensorSliceDataset(
            components=[array[int(index) :: int(num_shards)] for array in arrays],
            output_shapes=slices.get_attr("output_shapes"),
            is_files=False,
            metadata=slices.get_attr("metadata"),
        )
        # Keep the operation, since others depend on it, and make it keep all elements of the piece.
        for place, value in enumerate([piece, tf.constant(1, tf.int64), tf.constant(0, tf.int64)]):
            shard._update_input(place, value)


def _num_bytes(array: tf.Tensor) -> float:
    """Return the size of an array; infinite if it is unknown, or if it cannot be sliced."""
    if array.dtype == tf.variant or not array.shape.is_fully_defined():
        return math.inf
    bytes_each = _BYTES_OF_A_STRING if array.dtype == tf.string else array.dtype.size
    return int(array.shape.num_elements()) * bytes_each
