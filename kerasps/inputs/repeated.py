"""Finds the pass in the graph of a dataset that repeats without end.

Workers that read splits of endless data do so at their pace, and see their parts at different
rates. If the input ends with each pass instead, all examples are seen before any is seen again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import tensorflow as tf

from kerasps.inputs.dataset_graphs import name_of, upstream
from kerasps.inputs.written_files import all_nodes, writers

# Operations after `repeat` whose elements come from one element each, whatever came before it.
_ONE_TO_ONE = re.compile(
    "((Parallel)?Map|Prefetch|Options|Model|MaxIntraOpParallelism|PrivateThreadPool)Dataset(V\\d+)?"
)
_BATCH = re.compile("(Parallel)?BatchDataset(V\\d+)?")
# Operations that remember something from one pass to the next, or whose service ends with a pass.
_KEEP_STATE = re.compile(
    "CacheDataset.*|DataServiceDataset.*|Assign.*|Rng.*|Stateful(?!PartitionedCall).*"
)
# The attributes of an operation that draws random numbers: it restarts with the dataset that calls
# it, unless all of them are 0.
_SEEDS = ("seed", "seed2")


def one_pass(
    graph_def: tf.compat.v1.GraphDef, num_workers: int
) -> tuple[tf.compat.v1.GraphDef, int] | None:
    """Return the graph of one pass over a dataset, and the number of its elements.

    The number is `tf.data.UNKNOWN_CARDINALITY` if the dataset does not know it.

    Returns:
        None if the dataset is not known to repeat without end, if a pass has fewer elements than
        there are workers, or if a pass that is begun by itself might differ from one that follows
        another: with a cache, with random numbers from seeds, or with batches of two passes.
    """
    nodes = {node.name: node for node in graph_def.node}
    (returned,) = (node for node in graph_def.node if node.op == "_Retval")
    after, node = returned, nodes[name_of(returned.input[0])]
    batches: list[int] = []
    while _ONE_TO_ONE.fullmatch(node.op) or _BATCH.fullmatch(node.op):
        if _BATCH.fullmatch(node.op):
            batches.append(_value(nodes, node.input[1]))
        after, node = node, nodes[name_of(node.input[0])]
    if node.op != "RepeatDataset" or _value(nodes, node.input[1]) >= 0:
        return None
    if _keeps_state(graph_def) or writers(graph_def.node):
        return None
    length = _cardinality(graph_def, node.input[0])
    for size in reversed(batches):
        if length < 0 or length % size:
            return None
        length //= size
    if length < num_workers and length != tf.data.UNKNOWN_CARDINALITY:
        return None
    single = tf.compat.v1.GraphDef()
    single.CopyFrom(graph_def)
    for copy in single.node:
        if copy.name == after.name:
            copy.input[0] = node.input[0]
    _keep_upstream(single, returned.name)
    return single, length


def _value(nodes: dict[str, tf.compat.v1.NodeDef], source: str) -> int:
    return int(tf.make_ndarray(nodes[name_of(source)].attr["value"].tensor))


def _keeps_state(graph_def: tf.compat.v1.GraphDef) -> bool:
    every: Iterable[tf.compat.v1.NodeDef] = (n for nodes in all_nodes(graph_def) for n in nodes)
    return any(
        _KEEP_STATE.fullmatch(node.op)
        or any(name in node.attr and node.attr[name].i for name in _SEEDS)
        for node in every
    )


def _cardinality(graph_def: tf.compat.v1.GraphDef, source: str) -> int:
    """Return the number of elements of a dataset within a graph, from which it is made here."""
    part = tf.compat.v1.GraphDef()
    part.CopyFrom(graph_def)
    for node in part.node:
        if node.op == "_Retval":
            node.input[0] = source
            _keep_upstream(part, node.name)
            break
    variant = tf.raw_ops.DatasetFromGraph(graph_def=part.SerializeToString())
    return int(tf.raw_ops.DatasetCardinality(input_dataset=variant))


def _keep_upstream(graph_def: tf.compat.v1.GraphDef, name: str) -> None:
    kept = upstream(graph_def.node, [name])
    for index in reversed(range(len(graph_def.node))):
        if graph_def.node[index].name not in kept:
            del graph_def.node[index]
