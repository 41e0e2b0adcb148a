"""Step graphs that outlive their model, to serve the next one like it.

A worker that runs a function across tasks registers those of its functions that other tasks run
there, under random names. TensorFlow never removes them, and frees the worker's own only where no
other task has one. So what a worker and a ps hold of a step graph cannot be freed, some megabytes
for a small model; nor the threads that read the worker's data, one for each step in it.

It can be used again. A model that is made like one that is gone leads to the same graph but for the
names in it. Those of functions and operations mean nothing to a task; those of resources are given
again once their resource is destroyed. So models that are made in turn, as in a search or a
cross-validation, leave what one of them leaves. The second one also starts faster, since building
its step graphs is what takes a worker longest.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any

import tensorflow as tf

# On the coordinator, a step graph takes some 3 kB an operation.
MAX_OPERATIONS_KEPT = 50_000
# They name functions and operations.
_ATTRIBUTES_WITHOUT_MEANING = {
    "_gradient_op_type",
    "_user_specified_name",
    "forward_function_name",
    "backward_function_name",
}


class KeptGraphs:
    """The step graphs that were built last, those of models that are gone among them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def shared(self, step_graph: Any) -> Any:
        """Return the first step graph that does the same as this one; else this one.

        The tasks may have the first already. Thread: any.
        """
        if step_graph.captured_inputs:
            return step_graph  # by which it may differ
        graph_def = step_graph.graph.as_graph_def()
        if _has_state_of_its_own(graph_def):
            return step_graph
        key = _Meaning(graph_def).of(step_graph)
        with self._lock:
            kept, _ = self._kept.setdefault(key, (step_graph, len(_nodes_of(graph_def))))
            self._kept.move_to_end(key)
            while (
                len(self._kept) > 1
                and sum(size for _, size in self._kept.values()) > MAX_OPERATIONS_KEPT
            ):
                self._kept.popitem(last=False)
        return kept


KEPT_GRAPHS = KeptGraphs()


def _has_state_of_its_own(graph_def: Any) -> bool:
    """Return whether the graph draws random numbers by operations that count from call to call."""
    return any("seed2" in node.attr for node in _nodes_of(graph_def))


def _nodes_of(graph_def: Any) -> list[Any]:
    return [
        *graph_def.node,
        *(node for function in graph_def.library.function for node in function.node_def),
    ]


class _Meaning:
    """A digest of what a graph does; the names of operations and functions do not count.

    Args:
        graph_def: the `GraphDef`, with the functions that it calls.
    """

    def __init__(self, graph_def: Any) -> None:
        self._graph_def = graph_def
        self._functions = {
            function.signature.name: function for function in graph_def.library.function
        }
        # Functions are numbered in the order in which they are met.
        self._numbers: dict[str, int] = {}
        self._digest = hashlib.sha256()

    def of(self, step_graph: Any) -> bytes:
        """Return the digest of a concrete function whose graph this is."""
        names: dict[str, str] = {}
        self._add_nodes(self._graph_def.node, names)
        for tensors in (step_graph.inputs, step_graph.outputs):
            self._add([_renamed(tensor.name, names) for tensor in tensors])
        # TensorFlow's are in any order.
        self._add(sorted(names[operation.name] for operation in step_graph.graph.control_outputs))
        structure = tf.nest.map_structure(lambda _: None, step_graph.structured_outputs)
        self._add(f"{step_graph.function_type}{structure}")
        # A function that calls another one adds to `_numbers` while it is gone through.
        done = 0
        while done < len(self._numbers):
            self._add_function(self._functions[list(self._numbers)[done]])
            done += 1
        return self._digest.digest()

    def _add(self, value: Any) -> None:
        encoded = value if isinstance(value, bytes) else repr(value).encode()
        # With its length, so that no two sequences of values add up to the same bytes.
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

    def _add_nodes(self, nodes: Any, names: dict[str, str]) -> None:
        names.update({node.name: f"node{number}" for number, node in enumerate(nodes)})
        self._add(len(nodes))
        for node in nodes:
            inputs = [_renamed(name, names) for name in node.input]
            values = [name for name in inputs if not name.startswith("^")]
            self._add((node.op, node.device, values, sorted(set(inputs) - set(values))))
            self._add_attributes(node.attr, names)

    def _add_attributes(self, attributes: Any, names: dict[str, str]) -> None:
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
    """Return the name of an input, with what stands for the name of its node.

    It is `"node"`, `"^node"`, `"node:output"` or `"node:output:0"`.
    """
    mark = "^" if name.startswith("^") else ""
    node, colon, rest = name.removeprefix("^").partition(":")
    return f"{mark}{names.get(node, node)}{colon}{rest}"
