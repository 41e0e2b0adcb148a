"""Step graphs that outlive their model, to serve the next one like it.

A worker that runs a function across tasks registers parts of it on the other tasks, under random
names. TensorFlow never removes these parts, and frees the worker's part only if no other task has
one. So the memory of a step graph cannot be freed: some megabytes on a worker and a ps for a small
model.
The same holds for the threads that read the worker's data, one for each step in the graph.

But the graph can be used again. A model that is made like one that is gone leads to the same graph,
except for names. Names of functions and operations do not matter to a task. Names of resources are
reused once their resource is destroyed. So models that are made in turn, as in a search or a
cross-validation, leave as much as one of them leaves. The second one also starts faster, since
building step graphs takes a worker the most time.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.runtime.fetching import fetch
from kerasps.step.draws.random_operations import draws_by_seed

# A step graph takes some 3 kB an operation on the coordinator.
MAX_OPERATIONS_KEPT = 50_000
# A kept step graph keeps the tensors that it captured, such as the mean and the variance of a
# `Normalization`. A graph that captured more than this is dropped with its model.
MAX_CAPTURED_BYTES = 2**20
# They only name functions and operations.
_ATTRIBUTES_WITHOUT_MEANING = {
    "_gradient_op_type",
    "_user_specified_name",
    "forward_function_name",
    "backward_function_name",
}


@dataclass(frozen=True)
class _Kept:
    """A step graph that is kept."""

    step_graph: Any  # the concrete function
    size: int  # its number of operations


class KeptGraphs:
    """The step graphs that were built last, including those of models that are gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def shared(self, step_graph: tf.types.experimental.ConcreteFunction) -> Any:
        """Return the first step graph that does the same as this one; else this one.

        The tasks may already have the first. Thread: any.
        """
        captured = _contents_of(step_graph.captured_inputs)
        graph_def = step_graph.graph.as_graph_def()
        if captured is None or _has_state_of_its_own(graph_def):
            return step_graph
        key = _Meaning(graph_def).of(step_graph, captured)
        built = _Kept(step_graph, len(_nodes_of(graph_def)))
        with self._lock:
            kept = self._kept.setdefault(key, built)
            self._kept.move_to_end(key)
            while (
                len(self._kept) > 1
                and sum(entry.size for entry in self._kept.values()) > MAX_OPERATIONS_KEPT
            ):
                self._kept.popitem(last=False)
        return kept.step_graph


KEPT_GRAPHS = KeptGraphs()


def _contents_of(captured: Sequence[tf.Tensor]) -> list[Any] | None:
    """Return a fingerprint of the tensors that a graph captured; None if the graph is not shared.

    It is not if a tensor is too large, has no known rank, or is a resource: a resource may change,
    and belongs to its model.
    """
    if any(t.dtype in (tf.resource, tf.variant) or t.shape.rank is None for t in captured):
        return None
    if sum(t.shape.num_elements() * max(1, t.dtype.size) for t in captured) > MAX_CAPTURED_BYTES:
        return None
    return [
        (t.dtype.name, value.shape, value.tolist() if t.dtype == tf.string else value.tobytes())
        for t, value in zip(captured, map(np.asarray, fetch(captured)), strict=True)
    ]


def _has_state_of_its_own(graph_def: tf.compat.v1.GraphDef) -> bool:
    """Return True if the graph draws random numbers by seeded operations, which count their calls.

    Operations without a seed draw unpredictable numbers in any graph, shared or not.
    """
    return any(draws_by_seed(node) for node in _nodes_of(graph_def))


def _nodes_of(graph_def: tf.compat.v1.GraphDef) -> list[Any]:
    return [
        *graph_def.node,
        *(node for function in graph_def.library.function for node in function.node_def),
    ]


