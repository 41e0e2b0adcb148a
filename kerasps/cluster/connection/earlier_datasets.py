"""Updates datasets that this process made before it connected, with the new handles of variables.

A dataset holds the handles of the variables that its functions use. The variables of this process
get new handles when it connects (`earlier_resources.py`). With the old ones, a dataset would read
one variable and assign another, and a layer that draws random numbers would draw the same ones for
each element. So each dataset whose functions use a variable is made again, from the same operation
with the same functions. It replaces the old one in the user's Python object. An iterator keeps the
old dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps import _compat

# TensorFlow's `ExternalStatePolicy.IGNORE`: state that is not in the graph is not needed here.
_IGNORE_STATE = 1


@dataclass(frozen=True)
class _Definition:
    """The operation that makes a dataset.

    Attributes:
        dataset: the Python object.
        graph: its node, with a placeholder for each tensor that it receives, and the nodes that
            compute its other inputs.
        output: the name of the dataset in the graph.
        inputs: the placeholders of the datasets that it is made from.
        captured: for each function, the placeholders of its captured inputs.
    """

    dataset: Any
    graph: Any
    output: str
    inputs: list[str]
    captured: list[list[str]]


class EarlierDatasets:
    """Makes the datasets of this process that use variables again.

    Create before this process starts its server.
    """

    def __init__(
        self,
        datasets: Sequence[tf.data.Dataset],
        variables: Sequence[tf.Tensor],
        functions: Sequence[tf.types.experimental.ConcreteFunction],
    ) -> None:
        self._functions = functions
        # Several objects may share one dataset, each with another structure of elements.
        self._objects: dict[int, list[Any]] = {}
        for dataset in datasets:
            self._objects.setdefault(id(dataset._variant_tensor_attr), []).append(dataset)
        datasets = [dataset for dataset in datasets if not _is_an_input(dataset)]
        self._by_variant = {id(dataset._variant_tensor_attr): dataset for dataset in datasets}
        self._uses: dict[int, bool] = {}
        self._variables = {id(handle) for handle in variables}
        # Referenced, so that no new object gets their `id`s.
        self._before = [dataset._variant_tensor_attr for dataset in datasets]
        self._remade: dict[int, tf.Tensor] = {}
        self._definitions: dict[int, _Definition] = {}
        # The datasets that TensorFlow cannot describe.
        self.unrecoverable: list[Any] = []
        for dataset in datasets:
            if self._uses_variables(dataset):
                try:
                    self._definitions[id(dataset)] = _definition(dataset)
                except (tf.errors.OpError, ValueError):
                    self.unrecoverable.append(dataset)

    def _uses_variables(self, dataset: tf.data.Dataset) -> bool:
        if id(dataset) not in self._uses:
            self._uses[id(dataset)] = False  # while it is being checked
            self._uses[id(dataset)] = any(map(self._uses_variables, _inputs(dataset))) or any(
                id(captured) in self._variables or self._is_of_using(captured)
                for function in _functions(dataset)
                for captured in function.captured_inputs
            )
        return self._uses[id(dataset)]

    def _is_of_using(self, captured: tf.Tensor) -> bool:
        """Return whether a tensor is a dataset that uses variables."""
        dataset = self._by_variant.get(id(captured))
        return dataset is not None and self._uses_variables(dataset)

    def remake(self, renewed: Mapping[int, tf.Tensor]) -> None:
        """Make the datasets again. Call after this process started its server."""
        for definition in list(self._definitions.values()):
            self._remake(definition.dataset, renewed)
        for function in self._functions:
            captured = function._captured_inputs
            if any(id(tensor) in self._remade for tensor in captured):
                function.set_external_captures([self._remade.get(id(t), t) for t in captured])

    def _remake(self, dataset: tf.data.Dataset, renewed: Mapping[int, tf.Tensor]) -> None:
        definition = self._definitions.pop(id(dataset), None)
        if definition is None:
            return

        def current(tensor: tf.Tensor) -> tf.Tensor:
            held = self._by_variant.get(id(tensor))
            if held is not None:
                self._remake(held, renewed)
            return self._remade.get(id(tensor), renewed.get(id(tensor), tensor))

        feeds = {
            name: current(source._variant_tensor_attr)
            for name, source in zip(definition.inputs, _inputs(dataset), strict=True)
        }
        for names, function in zip(definition.captured, _functions(dataset), strict=True):
            feeds.update(zip(names, map(current, function.captured_inputs), strict=True))

        def make(*given: tf.Tensor) -> tf.Tensor:
            fed = {f"{name}:0": tensor for name, tensor in zip(feeds, given, strict=True)}
            return tf.graph_util.import_graph_def(
                definition.graph, fed, [definition.output], name=""
            )[0]

        old = dataset._variant_tensor_attr
        try:
            new = tf.function(make, autograph=False)(*feeds.values())
        except (tf.errors.OpError, ValueError):
            self.unrecoverable.append(dataset)
        else:
            self._remade[id(old)] = new
            for alias in self._objects[id(old)]:
                alias._variant_tensor_attr = new


def _is_an_input(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset only changes the structure of elements of its input."""
    variant = dataset._variant_tensor_attr
    return any(source._variant_tensor_attr is variant for source in _inputs(dataset))


