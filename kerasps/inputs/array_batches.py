"""Batches of arrays: gathers their rows at once, instead of reading them one by one.

`from_tensor_slices` makes an element of each example, some half a microsecond for each array, and
`batch` copies it to its place. This is most of a worker's time to read small examples: 0.6 of
0.7 ms for 256 of ten arrays, and twice as much if they are shuffled. So this module replaces the
examples between the source and `batch` by their numbers, if the operations there only order and
pick examples. A number is made and moved as often as an example, but it is one small tensor. Then
one gather for each array reads the rows of a batch. The datasets yield the same elements in the
same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasps.inputs.dataset_graphs import upstream
from kerasps.runtime.devices import connected_devices

# Datasets whose elements are those of their first input, unchanged.
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
# The dtypes that `tf.gather` supports on a CPU.
_NUMBERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 bfloat16 float16 float32 float64"
_DTYPES = ("bool", "string", "complex64", "complex128", *_NUMBERS.split())
# A larger graph is not changed: importing and exporting it would take a second.
_MAX_GRAPH_BYTES = 2**28


def with_gathered_batches(graph_def: tf.compat.v1.GraphDef) -> Any:
    """Return a `GraphDef` that gathers batches of arrays; the same if it has no such batches."""
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
    """Make `graph`, which must be the default one, gather batches of arrays.

    Returns:
        True if there are any such batches.
    """
    paths = [(op, _path_to_arrays(op)) for op in graph.get_operations() if op.type in _BATCH]
    for batch, path in paths:
        if path:
            _replace(batch, _gathered(batch, *path))
    return any(path for _, path in paths)


def _path_to_arrays(batch: tf.Operation) -> list[Any]:
    """Return the operations from `from_tensor_slices` to `batch`; none if another kind is there."""
    path, op = [], batch.inputs[0].op
    while op.type in _KEEP_ELEMENTS:
        if "Shuffle" in op.type and len(op.outputs[0].consumers()) > 1:
            return []  # each of its readers gets the next order
        path.append(op)
        op = op.inputs[0].op
    is_source = op.type == "TensorSliceDataset" and not op.get_attr("is_files")
    return [op, *reversed(path)] if is_source and all(map(_has_rows, op.inputs)) else []


def _has_rows(array: tf.Tensor) -> bool:
    """Return whether the number of rows of an array is known, and they can be gathered."""
    return array.dtype.name in _DTYPES and bool(array.shape.rank) and array.shape[0] is not None


def _gathered(batch: tf.Operation, source: tf.Operation, *between: tf.Operation) -> tf.Tensor:
    """Return a dataset with the elements of `batch`, gathered from the arrays of `source`."""
    arrays = [*source.inputs]
    with tf.device(batch.device or None):
        variant = tf.data.experimental.to_variant(tf.data.Dataset.range(arrays[0].shape[0]))
        for op in between:
            variant = _of_numbers(op, variant, [])
        # The number of rows of a batch, if all batches have the same number.
        shape = tf.TensorShape(batch.get_attr("output_shapes")[0])[:1]
        variant = _of_numbers(batch, variant, shape)
        specs = (tf.TensorSpec(array.shape, array.dtype) for array in arrays)
        rows = _rows_function(tf.TensorSpec(shape, tf.int64), tuple(specs), connected_devices())
        rows.add_to_graph(batch.graph)
        # In one thread: passing each small operation to another thread takes longer than running
        # it.
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
    """Return the function that gathers rows of arrays, the same for all workers and `fit`s."""
    del connected  # in the key of the cache only

    def rows(numbers: tf.Tensor, *arrays: tf.Tensor) -> tuple[tf.Tensor, ...]:
        # `tf.gather` takes twice as long to trace.
        axis = tf.constant(0)
        return tuple(
            tf.raw_ops.GatherV2(params=array, indices=numbers, axis=axis) for array in arrays
        )

    with tf.__internal__.eager_context.eager_mode(), tf.device(None):
        return tf.function(
            rows, autograph=False, input_signature=[numbers, *arrays]
        ).get_concrete_function()


def _of_numbers(
    op: tf.Operation, variant: tf.Tensor, shape: tf.TensorShape | list[int]
) -> tf.Tensor:
    """Add an operation like `op` for elements that are numbers, with `shape`; return its output."""
    types, shapes = tf.compat.v1.AttrValue(), tf.compat.v1.AttrValue()
    types.list.type.append(tf.int64.as_datatype_enum)
    shapes.list.shape.append(tf.TensorShape(shape).as_proto())
    return _like(op, [variant, *op.inputs[1:]], output_types=types, output_shapes=shapes)


def _like(
    op: tf.Operation, inputs: Sequence[tf.Tensor], **changed: tf.compat.v1.AttrValue
) -> tf.Tensor:
    """Add an operation like `op`, with some attributes changed; return its output."""
    attributes = {name: value for name, value in op.node_def.attr.items() if name[0] != "_"}
    attributes |= changed
    (output,) = op.graph.create_op(op.type, inputs, [tf.variant], attrs=attributes).outputs
    return output


def _replace(op: tf.Operation, variant: tf.Tensor) -> None:
    """Replace the dataset `op` by another one in all operations that read it."""
    (before,) = op.outputs
    for consumer in before.consumers():
        for place, value in enumerate(consumer.inputs):
            if value is before:
                consumer._update_input(place, variant)
