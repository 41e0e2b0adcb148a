"""Executions that outlive their model, to serve the next one like it.

A worker that runs a function across tasks registers the parts of other tasks there, under random names. TensorFlow never
removes them, and frees the worker's own part only where no other task has one. So what a worker and a ps hold of an execution
cannot be freed, some megabytes for a small model; nor the threads that read the worker's data, one for each step in it.
It can be used again. A model that is made like one that is gone leads to the same graph but for the names in it. Those of
functions and operations mean nothing to a task; those of resources are given again once their resource is destroyed.
So models that are made in turn, as in a search or a cross-validation, leave what one of them leaves. The second one also
starts faster, since building its executions is what takes a worker longest.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import threading
import uuid
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import tensorflow as tf

# On the coordinator, an execution that is kept holds its graph: some 3 kB an operation.
MAX_OPERATIONS_KEPT = 50_000
# They name functions and operations.
_ATTRIBUTES_WITHOUT_MEANING = {
    "_gradient_op_type",
    "_user_specified_name",
    "forward_function_name",
    "backward_function_name",
}


class Names:
    """Names of resources, given again when their resources are gone: the same ones to who asks for the same kinds in turn."""

    def __init__(self) -> None:
        # Reentrant: Python may collect a variable, and give back its name, in the middle of anything.
        self._lock = threading.RLock()
        self._prefix = self._new_prefix()
        self._numbers = itertools.count()
        self._free: dict[Hashable, list[tuple[int, str]]] = {}

    @staticmethod
    def _new_prefix() -> str:
        return f"kerasps/{uuid.uuid4().hex}/"

    def take(self, kind: Hashable) -> str:
        """A name that no resource has, in this process or another; for a resource of this kind."""
        with self._lock:
            free = self._free.get(kind)
            if free:
                return heapq.heappop(free)[1]
            return f"{self._prefix}{next(self._numbers)}"

    def give_back(self, kind: Hashable, name: str) -> None:
        """Takes note that the resource of this name is destroyed on every task, and that no step in flight uses it."""
        with self._lock:
            if name.startswith(self._prefix):
                heapq.heappush(self._free.setdefault(kind, []), (int(name.removeprefix(self._prefix)), name))

    def retire(self) -> None:
        """Gives none of the names again that were given until now: a step may still be on its way that uses them.

        Call when a worker was lost, or steps in flight were given up.
        """
        with self._lock:
            self._prefix = self._new_prefix()
            self._free.clear()


NAMES = Names()


class _Calls(threading.local):
    """Of the current thread: whether a call to a task has been done when it returns."""

    are_waited_for = True


CALLS = _Calls()


class Executions:
    """The executions that were built last, those of models that are gone among them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def shared(self, execution: Any) -> Any:
        """The first execution that does the same as this one, whose parts the tasks may have already; else this one."""
        if execution.captured_inputs:
            return execution  # by which it may differ
        graph = execution.graph.as_graph_def()
        if _has_state_of_its_own(graph):
            return execution
        key = _Meaning(graph).of(execution)
        with self._lock:
            kept, _ = self._kept.setdefault(key, (execution, len(_nodes_of(graph))))
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > MAX_OPERATIONS_KEPT:
                self._kept.popitem(last=False)
        return kept


EXECUTIONS = Executions()


def _has_state_of_its_own(graph: Any) -> bool:
    """Whether the graph draws random numbers by operations that count on from call to call."""
    return any("seed2" in node.attr for node in _nodes_of(graph))


def _nodes_of(graph: Any) -> list[Any]:
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]


class _Meaning:
    """A digest of what a graph does: the same for two that differ in the names of operations and functions alone.

    Args:
        graph: the `GraphDef`, with the functions that it calls.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._functions = {function.signature.name: function for function in graph.library.function}
        # Functions are numbered in the order in which they are met.
        self._numbers: dict[str, int] = {}
        self._digest = hashlib.sha256()

    def of(self, execution: Any) -> bytes:
        """The digest of `execution`, a concrete function whose graph this is."""
        names: dict[str, str] = {}
        self._add_nodes(self._graph.node, names)
        for tensors in (execution.inputs, execution.outputs):
            self._add([_renamed(tensor.name, names) for tensor in tensors])
        self._add(
            sorted(names[operation.name] for operation in execution.graph.control_outputs)
        )  # TensorFlow's are in any order
        structure = tf.nest.map_structure(lambda _: None, execution.structured_outputs)
        self._add(f"{execution.function_type}{structure}")
        done = 0
        while done < len(self._numbers):
            self._add_function(self._functions[list(self._numbers)[done]])
            done += 1
        return self._digest.digest()

    def _add(self, part: Any) -> None:
        encoded = part if isinstance(part, bytes) else repr(part).encode()
        self._digest.update(len(encoded).to_bytes(8, "little"))
        self._digest.update(encoded)

    def _add_function(self, function: Any) -> None:
        signature = function.signature
        names = {argument.name: f"argument{number}" for number, argument in enumerate(signature.input_arg)}
        self._add_nodes(function.node_def, names)
        self._add([(argument.type, argument.is_ref) for argument in signature.input_arg])
        self._add([(output.type, _renamed(function.ret[output.name], names)) for output in signature.output_arg])
        self._add(sorted(names[function.control_ret[output]] for output in signature.control_output))
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
            called = [value.func] if kind == "func" else list(value.list.func) if kind == "list" else []
            for function in called:
                is_known = function.name in self._functions
                self._add(self._numbers.setdefault(function.name, len(self._numbers)) if is_known else function.name)
                self._add_attributes(function.attr, names)
            if key == "_class":
                self._add([_renamed(entry.decode().removeprefix("loc:@"), names) for entry in value.list.s])
            elif not called:
                self._add(value.SerializeToString(deterministic=True))


def _renamed(name: str, names: dict[str, str]) -> str:
    """The name of an input (`"node"`, `"^node"`, `"node:output"`, `"node:output:0"`), with what stands for the node's own."""
    mark = "^" if name.startswith("^") else ""
    node, colon, rest = name.removeprefix("^").partition(":")
    return f"{mark}{names.get(node, node)}{colon}{rest}"