def _inputs(dataset: tf.data.Dataset) -> list[Any]:
    return [source for source in dataset._inputs() if isinstance(source, tf.data.Dataset)]


def _functions(dataset: tf.data.Dataset) -> list[Any]:
    return [wrapper.function for wrapper in dataset._functions()]


def _definition(dataset: tf.data.Dataset) -> _Definition:
    """Return the definition of a dataset.

    Raises:
        tf.errors.OpError: TensorFlow cannot describe it.
        ValueError: it was not made by one operation on its inputs.
    """
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor_attr,
        external_state_policy=_IGNORE_STATE,
        strip_device_assignment=False,
    )
    described = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes = {node.name: node for node in described.node}
    (output,) = (node.input[0] for node in described.node if node.op == "_Retval")
    made = nodes[output.partition(":")[0]]
    graph = tf.compat.v1.GraphDef(versions=described.versions, library=described.library)
    datasets: list[str] = []
    captured: list[list[str]] = []
    position = 0
    for argument in _compat.op_def_registry.get(made.op).input_arg:
        dtypes = _dtypes_of(argument, made)
        names = [f"given/{position + number}" for number in range(len(dtypes))]
        if argument.name.endswith(("other_arguments", "other_args")):
            captured.append(names)
        elif all(dtype == tf.variant.as_datatype_enum for dtype in dtypes):
            datasets += names
        else:
            names = []
        for number, name in enumerate(names):
            made.input[position + number] = name
            placeholder = graph.node.add(name=name, op="Placeholder")
            placeholder.attr["dtype"].type = dtypes[number]
        position += len(dtypes)
    if len(datasets) != len(_inputs(dataset)) or [len(names) for names in captured] != [
        len(function.captured_inputs) for function in _functions(dataset)
    ]:
        raise ValueError(f"{dataset} is not made by one operation on its inputs.")
    graph.node.extend(_upstream(made, nodes))
    return _Definition(dataset, graph, f"{made.name}:0", datasets, captured)


def _dtypes_of(argument: Any, node: tf.compat.v1.NodeDef) -> list[int]:
    """Return the dtypes of the inputs that belong to one argument of a node."""
    if argument.type_list_attr:
        return list(node.attr[argument.type_list_attr].list.type)
    dtype = node.attr[argument.type_attr].type if argument.type_attr else argument.type
    return [dtype] * (node.attr[argument.number_attr].i if argument.number_attr else 1)


def _upstream(
    node: tf.compat.v1.NodeDef, nodes: Mapping[str, tf.compat.v1.NodeDef]
) -> Iterable[Any]:
    """Return a node and those of `nodes` that its inputs depend on."""
    found: dict[str, Any] = {}
    pending = [node]
    while pending:
        current = pending.pop()
        found[current.name] = current
        names = (source.lstrip("^").partition(":")[0] for source in current.input)
        pending += [nodes[name] for name in names if name in nodes and name not in found]
    return found.values()
