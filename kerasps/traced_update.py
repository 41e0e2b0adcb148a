"""The update of one variable as a graph: traced on the whole variable, and replayed in parts elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.optimizers import slots_of
from kerasps.storage import anonymous_handle
from kerasps.updating import UpdatePhase, ValueOf, finish
from kerasps.variables import ParameterServerVariable

# What operations with effects follow from, beside all inputs: no two runs of them need be alike.
CHANCE = "chance"


class _AssignsInControlFlow(Exception):
    """Something was assigned inside a condition or a loop, from which a tensor cannot get out."""


class _WholeUpdate(UpdatePhase):
    """The phase in which a variable and its slots are tensors of the whole, and what is assigned to them is kept.

    Args:
        optimizer: the `keras.optimizers.Optimizer`.
        learning_rate: what it takes for its learning rate.
        shared: the values of its shared state, by the `id` of the variables.
        values: the values of the variable and its slots, likewise.
        path: what the variable is called in messages.
    """

    def __init__(
        self, optimizer: Any, learning_rate: tf.Tensor, shared: dict[int, tf.Tensor], values: dict[int, tf.Tensor], path: str
    ) -> None:
        super().__init__(optimizer, learning_rate, shared)
        self.assigned: set[int] = set()
        self._values = dict(values)
        self._path = path
        self._graph = tf.compat.v1.get_default_graph()

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """The whole value of `variable` as it stands."""
        if id(variable) not in self._values:
            raise UnsupportedError(
                f"Optimizer {self.optimizer.name!r} uses another variable to update '{self._path}', which is in shards. "
                f"Expected: its own slots, kept in lists parallel to the variables. Received: '{variable.path}'. Keep one "
                "slot per variable in a list, in the order of `build`'s argument."
            )
        return self._get(id(variable))

    def held(self, variable: ParameterServerVariable) -> ValueOf:
        self.current(variable)
        return ValueOf(self, variable)

    def assign_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.current(variable)
        self.assigned.add(id(variable))
        self._set(id(variable), value)

    def add_to_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.assign_held(variable, self.current(variable) + value)

    def choose(self, condition: tf.Tensor, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        before = dict(self._values)
        otherwise()
        others, self._values = self._values, before
        then()
        for key, other in others.items():
            if self._values[key] is not other:
                self._values[key] = tf.where(condition, self._values[key], other)

    def _get(self, key: int) -> tf.Tensor:
        return self._values[key]

    def _set(self, key: int, value: tf.Tensor) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise _AssignsInControlFlow
        self._values[key] = value


class _WholeUpdateInResources(_WholeUpdate):
    """The same, with values in resources of the worker, which can be assigned inside conditions and loops."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._handles = {key: anonymous_handle(value.shape, value.dtype) for key, value in self._values.items()}
        for key, value in self._values.items():
            self._set(key, value)

    def choose(self, condition: tf.Tensor, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        tf.cond(condition, then, otherwise)

    def _get(self, key: int) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=self._handles[key], dtype=self._values[key].dtype)
        value.set_shape(self._values[key].shape)
        return value

    def _set(self, key: int, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handles[key], value=value)


@dataclass(frozen=True)
class TracedUpdate:
    """All that follows clipping, for one variable, as a graph; tensors in it go by their names.

    `state` are the variable and its slots. The graph's inputs are `gradient`, `scalars` (the learning rate, the shared state
    and, where it is sent, the scale of clipping), `inputs` (of `state`, by the `id`), and `captured`, what else it refers to.
    `new` are the new values of what is assigned, by the `id`, and `difference` that of the variable less its old one. `sources`
    are the inputs that each tensor follows from, `nodes` the nodes of `graph_def`.
    """

    variable: ParameterServerVariable
    state: list[ParameterServerVariable]
    gradient: str
    scalars: list[str]
    inputs: dict[int, str]
    captured: dict[str, tf.Tensor]
    new: dict[int, tf.Tensor]
    difference: tf.Tensor
    sources: dict[str, frozenset[str]]
    nodes: dict[str, Any]
    graph_def: Any

    def has_rows(self, variable: ParameterServerVariable) -> bool:
        """Whether it is the variable, or a slot that is in shards as the variable is."""
        return bool(variable.storage.shape == self.variable.storage.shape)

    def inputs_of(self, *, rowed: bool) -> dict[str, ParameterServerVariable]:
        """Those of `state` that have the variable's rows, or the others, by the names of their inputs."""
        return {self.inputs[id(v)]: v for v in self.state if self.has_rows(v) == rowed}

    def replay(self, feeds: dict[str, tf.Tensor], wanted: Sequence[str], *, in_order: bool = False) -> list[tf.Tensor]:
        """The tensors `wanted` of the traced graph in the current graph, where `feeds` stand for others of it.

        With `in_order`, operations with effects come too, in their order; a ps has none of them to do.
        """
        part = tf.compat.v1.GraphDef(versions=self.graph_def.versions, library=self.graph_def.library)
        used: dict[str, tf.Tensor] = {}
        missing = [name for name in wanted if name not in feeds]
        found: set[str] = set()
        pending = list(missing)
        while pending:
            name = pending.pop()
            node = name.lstrip("^").split(":")[0]
            if name in feeds:
                used[name] = tf.identity(feeds[name])
            elif node not in found:
                found.add(node)
                sources = [s for s in self.nodes[node].input if in_order or not s.startswith("^")]
                pending += [s if ":" in s or s.startswith("^") else f"{s}:0" for s in sources]
                kept = part.node.add()
                kept.CopyFrom(self.nodes[node])
                del kept.input[:]
                kept.input.extend(sources)
        # What waits for a lock are the reads that it starts from.
        with tf.control_dependencies(None):
            tensors = dict(zip(missing, tf.graph_util.import_graph_def(part, used, missing, name="update"), strict=True))
        return [feeds[name] if name in feeds else tensors[name] for name in wanted]