class _Meaning:
    """A digest of what a graph does; it ignores names of operations and functions."""

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self._graph_def = graph_def
        self._functions = {
            function.signature.name: function for function in graph_def.library.function
        }
        # Functions are numbered in the order in which the graph calls them.
        self._numbers: dict[str, int] = {}
        self._digest = hashlib.sha256()

    def of(
        self, step_graph: tf.types.experimental.ConcreteFunction, captured: Sequence[object]
    ) -> bytes:
        """Return the digest of a concrete function whose graph this is."""
        names: dict[str, str] = {}
        self._add_nodes(self._graph_def.node, names)
        self._add(list(captured))
        for tensors in (step_graph.inputs, step_graph.outputs):
            self._add([_renamed(tensor.name, names) for tensor in tensors])
        # TensorFlow's list has no fixed order.
        self._add(sorted(names[operation.name] for operation in step_graph.graph.control_outputs))
        structure = tf.nest.map_structure(lambda _: None, step_graph.structured_outputs)
        self._add(f"{step_graph.function_type}{structure}")
        # The loop grows `_numbers`: a function may call another one.
        done = 0
        while done < len(self._numbers):
            self._add_function(self._functions[list(self._numbers)[done]])
            done += 1
        return self._digest.digest()

    def _add(self, value: object) -> None:
        encoded = value if isinstance(value, bytes) else repr(value).encode()
        # The length keeps two sequences of values from giving the same bytes.
        self._digest.update(len(encoded).to_bytes(8, "little"))
        self._digest.update(encoded)

    def _add_function(self, function: Any) -> None:
        signature = function.signature
        names = {
            argument.name: f"argument{number}"
            for number, argument in enumerate(signature.input_arg)
        }
        self._add_nodes(function.node_def, names)
        self._add([(argument.type, argument.is_ref) for argument in signature.input_arg])
        self._add(
            [
                (output.type, _renamed(function.ret[output.name], names))
                for output in signature.output_arg
            ]
        )
        self._add(
            sorted(names[function.control_ret[output]] for output in signature.control_output)
        )
        self._add_attributes(function.attr, names)
        for number in sorted(function.arg_attr):
            self._add(number)
            self._add_attributes(function.arg_attr[number].attr, names)

    def _add_nodes(self, nodes: Sequence[tf.compat.v1.NodeDef], names: dict[str, str]) -> None:
        names.update({node.name: f"node{number}" for number, node in enumerate(nodes)})
        self._add(len(nodes))
        for node in nodes:
            inputs = [_renamed(name, names) for name in node.input]
            values = [name for name in inputs if not name.startswith("^")]
            self._add((node.op, node.device, values, sorted(set(inputs) - set(values))))
            self._add_attributes(node.attr, names)

    def _add_attributes(
        self, attributes: Mapping[str, tf.compat.v1.AttrValue], names: dict[str, str]
    ) -> None:
        for key in sorted(set(attributes) - _ATTRIBUTES_WITHOUT_MEANING):
            value, kind = attributes[key], attributes[key].WhichOneof("value")
            self._add((key, kind))
            called = (
                [value.func] if kind == "func" else list(value.list.func) if kind == "list" else []
            )
            for function in called:
                is_known = function.name in self._functions
                self._add(
                    self._numbers.setdefault(function.name, len(self._numbers))
                    if is_known
                    else function.name
                )
                self._add_attributes(function.attr, names)
            if key == "_class":
                self._add(
                    [
                        _renamed(entry.decode().removeprefix("loc:@"), names)
                        for entry in value.list.s
                    ]
                )
            elif not called:
                self._add(value.SerializeToString(deterministic=True))


def _renamed(name: str, names: dict[str, str]) -> str:
    """Return the name of an input, with its node renamed by `names`.

    It has the form `"node"`, `"^node"`, `"node:output"` or `"node:output:0"`.
    """
    mark = "^" if name.startswith("^") else ""
    node, colon, rest = name.removeprefix("^").partition(":")
    return f"{mark}{names.get(node, node)}{colon}{rest}"
