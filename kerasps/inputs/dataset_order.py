"""Gives a dataset the same order on all workers, by fixing the random choices in its graph.

Workers that read a whole dataset, each keeping its split of the batches, must agree on the order of
its elements. With a `shuffle` without a seed, each worker has another order. The same happens with
a pipeline that need not be deterministic. It also happens with a memory cache or a seed generator:
the graph refers to a resource of this process by name, and on a worker that name may belong to
another dataset.

This module writes these choices as constants into the graph, with holes for the seeds, which differ
from pass to pass. Numbers that a map function draws at random stay random. If such numbers select
examples (a `filter` that draws), nothing in a graph can make workers agree.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.inputs.dataset_graphs import name_of, upstream
from kerasps.inputs.written_files import (
    MARK_BYTES,
    all_nodes,
    free_mark,
    mark_names,
    names_written,
    padded,
    writers,
)

# The places of the seeds among the inputs of operations with seeds. `RandomDataset` gives the same
# numbers in each pass unless an attribute (`_VARIES`) says otherwise.
_SEED_INPUTS = {
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
    "RandomDataset": (0, 1),
    "RandomDatasetV2": (0, 1),
}
# The place of the cycle's length among the inputs; the number of parallel calls is the last one.
_CYCLE_INPUTS = {
    "ParallelInterleaveDatasetV2": -3,
    "ParallelInterleaveDatasetV3": -3,
    "ParallelInterleaveDatasetV4": -5,
}
# The attributes that say whether each pass has another order.
_VARIES = ("reshuffle_each_iteration", "rerandomize_each_iteration")
# Operations that do not look into elements: the places of their elements do not depend on numbers
# drawn at random.
_KEEP_PLACES = re.compile(
    "(Map|MapAndBatch|Scan|Batch|PaddedBatch|DenseToSparseBatch|DenseToRaggedBatch|Rebatch|Window|"
    "Prefetch|Shuffle|ShuffleAndRepeat|Repeat|Take|Skip|Shard|Zip|Concatenate|Cache|Options|"
    "AssertCardinality|AssertNext|Model|Finalize|MaxIntraOpParallelism|PrivateThreadPool)"
)
# The beginnings of the names of operations whose results differ from call to call.
_DRAWS = (
    "Random",
    "Rng",
    "Stateful",
    "Multinomial",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "SampleDistortedBoundingBox",
    "Assign",
)
_NO_DRAWS = ("StatefulPartitionedCall", "RandomIndexShuffle")
# Resources of this process that a graph refers to, and a name that no task has: with it, each
# dataset makes a new resource.
_OWN_RESOURCES = ("SeedGenerator", "MemoryCache")
_NO_RESOURCE = "kerasps: none"
# The seeds of shuffles that have none and keep their order. They are the same in all datasets of
# this process: if a dataset is shuffled and then split by `take` and `skip`, no example is in both.
_process_seeds: tuple[int, int]


def _draw_process_seeds() -> None:
    global _process_seeds
    _process_seeds = (secrets.randbits(62) + 1, secrets.randbits(62) + 1)


_draw_process_seeds()
# The seeds of shuffles before a cache in a file, if they have none: workers may have written their
# files in different runs, and must agree on the order.
_SEEDS_OF_FILES = (20261128, 44)
# A fork shuffles as any other process does.
os.register_at_fork(after_in_child=_draw_process_seeds)


@dataclass(frozen=True)
class _Hole:
    """A place in a serialized graph for a pair of seeds.

    Args:
        markers: random bytes in the graph at the places of the seeds.
        seeds: the seeds that the user gave, zeros if there are none.
        varies: whether each pass has other seeds.
        default: the seeds of all passes where it does not vary and the user gave none; None for
            those of this process.
    """

    markers: tuple[bytes, bytes]
    seeds: tuple[int, int]
    varies: bool
    default: tuple[int, int] | None = None


@dataclass
class _History:
    """The history of the passes over a dataset object."""

    passes: int = 0

    @functools.cached_property
    def entropy(self) -> int:
        """The number from which the seeds of its passes are made, if it has no seeds.

        It is drawn from Keras, so that `keras.utils.set_random_seed` makes it reproducible.
        """
        return int(keras.random.randint((), 0, 2**31 - 1))


# By the user's object: a new dataset object begins with its first pass, as in plain Keras.
_histories: weakref.WeakKeyDictionary[Any, _History] = weakref.WeakKeyDictionary()


class OrderedGraph:
    """The graph of a dataset, changed so that its elements have the same order on every worker.

    Each pass over it has different seeds, which are filled into the graph.

    Args:
        graph_def: the `GraphDef`, which is changed.
        origin: the dataset or `DatasetCreator` that it was made from, whose passes are counted.
    """

    def __init__(self, graph_def: tf.compat.v1.GraphDef, origin: object) -> None:
        self._history = _histories.setdefault(origin, _History())
        self._holes = _make_holes(graph_def)
        for nodes in all_nodes(graph_def):
            for node in nodes:
                _make_deterministic(node)
        _limit_parallel_calls(graph_def.node)
        self._files = sorted({n for nodes in all_nodes(graph_def) for n in names_written(nodes)})
        mark = os.urandom(MARK_BYTES // 2).hex().encode()
        for nodes in all_nodes(graph_def):
            mark_names(nodes, "" if nodes is graph_def.node else ":output:0", mark)
        serialized = graph_def.SerializeToString()
        # The text of the graph between the holes. Seeds and marks have a fixed length, so inserting
        # them changes no length that the format writes before a field.
        markers = [marker for hole in self._holes for marker in hole.markers]
        places = [(serialized.index(marker), number) for number, marker in enumerate(markers)]
        lengths = dict.fromkeys(range(len(markers)), 8) | {len(markers): MARK_BYTES}
        begin = serialized.find(mark)
        while begin >= 0:
            places.append((begin, len(markers)))
            begin = serialized.find(mark, begin + 1)
        self._texts, self._pieces, end = [], [number for _, number in sorted(places)], 0
        for begin, number in sorted(places):
            self._texts.append(tf.constant(serialized[end:begin]))
            end = begin + lengths[number]
        self._texts.append(tf.constant(serialized[end:]))

    @property
    def key_spec(self) -> tf.TensorSpec:
        """The `tf.TensorSpec` of the seeds of a pass."""
        return tf.TensorSpec([2 * len(self._holes)], tf.string)

    def next_key(self, epoch: int) -> tf.Tensor:
        """Return the seeds of a new pass, for `fill`; each call returns different seeds."""
        del epoch
        number = self._history.passes
        self._history.passes += 1
        seeds: list[bytes] = []
        for hole in self._holes:
            seeds += [int(seed).to_bytes(8, "little") for seed in self._seeds(hole, number)]
        return tf.constant(seeds, tf.string, [len(seeds)])

    def state(self) -> dict[str, Any]:
        """Return the state that determines the next seeds, in values that JSON can hold."""
        return {
            "passes": self._history.passes,
            # None if no pass has needed it: then it is not drawn.
            "entropy": vars(self._history).get("entropy"),
            "kept": [*_process_seeds],
        }

    def restore(self, state: dict[str, Any], *, passes_to_repeat: int) -> None:
        """Continue from `state`, but repeat the last `passes_to_repeat` passes before it first."""
        global _process_seeds
        first, second = state["kept"]
        _process_seeds = int(first), int(second)
        self._history.passes = int(state["passes"]) - passes_to_repeat
        if state["entropy"] is not None:
            self._history.entropy = int(state["entropy"])

    def _seeds(self, hole: _Hole, number: int) -> Sequence[int]:
        if not hole.varies:
            return hole.seeds if any(hole.seeds) else hole.default or _process_seeds
        if not any(hole.seeds):
            return _mixed(self._history.entropy, number)
        # The first pass uses the dataset's seeds, so one worker reads the same as plain Keras.
        return _mixed(*hole.seeds, number) if number else hole.seeds

    def fill(self, seeds: tf.Tensor, mark: tf.Tensor) -> tf.Tensor:
        """Return the serialized graph with the seeds of one pass, as a string tensor."""
        if len(self._texts) == 1:
            return self._texts[0]
        pieces = tf.unstack(seeds, num=2 * len(self._holes))
        if len(pieces) in self._pieces:
            pieces.append(padded(free_mark(self._files, mark)))
        joined = [self._texts[0]]
        for number, text in zip(self._pieces, self._texts[1:], strict=True):
            joined += [pieces[number], text]
        return tf.strings.join(joined)


def _mixed(*numbers: int) -> tuple[int, int]:
    """Return two positive seeds that depend on `numbers`."""
    entropy = [number % 2**64 for number in numbers]
    first, second = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
    return int(first >> 2) + 1, int(second >> 2) + 1


def _make_deterministic(node: tf.compat.v1.NodeDef) -> None:
    if "deterministic" in node.attr:
        node.attr["deterministic"].s = b"true"
    if "sloppy" in node.attr:
        node.attr["sloppy"].b = False
    if node.op == "Const" and node.attr["dtype"].type == tf.resource.as_datatype_enum:
        for handle in node.attr["value"].tensor.resource_handle_val:
            if any(kind in handle.name for kind in _OWN_RESOURCES):
                handle.name = _NO_RESOURCE


def _limit_parallel_calls(nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
    """Limit the parallel calls of each interleave to the length of its cycle.

    TensorFlow rejects a graph with more parallel calls than the cycle is long. TensorFlow makes
    such graphs if a cycle is as long as this process has cores.
    """
    consts = {node.name: node for node in nodes if node.op == "Const"}
    for node in nodes:
        if node.op in _CYCLE_INPUTS:
            cycle, calls = node.input[_CYCLE_INPUTS[node.op]], node.input[-1]
            if _int_value(consts[calls]) > _int_value(consts[cycle]) > 0:
                node.input[-1] = cycle


def _int_value(const: tf.compat.v1.NodeDef) -> int:
    return int(tf.make_ndarray(const.attr["value"].tensor))


# Seeds


def _make_holes(graph_def: tf.compat.v1.GraphDef) -> list[_Hole]:
    """Put a hole into the graph for each pair of seeds.

    Returns:
        The holes, in the order of their markers in the serialized graph.
    """
    # A cache keeps the elements in the order of the first pass, so the shuffles before it must not
    # vary.
    files = [node.name for node, _ in writers(graph_def.node)]
    caches = [node.name for node in graph_def.node if node.op.startswith("CacheDataset")]
    cached, filed = upstream(graph_def.node, [*caches, *files]), upstream(graph_def.node, files)
    holes: list[_Hole] = []
    for nodes in all_nodes(graph_def):
        suffix = "" if nodes is graph_def.node else ":output:0"
        consts = {node.name: node for node in nodes if node.op == "Const"}
        for node in [node for node in nodes if node.op in _SEED_INPUTS]:
            places = _SEED_INPUTS[node.op]
            given = [consts.get(name_of(node.input[place])) for place in places]
            if None in given:
                continue  # the seeds depend on elements, whose order is the same on all workers
            seeds = [_int_value(const) for const in given if const is not None]
            varies = any(node.attr[name].b for name in _VARIES if name in node.attr)
            # Random bytes, which occur nowhere else in the graph, not even in a user's constant:
            # the serialized graph is split at them.
            hole = _Hole(
                (os.urandom(8), os.urandom(8)),
                (seeds[0], seeds[1]),
                varies and node.name not in cached,
                _SEEDS_OF_FILES if varies and node.name in filed else None,
            )
            for number, (place, marker) in enumerate(zip(places, hole.markers, strict=True)):
                const = nodes.add(name=f"kerasps_seed_{len(holes)}_{number}", op="Const")
                const.attr["dtype"].type = tf.int64.as_datatype_enum
                const.attr["value"].tensor.dtype = tf.int64.as_datatype_enum
                const.attr["value"].tensor.tensor_shape.SetInParent()
                const.attr["value"].tensor.tensor_content = marker
                node.input[place] = const.name + suffix
            holes.append(hole)
    return holes


def leaves_order_open(graph_def: tf.compat.v1.GraphDef) -> bool:
    """Return whether two readers may read different elements, or the same in different orders."""
    nodes = [node for nodes in all_nodes(graph_def) for node in nodes]
    if any(
        "deterministic" in node.attr and node.attr["deterministic"].s == b"false" for node in nodes
    ):
        return True
    return not all(any(hole.seeds) for hole in _make_holes(graph_def)) or bool(
        random_choices(graph_def)
    )


# Random choices


def random_choices(graph_def: tf.compat.v1.GraphDef) -> list[str]:
    """Return the kinds of operations in a dataset's graph that select examples at random."""
    return sorted(_Draws(graph_def).choices)