def trace_update(
    optimizer: Any,
    variable: ParameterServerVariable,
    gradient_dtype: tf.DType,
    scalars: Sequence[tf.TensorSpec],
    shared: Sequence[ParameterServerVariable],
    *,
    clips: bool,
) -> TracedUpdate:
    """Traces the update of `variable`.

    Args:
        optimizer: the `keras.optimizers.Optimizer`.
        variable: what it updates.
        gradient_dtype: the dtype of the gradient.
        scalars: the specs of the learning rate, the shared state and, if `clips`, the scale of clipping.
        shared: the optimizer's shared state.
        clips: whether the last of `scalars` is the scale of clipping.
    """
    slots = slots_of(optimizer)[optimizer._get_variable_index(variable)]
    state = list({id(v): v for v in [variable, *slots] if isinstance(v, ParameterServerVariable)}.values())
    assigned: list[int] = []

    def update(
        phase_of: type[_WholeUpdate], gradient: tf.Tensor, scalars: list[tf.Tensor], values: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        before = {id(v): value for v, value in zip(state, values, strict=True)}
        sent = {id(v): value for v, value in zip(shared, scalars[1 : 1 + len(shared)], strict=True)}
        phase = phase_of(optimizer, scalars[0], sent, before, variable.path)
        finish(phase, variable, gradient, scalars[-1] if clips else None)
        changed = [v for v in state if id(v) in phase.assigned]
        assigned[:] = [id(v) for v in changed]
        return [*(phase.current(v) for v in changed), phase.current(variable) - before[id(variable)]]

    specs = [tf.TensorSpec(v.storage.shape, v.storage.dtype) for v in state]
    arguments = (tf.TensorSpec(specs[0].shape, gradient_dtype), list(scalars), specs)

    def trace(phase_of: type[_WholeUpdate]) -> Any:
        return tf.function(functools.partial(update, phase_of), autograph=False).get_concrete_function(*arguments)

    try:
        function = trace(_WholeUpdate)
    except _AssignsInControlFlow:
        function = trace(_WholeUpdateInResources)
    names = [tensor.name for tensor in function.inputs]
    gradient, *others = names[: len(names) - len(function.captured_inputs)]
    *new, difference = function.outputs
    graph_def = function.graph.as_graph_def()
    for node in graph_def.node:
        node.attr.pop("_class", None)  # names of nodes that a part of the graph may lack
    return TracedUpdate(
        variable=variable,
        state=state,
        gradient=gradient,
        scalars=others[: len(scalars)],
        inputs={id(v): name for v, name in zip(state, others[len(scalars) :], strict=True)},
        captured=dict(zip(names[1 + len(others) :], function.captured_inputs, strict=True)),
        new=dict(zip(assigned, new, strict=True)),
        difference=difference,
        sources=_sources(function.graph, names),
        nodes={node.name: node for node in graph_def.node},
        graph_def=graph_def,
    )


def _sources(graph: tf.Graph, inputs: Sequence[str]) -> dict[str, frozenset[str]]:
    """The names of the inputs that each tensor of a graph follows from."""
    found: dict[str, frozenset[str]] = {}
    for operation in graph.get_operations():
        sources = frozenset().union(*(found[tensor.name] for tensor in operation.inputs))
        for tensor in operation.outputs:
            if operation.type == "Placeholder":
                sources = frozenset([tensor.name])
            elif has_effects(operation):
                sources = frozenset([*inputs, CHANCE])  # a resource may hold anything
            found[tensor.name] = sources
    return found


def has_effects(operation: tf.Operation) -> bool:
    """Whether an operation may do more than its results say."""
    return operation.op_def is None or bool(operation.op_def.is_stateful)
