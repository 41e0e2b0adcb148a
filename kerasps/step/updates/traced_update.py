"""The update of one variable as a graph: traced on the whole variable, replayed in cuts elsewhere.

`update_cut.py` assigns the operations to tasks; `coupled.py` makes each task replay its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.records.packing import filled, leaves_of
from kerasps.step.updates.updating import Scalars, UpdatePhase, ValueOf, finish
from kerasps.variables import ParameterServerVariable, anonymous_handle, slots_of

# A source of operations with effects, besides all inputs: two runs of them may differ.
CHANCE = "chance"


class _AssignsInControlFlow(Exception):
    """A value was assigned inside a condition or a loop, from which a tensor cannot get out."""


class _WholeUpdate(UpdatePhase):
    """The phase in which a variable and its slots are whole tensors, and assignments are kept.

    Args:
        optimizer: the `keras.optimizers.Optimizer`.
        scalars: its learning rate and shared state.
        shared: the variables of the shared state.
        values: the values of the variable and its slots.
        path: the name of the variable in messages.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        scalars: Scalars,
        shared: list[ParameterServerVariable],
        values: ByIdentity[ParameterServerVariable, tf.Tensor],
        path: str,
    ) -> None:
        super().__init__(optimizer, scalars, shared)
        self.assigned: IdentitySet[ParameterServerVariable] = IdentitySet()
        self._values = values
        self._path = path
        self._graph = tf.compat.v1.get_default_graph()

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the current whole value of `variable`."""
        if variable not in self._values:
            raise UnsupportedError(
                f"Optimizer {self.optimizer.name!r} uses another variable to update "
                f"'{self._path}', which is in shards. Expected: its own slots, kept in lists "
                f"parallel to the variables. Received: '{variable.path}'. Keep one slot per "
                "variable in a list, in the order of `build`'s argument."
            )
        return self._get(variable)

    def held(self, variable: ParameterServerVariable) -> ValueOf:
        self.current(variable)
        return ValueOf(self, variable)

    def assign_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.current(variable)
        self.assigned.add(variable)
        self._set(variable, value)

    def add_to_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.assign_held(variable, self.current(variable) + value)

    def choose(
        self, condition: tf.Tensor, then: Callable[[], None], otherwise: Callable[[], None]
    ) -> None:
        # Both branches run, and `tf.where` selects each value: a `tf.cond` would hide from
        # `update_cut.py` which rows depend on which.
        before = ByIdentity(self._values.items())
        otherwise()
        others, self._values = self._values, before
        then()
        for variable, other in others.items():
            if self._values[variable] is not other:
                self._values[variable] = tf.where(condition, self._values[variable], other)

    def _get(self, variable: ParameterServerVariable) -> tf.Tensor:
        return self._values[variable]

    def _set(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise _AssignsInControlFlow
        self._values[variable] = value


class _WholeUpdateInResources(_WholeUpdate):
    """Like `_WholeUpdate`, with values in resources that conditions and loops can assign."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._handles = ByIdentity(
            (variable, anonymous_handle(value.shape, value.dtype))
            for variable, value in self._values.items()
        )
        for variable, value in self._values.items():
            self._set(variable, value)

    def choose(
        self, condition: tf.Tensor, then: Callable[[], None], otherwise: Callable[[], None]
    ) -> None:
        tf.cond(condition, then, otherwise)

    def _get(self, variable: ParameterServerVariable) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(
            resource=self._handles[variable], dtype=self._values[variable].dtype
        )
        value.set_shape(self._values[variable].shape)
        return value

    def _set(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handles[variable], value=value)


@dataclass(frozen=True)
class TracedUpdate:
    """The part of an update after clipping, for one variable, as a graph.

    Its tensors are referred to by name.

    Attributes:
        variable: the variable to update.
        state: the variable and its slots.
        gradient: the graph's input for the gradient.
        scalars: the inputs for the scalars.
        inputs: the inputs for the values of `state`.
        captured: other tensors that the graph captured, by the names of its inputs.
        new: the new values of the assigned variables.
        difference: the new value of the variable minus its old one.
        sources: the inputs on which each tensor depends.
        nodes: the nodes of `graph_def`, by name.
        graph_def: the graph.
    """

    variable: ParameterServerVariable
    state: list[ParameterServerVariable]
    gradient: str
    scalars: Scalars
    inputs: ByIdentity[ParameterServerVariable, str]
    captured: dict[str, tf.Tensor]
    new: ByIdentity[ParameterServerVariable, tf.Tensor]
    difference: tf.Tensor
    sources: dict[str, frozenset[str]]
    nodes: dict[str, Any]
    graph_def: Any

    def has_rows(self, variable: ParameterServerVariable) -> bool:
        """Return True for the variable, and for a slot that is in shards as the variable is."""
        return bool(variable.storage.shape == self.variable.storage.shape)

    def inputs_of(self, *, rowed: bool) -> dict[str, ParameterServerVariable]:
        """Return the members of `state` that have the variable's rows, or the other members.

        The keys are the names of their inputs.
        """
        return {self.inputs[v]: v for v in self.state if self.has_rows(v) == rowed}

    def feeds_of(self, scalars: Scalars) -> dict[str, tf.Tensor]:
        """Return the feeds of `replay` for these scalars."""
        return dict(zip(leaves_of(self.scalars), leaves_of(scalars), strict=True))

    def replay(
        self, feeds: dict[str, tf.Tensor], wanted: Sequence[str], *, in_order: bool = False
    ) -> list[tf.Tensor]:
        """Return the tensors `wanted` of the traced graph in the current graph.

        Args:
            feeds: the replacements of other tensors of the traced graph.
            wanted: the names of the tensors.
            in_order: whether to include operations with effects, in their order; a ps has none of
                them to run.
        """
        subgraph = tf.compat.v1.GraphDef(
            versions=self.graph_def.versions, library=self.graph_def.library
        )
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
                # Tensors go by "node:output" here; a GraphDef leaves out output 0.
                pending += [s if ":" in s or s.startswith("^") else f"{s}:0" for s in sources]
                kept = subgraph.node.add()
                kept.CopyFrom(self.nodes[node])
                del kept.input[:]
                kept.input.extend(sources)
        # The reads that feed it wait for the lock, so its operations need not.
        with tf.control_dependencies(None):
            imported = tf.graph_util.import_graph_def(subgraph, used, missing, name="update")
        tensors = dict(zip(missing, imported, strict=True))
        return [feeds[name] if name in feeds else tensors[name] for name in wanted]


