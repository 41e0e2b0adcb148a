"""Names for the files that a dataset writes: each worker writes its own.

`cache` and `snapshot` write files. Two workers on one machine, or with a shared file system, that
write one cache end in TensorFlow's `AlreadyExistsError`. So each worker puts a mark behind the
names, such as `.worker-1`. A worker that was killed leaves a lock file beside its half of a cache,
and a `fit` may read a dataset that `evaluate` reads too: then the next free name is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

# The places of the names among the inputs of the datasets that write files.
WRITERS = {"CacheDataset": 1, "CacheDatasetV2": 1, "SnapshotDatasetV2": 1, "SaveDatasetV2": 1}
# A mark in a serialized graph has this many bytes, with spaces at the end: as many as its hole.
MARK_BYTES = 64
# The names of one worker that may be locked before TensorFlow's error is raised.
_MOST_LOCKED = 32


def writers(nodes: Sequence[tf.compat.v1.NodeDef]) -> list[tuple[tf.compat.v1.NodeDef, int]]:
    """Return the nodes of a graph that write files, each with the place of its name."""
    consts = {node.name: node for node in nodes if node.op == "Const"}
    found = [(node, WRITERS[node.op]) for node in nodes if node.op in WRITERS]
    return [pair for pair in found if _name_of(pair, consts) != b""]


def _name_of(
    writer: tuple[tf.compat.v1.NodeDef, int], consts: dict[str, tf.compat.v1.NodeDef]
) -> bytes | None:
    """Return the name of a writer's file; empty for a cache in memory, None if not constant."""
    node, place = writer
    const = consts.get(node.input[place].split(":")[0])
    return None if const is None else bytes(tf.make_ndarray(const.attr["value"].tensor).item())


def names_written(nodes: Sequence[tf.compat.v1.NodeDef]) -> list[bytes]:
    """Return the constant names of the files that a graph writes."""
    consts = {node.name: node for node in nodes if node.op == "Const"}
    names = [_name_of(writer, consts) for writer in writers(nodes)]
    return [name for name in names if name is not None]


def mark_names(nodes: Any, suffix: str, marker: bytes) -> bool:
    """Put a hole for a mark behind the name of each file that a graph writes.

    Args:
        nodes: the nodes of the graph, or of a function, which are changed.
        suffix: the text behind the name of a node where it is an input.
        marker: the bytes of the hole, `MARK_BYTES` of them.
    """
    found = writers(nodes)
    if not found:
        return False
    mark = nodes.add(name="kerasps_mark", op="Const")
    mark.attr["dtype"].type = tf.string.as_datatype_enum
    mark.attr["value"].tensor.dtype = tf.string.as_datatype_enum
    mark.attr["value"].tensor.tensor_shape.SetInParent()
    mark.attr["value"].tensor.string_val.append(marker)
    nodes.add(name="kerasps_stripped", op="StringStrip", input=[f"kerasps_mark{suffix}"])
    for number, (node, place) in enumerate(found):
        marked = nodes.add(name=f"kerasps_marked_{number}", op="StringJoin")
        marked.input.extend([node.input[place], f"kerasps_stripped{suffix}"])
        marked.attr["N"].i = 2
        node.input[place] = marked.name + suffix
    return True


def mark_operations(graph: tf.Graph, mark: tf.Tensor) -> None:
    """Put a mark behind the name of each file that operations of the default graph write."""
    found = [(op, WRITERS[op.type]) for op in graph.get_operations() if op.type in WRITERS]
    names = [tf.get_static_value(op.inputs[place]) for op, place in found]
    if not any(names):
        return
    free = free_mark([name for name in names if name], mark)
    for (op, place), name in zip(found, names, strict=True):
        if name != b"":
            op._update_input(place, tf.strings.join([op.inputs[place], free]))


def free_mark(names: Sequence[bytes], mark: tf.Tensor) -> tf.Tensor:
    """Return the first of `mark`, `mark.1`, `mark.2` … with which no file of `names` is locked."""
    tried = tf.strings.join([mark, tf.constant(["", *(f".{i}" for i in range(1, _MOST_LOCKED))])])
    is_locked = tf.zeros([_MOST_LOCKED], tf.bool)
    for name in names:
        pattern = tf.strings.join([_escaped(name), "*.lockfile"])
        there = tf.strings.regex_replace(tf.io.matching_files(pattern), ".*/", "")
        locks = tf.strings.join([name, tried, "_0.lockfile"])
        locks = tf.strings.regex_replace(locks, ".*/", "")
        is_locked |= tf.reduce_any(locks[:, None] == there[None, :], axis=1)
    return tried[tf.argmin(tf.cast(is_locked, tf.int32))]


def _escaped(name: bytes) -> tf.Tensor:
    """Return a name as a pattern that only it matches."""
    return tf.strings.regex_replace(name, r"([*?\[\]\\])", r"\\\1")


def padded(mark: tf.Tensor) -> tf.Tensor:
    """Return a mark with spaces behind it, as long as its hole."""
    return tf.strings.substr(tf.strings.join([mark, " " * MARK_BYTES]), 0, MARK_BYTES)


def mark_of_whole(reader: int | None, num_workers: int) -> str:
    """Return the mark of files with data that are the same on all workers.

    A single worker uses the names as they are, as plain Keras does.
    """
    return "" if num_workers == 1 else f".worker-{reader}"


def mark_of_split(split: int, reader: int, num_workers: int) -> str:
    """Return the mark of files with the data of one split, read by its own worker or another."""
    if num_workers == 1:
        return ""
    return f".split-{split}-of-{num_workers}" + ("" if reader == split else f".worker-{reader}")


def all_nodes(graph_def: tf.compat.v1.GraphDef) -> Iterator[Any]:
    """Yield the nodes of the graph, and those of each of its functions."""
    yield graph_def.node
    for function in graph_def.library.function:
        yield function.node_def