class _Draws:
    """Follows numbers drawn at random through the graph of a dataset.

    `choices` are the kinds of operations whose elements depend on these numbers.
    """

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self._functions = {
            function.signature.name: function.node_def for function in graph_def.library.function
        }
        self.choices: set[str] = set()
        for nodes in all_nodes(graph_def):
            self._follow({node.name: node for node in nodes})

    def _follow(self, nodes: dict[str, tf.compat.v1.NodeDef]) -> None:
        known: dict[str, bool] = {}

        def is_random(name: str) -> bool:
            """Return whether the elements of a dataset may contain numbers drawn at random."""
            node = nodes.get(name)
            if node is None or not _is_dataset(node):
                return False
            if name not in known:
                sources = [is_random(name_of(source)) for source in node.input]
                known[name] = any(sources) or any(
                    self._draws(function) for function in _functions_of(node)
                )
            return known[name]

        for node in filter(_is_dataset, nodes.values()):
            # The first input of such a dataset is one of numbers, which select the next input.
            sources = node.input[:1] if node.op.startswith("DirectedInterleave") else node.input
            decides = any(is_random(name_of(source)) for source in sources)
            decides = decides or any(
                self._draws(function, within_datasets=False) for function in _functions_of(node)
            )
            if decides and not _KEEP_PLACES.fullmatch(_kind(node)):
                self.choices.add(node.op)

    def _draws(self, function: str, *, within_datasets: bool = True) -> bool:
        """Return whether a function draws numbers at random."""
        return any(
            _is_draw(node)
            or (
                (within_datasets or not _is_dataset(node))
                and any(
                    self._draws(inner, within_datasets=within_datasets)
                    for inner in _functions_of(node)
                )
            )
            for node in self._functions[function]
        )


def _is_dataset(node: tf.compat.v1.NodeDef) -> bool:
    return re.fullmatch(r"\w+Dataset(V\d+)?", node.op) is not None


def _kind(node: tf.compat.v1.NodeDef) -> str:
    return re.sub(r"^(Experimental|Legacy)?(Parallel)?|Dataset(V\d+)?$", "", node.op)


def _is_draw(node: tf.compat.v1.NodeDef) -> bool:
    return node.op.startswith(_DRAWS) and node.op not in _NO_DRAWS and not _is_dataset(node)


def _functions_of(node: tf.compat.v1.NodeDef) -> Iterator[str]:
    for value in node.attr.values():
        if value.func.name:
            yield value.func.name
        for function in value.list.func:
            yield function.name