def trace_update(
    optimizer: keras.optimizers.Optimizer,
    variable: ParameterServerVariable,
    gradient_dtype: tf.DType,
    scalars: Scalars,
    shared: list[ParameterServerVariable],
) -> TracedUpdate:
    """Trace the update of `variable`.

    Args:
        optimizer: the `keras.optimizers.Optimizer`.
        variable: the variable that it updates.
        gradient_dtype: the dtype of the gradient.
        scalars: the specs of the scalars.
        shared: the optimizer's shared state.
    """
    slots = slots_of(optimizer)[optimizer._get_variable_index(variable)]
    state = list(
        IdentitySet(v for v in [variable, *slots] if isinstance(v, ParameterServerVariable))
    )
    assigned: list[ParameterServerVariable] = []

    def update(
        phase_of: type[_WholeUpdate],
        gradient: tf.Tensor,
        scalars: Scalars,
        values: list[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        before = ByIdentity(zip(state, values, strict=True))
        phase = phase_of(optimizer, scalars, shared, ByIdentity(before.items()), variable.path)
        finish(phase, variable, gradient, scalars.clip_scale)
        assigned[:] = [v for v in state if v in phase.assigned]
        difference = phase.current(variable) - before[variable]
        return [phase.current(v) for v in assigned], difference

    specs = [tf.TensorSpec(v.storage.shape, v.storage.dtype) for v in state]
    arguments = (tf.TensorSpec(variable.storage.shape, gradient_dtype), scalars, specs)

    def trace(phase_of: type[_WholeUpdate]) -> Any:
        return tf.function(
            functools.partial(update, phase_of), autograph=False
        ).get_concrete_function(*arguments)

    try:
        function = trace(_WholeUpdate)
    except _AssignsInControlFlow:
        function = trace(_WholeUpdateInResources)
    return _described(function, variable, state, assigned, arguments)


def _described(
    function: tf.types.experimental.ConcreteFunction,
    variable: ParameterServerVariable,
    state: list[ParameterServerVariable],
    assigned: list[ParameterServerVariable],
    arguments: tuple[tf.TensorSpec, Scalars, list[tf.TensorSpec]],
) -> TracedUpdate:
    """Return a traced update, with its tensors by name.

    Args:
        function: returns the new values of `assigned`, and the difference.
        variable: the variable that it updates.
        state: the variable and its slots.
        assigned: those of `state` that it assigns.
        arguments: the specs of gradient, scalars and the values of `state`.
    """
    names = iter([tensor.name for tensor in function.inputs])
    gradient, named_scalars, inputs = filled(arguments, names)
    *new, difference = function.outputs
    graph_def = function.graph.as_graph_def()
    for node in graph_def.node:
        node.attr.pop("_class", None)  # names of nodes that a subgraph may lack
    return TracedUpdate(
        variable=variable,
        state=state,
        gradient=gradient,
        scalars=named_scalars,
        inputs=ByIdentity(zip(state, inputs, strict=True)),
        # The inputs after the arguments, which TensorFlow adds for captures.
        captured=dict(zip(names, function.captured_inputs, strict=True)),
        new=ByIdentity(zip(assigned, new, strict=True)),
        difference=difference,
        sources=_sources(function.graph, [tensor.name for tensor in function.inputs]),
        nodes={node.name: node for node in graph_def.node},
        graph_def=graph_def,
    )


def _sources(graph: tf.Graph, inputs: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return the names of the inputs on which each tensor of a graph depends."""
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
    """Return True if an operation may have effects besides its results."""
    return operation.op_def is None or bool(operation.op_def.is_stateful)
