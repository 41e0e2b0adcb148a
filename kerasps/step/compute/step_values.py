"""The values of variables within one trace of a step, and their storage meanwhile.

An assignment makes a new tensor the value of a variable. A plain tensor cannot get out of a
condition or a loop, so a value that is assigned there is kept in a scratch resource of the worker.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasps.step.contract.compute_messages import ComputeInputs
from kerasps.step.contract.inventory import Inventory, ScratchKey
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.records.specs import spec_of
from kerasps.variables import ParameterServerVariable, is_seed_state
from kerasps.variables.kinds import is_metric_state, is_recurrent_state

# The number of seeds to keep between two steps for a generator that draws inside a loop, where the
# number of draws is unknown.
SEEDS_PER_STEP_OF_A_LOOP = 2**20


class StepValues:
    """The value of each variable that one trace reads whole or assigns.

    Make it in the graph of the step.

    Args:
        inventory: the variables that earlier traces have met; this trace adds scratch resources.
        inputs: this replica's share of the arguments of the traced graph.

    Attributes:
        assigned: the variables that the step has assigned.
        changed: the variables whose values have changed since this was last cleared.
        draws: the number of seeds that the step draws from each generator.
    """

    def __init__(self, inventory: Inventory, inputs: ComputeInputs) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._inventory = inventory
        self._initial = inputs.values(inventory)
        self._values = {_value_of(v): value for v, value in self._initial.items()}
        self._scratch = dict(zip(inventory.scratch, inputs.scratch, strict=True))
        self._scratch_reads: dict[ScratchKey, dict[Any, tf.Tensor]] = {}
        self.assigned: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.changed: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.draws: ByIdentity[ParameterServerVariable, int] = ByIdentity()

    def has_tensor(self, variable: ParameterServerVariable) -> bool:
        """Return True if the value of a variable is a plain tensor of the trace."""
        return _value_of(variable) in self._values

    def is_in_scratch(self, variable: ParameterServerVariable) -> bool:
        """Return True if the value of a variable is kept in a scratch resource."""
        return _value_of(variable) in self._scratch

    def has(self, variable: ParameterServerVariable) -> bool:
        """Return True if the trace has the value of a variable."""
        return self.has_tensor(variable) or self.is_in_scratch(variable)

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the current value of a variable in the step."""
        return self._current(_value_of(variable), self._initial.get(variable))

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Set the value of a variable; the change leaves the step."""
        self.assigned.add(variable)
        self.changed.add(variable)
        if is_seed_state(variable):
            self._count_draw(variable)
        self._set(_value_of(variable), spec_of(variable), value)

    def set_ahead(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Set `variable` to the value that an update on the ps will give it; do not push it."""
        spec = spec_of(variable)
        if variable in self.assigned:
            # The step's earlier changes are still pushed.
            self._set(_pending_of(variable), spec, self.difference(variable))
        self.changed.add(variable)
        value = tf.stop_gradient(value)  # as a GradientTape treats an assignment
        self._set(_value_of(variable), spec, value)
        self._set(_base_of(variable), spec, value)

    def difference(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the step's additions to `variable`, without the updates of optimizers."""
        if variable not in self._initial:  # new in this trace, so another trace follows
            return zeros_of(variable)
        base = self._current(_base_of(variable), self._initial[variable])
        difference = self._current(_value_of(variable)) - base
        pending = _pending_of(variable)
        if pending in self._values or pending in self._scratch:
            return difference + self._current(pending)
        return difference

    def state_changes(self) -> tuple[list[ParameterServerVariable], list[ParameterServerVariable]]:
        """Return the variables that are pushed as a difference, and those pushed as a value.

        A difference loses nothing when two workers push at once: counters, and the state of layers.
        The scalar state of an optimizer (a loss scale that is halved) does not add up. A step
        replaces the state of a recurrent layer. Both are pushed as values; the last one stands.
        """
        deltas, assigned = [], []
        for variable in self.assigned:
            if is_metric_state(variable) or is_seed_state(variable):
                continue
            if (
                variable.storage.dtype == tf.bool
                or variable in self._inventory.optimizer_state
                or is_recurrent_state(variable)
            ):
                assigned.append(variable)
            else:
                deltas.append(variable)
        return deltas, assigned

    def _count_draw(self, variable: ParameterServerVariable) -> None:
        # A generator assigns its state once for each seed that it gives. One that draws in a loop
        # has a scratch resource, and its number of draws is unknown.
        in_loop = self.is_in_scratch(variable)
        self.draws[variable] = (
            SEEDS_PER_STEP_OF_A_LOOP if in_loop else self.draws.get(variable, 0) + 1
        )

    def _set(self, key: ScratchKey, spec: tf.TensorSpec, value: tf.Tensor) -> None:
        if key in self._scratch or self.in_control_flow():
            self.keep(key, spec, value)
        else:
            self._values[key] = value

    def _current(self, key: ScratchKey, default: tf.Tensor | None = None) -> tf.Tensor:
        return self.kept(key) if key in self._scratch else self._values.get(key, default)

    # Scratch resources

    def in_control_flow(self) -> bool:
        """Return True while a condition, a loop or a function inside the step is traced."""
        return tf.compat.v1.get_default_graph() is not self._graph

    def in_while_loop(self) -> bool:
        """Return True while a `tf.while_loop` inside the step is traced."""
        graph = tf.compat.v1.get_default_graph()
        while graph is not self._graph:
            if "While" in type(graph).__name__:
                return True
            graph = graph.outer_graph
        return False

    def keep(self, key: ScratchKey, spec: tf.TensorSpec, value: tf.Tensor) -> None:
        """Assign `value` to a scratch resource, or note that one is needed."""
        if key in self._scratch:
            tf.raw_ops.AssignVariableOp(resource=self._scratch[key], value=value)
            self._scratch_reads.pop(key, None)
        else:
            self._inventory.add_scratch(key, spec)

    def kept(self, key: ScratchKey) -> tf.Tensor:
        """Read a scratch resource; return zeros if this trace is the first to need it."""
        spec = self._inventory.scratch[key]
        if key not in self._scratch:
            return tf.zeros([d or 0 for d in spec.shape], spec.dtype)
        # One tensor until the next assignment: a GradientTape identifies a variable by its tensor.
        graph = tf.compat.v1.get_default_graph()
        reads = self._scratch_reads.setdefault(key, {})
        if graph not in reads:
            reads[graph] = tf.raw_ops.ReadVariableOp(resource=self._scratch[key], dtype=spec.dtype)
            reads[graph].set_shape(spec.shape)
        return reads[graph]


def start_values(
    values: ByIdentity[ParameterServerVariable, tf.Tensor],
) -> dict[ScratchKey, tf.Tensor]:
    """Return the initial values of scratch resources; those of others are zeros."""
    return {
        key: value
        for variable, value in values.items()
        for key in (_value_of(variable), _base_of(variable))
    }


def zeros_of(variable: ParameterServerVariable) -> tf.Tensor:
    """Return zeros of a variable's shape and dtype, for a value that the trace does not have."""
    return tf.zeros(variable.storage.shape, variable.storage.dtype)


def _value_of(variable: ParameterServerVariable) -> ScratchKey:
    return ScratchKey("value", id(variable))


def _base_of(variable: ParameterServerVariable) -> ScratchKey:
    return ScratchKey("base", id(variable))


def _pending_of(variable: ParameterServerVariable) -> ScratchKey:
    return ScratchKey("pending", id(variable))
