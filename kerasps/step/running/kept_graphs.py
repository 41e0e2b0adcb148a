"""Step graphs that outlive their model, to serve the next one like it.

A worker that runs a function across tasks registers those of its functions that other tasks run
there, under random names. TensorFlow never removes them, and frees the worker's own only where no
other task has one. So what a worker and a ps hold of a step graph cannot be freed, some megabytes
for a small model; nor the threads that read the worker's data, one for each step in it.

It can be used again. A model that is made like one that is gone leads to the same graph but for the
names in it. Those of functions and operations mean nothing to a task; those of resources are given
again once their resource is destroyed; those in messages of errors are put right when such an error
arrives (see `message_texts.py`). So models that are made in turn, as in a search or a
cross-validation, leave what one of them leaves. The second one also starts faster, since building
its step graphs is what takes a worker longest.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.runtime.fetching import fetch
from kerasps.step.running.message_texts import TEXT_ATTRIBUTES, OtherWords, texts_in

# On the coordinator, a step graph takes some 3 kB an operation.
MAX_OPERATIONS_KEPT = 50_000
# A step graph that is kept has the tensors that it captured, such as the mean and the variance of a
# `Normalization`. Those of one that captured more than this die with their model.
MAX_CAPTURED_BYTES = 2**20
# They name functions and operations.
_ATTRIBUTES_WITHOUT_MEANING = {
    "_gradient_op_type",
    "_user_specified_name",
    "forward_function_name",
    "backward_function_name",
}


@dataclass(frozen=True)
class _Kept:
    """A step graph that is kept.

    Attributes:
        step_graph: the concrete function.
        texts: the texts in its messages (see `message_texts.py`).
        size: its number of operations.
    """

    step_graph: Any
    texts: list[str]
    size: int


class KeptGraphs:
    """The step graphs that were built last, those of models that are gone among them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def shared(self, step_graph: tf.types.experimental.ConcreteFunction, words: OtherWords) -> Any:
        """Return the first step graph that does the same as this one; else this one.

        The tasks may have the first already. Thread: any, one at a time for the same `words`.

        Args:
            step_graph: a concrete function.
            words: takes the texts of the graph that is returned, and what they mean.
        """
        captured = _contents_of(step_graph.captured_inputs)
        graph_def = step_graph.graph.as_graph_def()
        if captured is None or _has_state_of_its_own(graph_def):
            return step_graph
        meaning = _Meaning(graph_def)
        key = meaning.of(step_graph, captured)
        built = _Kept(step_graph, meaning.texts, len(_nodes_of(graph_def)))
        with self._lock:
            kept = self._kept.setdefault(key, built)
            self._kept.move_to_end(key)
            while (
                len(self._kept) > 1
                and sum(entry.size for entry in self._kept.values()) > MAX_OPERATIONS_KEPT
            ):
                self._kept.popitem(last=False)
        if words.take(kept.texts, built.texts):
            return kept.step_graph
        # What it says would mean one thing here and another in the next graph.
        words.take(built.texts, built.texts)
        return step_graph


KEPT_GRAPHS = KeptGraphs()


def _contents_of(captured: Sequence[tf.Tensor]) -> list[Any] | None:
    """Return what tells the tensors that a graph captured from others; None where too little does.

    A resource may change, and belongs to its model.
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
    """Return whether the graph draws random numbers by operations that count from call to call.

    Where they have no seed they draw what nobody can foresee, also in a graph that is shared.
    """
    return any(
        "seed2" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i)
        for node in _nodes_of(graph_def)
    )


def _nodes_of(graph_def: tf.compat.v1.GraphDef) -> list[Any]:
    return [
        *graph_def.node,
        *(node for function in graph_def.library.function for node in function.node_def),
    ]


class _Meaning:
    """A digest of what a graph does; the names of operations and functions do not count.

    Nor do texts in messages, but for which of them are the same.

    Args:
        graph_def: the `GraphDef`, with the functions that it calls.

    Attributes:
        texts: the texts that it has met, in order.
    """

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self._graph_def = graph_def
        self._functions = {
            function.signature.name: function for function in graph_def.library.function
        }
        # Functions are numbered in the order in which they are met.
        self._numbers: dict[str, int] = {}
        self._digest = hashlib.sha256()
        self.texts: list[str] = []
        self._number_of_text: dict[str, int] = {}

    def of(
        self, step_graph: tf.types.experimental.ConcreteFunction, captured: Sequence[object]
    ) -> bytes:
        """Return the digest of a concrete function whose graph this is.

        Args:
            step_graph: the function.
            captured: what tells its captured tensors from others.
        """
        names: dict[str, str] = {}
        self._add_nodes(self._graph_def.node, names, [t.name for t in step_graph.outputs])
        self._add(list(captured))
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

    def _add(self, value: object) -> None:
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
        self._add_nodes(function.node_def, names, function.ret.values())
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

    def _add_nodes(
        self, nodes: Sequence[tf.compat.v1.NodeDef], names: dict[str, str], returned: Iterable[str]
    ) -> None:
        names.update({node.name: f"node{number}" for number, node in enumerate(nodes)})
        texts = texts_in(nodes, returned)
        self._add(len(nodes))
        for node in nodes:
            inputs = [_renamed(name, names) for name in node.input]
            values = [name for name in inputs if not name.startswith("^")]
            self._add((node.op, node.device, values, sorted(set(inputs) - set(values))))
            if node.name in texts:
                self._add_texts(texts[node.name])
                self._add_attributes(node.attr, names, besides={TEXT_ATTRIBUTES[node.op]})
            else:
                self._add_attributes(node.attr, names)

    def _add_texts(self, texts: list[str]) -> None:
        self.texts += texts
        self._add(
            [self._number_of_text.setdefault(text, len(self._number_of_text)) for text in texts]
        )

    def _add_attributes(
        self,
        attributes: Mapping[str, tf.compat.v1.AttrValue],
        names: dict[str, str],
        besides: Collection[str] = (),
    ) -> None:
        for key in sorted(set(attributes) - _ATTRIBUTES_WITHOUT_MEANING - set(besides)):
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
