"""Batches of arrays: their rows are gathered at once, in place of being read one by one.

`from_tensor_slices` makes an element of each example, some half a microsecond for each array, and
`batch` copies it to its place. Most of what a worker does to read small examples is that: 0.6 of
0.7 ms for 256 of ten arrays, and twice as much where they are shuffled. The number of an example
is made and moved as often, but it is one small tensor; and one gather for each array takes the rows
of a batch. So what is between the source and `batch`, if it only orders and picks examples, is
given their numbers. What the datasets yield stays the same, in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.inputs.dataset_graphs import upstream
from kerasps.runtime.devices import connected_devices

# Datasets whose elements are those of their first input, each as it is.
_KEEP_ELEMENTS = (
    "AssertCardinalityDataset",
    "OptionsDataset",
    "PrefetchDataset",
    "RepeatDataset",
    "ShardDataset",
    "ShuffleAndRepeatDataset",
    "ShuffleAndRepeatDatasetV2",
    "ShuffleDataset",
    "ShuffleDatasetV2",
    "ShuffleDatasetV3",
    "SkipDataset",
    "TakeDataset",
)
_BATCH = ("BatchDataset", "BatchDatasetV2", "ParallelBatchDataset")
# Of the dtypes that `tf.gather` takes on a CPU.
_NUMBERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 bfloat16 float16 float32 float64"
_DTYPES = ("bool", "string", "complex64", "complex128", *_NUMBERS.split())
# A graph with more is left alone: to take it apart and put it together would take a second.
_MAX_GRAPH_BYTES = 2**28


def with_gathered_batches(graph_def: tf.compat.v1.GraphDef) -> Any:
    """Return the `GraphDef` of a dataset that gathers its batches; the same where it has none."""
    kinds = {node.op for node in graph_def.node}
    may_have_some = "TensorSliceDataset" in kinds and not kinds.isdisjoint(_BATCH)
    if not may_have_some or graph_def.ByteSize() > _MAX_GRAPH_BYTES:
        return graph_def
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        if not gather_batches(graph):
            return graph_def
        changed = graph.as_graph_def()
    returned = [node.name for node in graph_def.node if node.op == "_Retval"]
    used = upstream(changed.node, returned)
    kept = [node for node in changed.node if node.name in used]
    del changed.node[:]
    changed.node.extend(kept)
    return changed


def gather_batches(graph: tf.Graph) -> bool:
    """Make `graph`, the default one, gather batches of arrays.

    Returns whether there are any.
    """
    paths = [(op, _path_to_arrays(op)) for op in graph.get_operations() if op.type in _BATCH]
    for batch, path in paths:
        if path:
            _replace(batch, _gathered(batch, *path))
    return any(path for _, path in paths)


def _path_to_arrays(batch: tf.Operation) -> list[Any]:
    """Return the operations from `from_tensor_slices` to `batch`; none where others are there."""
    path, op = [], batch.inputs[0].op
    while op.type in _KEEP_ELEMENTS:
        if "Shuffle" in op.type and len(op.outputs[0].consumers()) > 1:
            return []  # of which each that reads it gets the next order
        path.append(op)
        op = op.inputs[0].op
    is_source = op.type == "TensorSliceDataset" and not op.get_attr("is_files")
    return [op, *reversed(path)] if is_source and all(map(_has_rows, op.inputs)) else []


def _has_rows(array: tf.Tensor) -> bool:
    """Return whether it is known how many rows an array has, and they can be gathered."""
    return array.dtype.name in _DTYPES and bool(array.shape.rank) and array.shape[0] is not None


def _gathered(batch: tf.Operation, source: tf.Operation, *between: tf.Operation) -> tf.Tensor:
    """Return what `batch` yields, as a dataset that gathers it from the arrays of `source`."""
    arrays = [*source.inputs]
    with tf.device(batch.device or None):
        variant = tf.data.experimental.to_variant(tf.data.Dataset.range(arrays[0].shape[0]))
        for op in between:
            variant = _of_numbers(op, variant, [])
        # The rows of a batch, where each has as many.
        shape = tf.TensorShape(batch.get_attr("output_shapes")[0])[:1]
        variant = _of_numbers(batch, variant, shape)
        specs = (tf.TensorSpec(array.shape, array.dtype) for array in arrays)
        rows = _rows_function(tf.TensorSpec(shape, tf.int64), tuple(specs), connected_devices())
        rows.add_to_graph(batch.graph)
        # By one thread: to hand each of its small operations to another takes longer than to do it.
        return tf.raw_ops.MapDataset(
            input_dataset=variant,
            other_arguments=arrays,
            f=rows,
            output_types=[output.dtype for output in rows.outputs],
            output_shapes=[output.shape for output in rows.outputs],
            use_inter_op_parallelism=False,
            preserve_cardinality=True,
        )


@functools.lru_cache(maxsize=64)
def _rows_function(
    numbers: tf.TensorSpec, arrays: tuple[tf.TensorSpec, ...], connected: tuple[str, ...]
) -> Any:
    """Return the function that gathers rows of arrays: one for each worker, and each call of `fit`.

    Args:
        numbers: of the numbers of the rows.
        arrays: of the arrays.
        connected: the `connected_devices()`.
    """
    del connected  # in the key of the cache only

    def rows(numbers: tf.Tensor, *arrays: tf.Tensor) -> tuple[tf.Tensor, ...]:
        # `tf.gather` takes twice as long to trace.
        axis = tf.constant(0)
        return tuple(
            tf.raw_ops.GatherV2(params=array, indices=numbers, axis=axis) for array in arrays
        )

    with _compat.eager_mode(), tf.device(None):
        return tf.function(
            rows, autograph=False, input_signature=[numbers, *arrays]
        ).get_concrete_function()


def _of_numbers(
    op: tf.Operation, variant: tf.Tensor, shape: tf.TensorShape | list[int]
) -> tf.Tensor:
    """Add an operation like `op` for elements that are numbers, of a shape; return its output."""
    types, shapes = tf.compat.v1.AttrValue(), tf.compat.v1.AttrValue()
    types.list.type.append(tf.int64.as_datatype_enum)
    shapes.list.shape.append(tf.TensorShape(shape).as_proto())
    return _like(op, [variant, *op.inputs[1:]], output_types=types, output_shapes=shapes)


def _like(
    op: tf.Operation, inputs: Sequence[tf.Tensor], **changed: tf.compat.v1.AttrValue
) -> tf.Tensor:
    """Add an operation like `op`, with other attributes in part; return its output."""
    attributes = {name: value for name, value in op.node_def.attr.items() if name[0] != "_"}
    attributes |= changed
    (output,) = op.graph.create_op(op.type, inputs, [tf.variant], attrs=attributes).outputs
    return output


def _replace(op: tf.Operation, variant: tf.Tensor) -> None:
    """Replace the dataset `op` by another one wherever it is read."""
    (before,) = op.outputs
    for consumer in before.consumers():
        for place, value in enumerate(consumer.inputs):
            if value is before:
                consumer._update_input(place, variant)
