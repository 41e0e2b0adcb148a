"""The values of variables within one trace of a step, and their storage meanwhile.

An assignment makes a new tensor the value of a variable. A plain tensor cannot get out of a
condition or a loop, so a value that is assigned there is kept in a scratch resource of the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.step.changes.change_finder import conditions_around, find_form
from kerasps.step.changes.forms import Form
from kerasps.step.changes.kept_changes import KeptChange, kept_start
from kerasps.step.changes.sources import Owner, Sources
from kerasps.step.contract.compute_messages import ComputeInputs
from kerasps.step.contract.inventory import Inventory, ScratchKey
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.records.specs import spec_of
from kerasps.variables import ParameterServerVariable, is_seed_state
from kerasps.variables.storage.kinds import is_metric_state, is_recurrent_state

# The number of seeds to keep between two steps for a generator that draws inside a loop, where the
# number of draws is unknown.
SEEDS_PER_STEP_OF_A_LOOP = 2**20


@dataclass
class _Stage:
    """The part of a step between two updates of a variable; mostly there is one, the whole step."""

    # The number of the step's updates before it.
    after: int
    # The owner of the value at its beginning (see `Sources`).
    owner: Owner
    # The value at its end; None if the step has not assigned the variable in this stage, or
    # keeps its changes in scratch resources.
    new: tf.Tensor | None = None
    # Its changes, if they are kept in scratch resources.
    kept: KeptChange | None = None

    @property
    def is_assigned(self) -> bool:
        """True if the step has assigned the variable in this stage."""
        return self.new is not None or self.kept is not None


class StepValues:
    """The value of each variable that one trace reads whole or assigns.

    Make it in the graph of the step.
    """

    def __init__(self, inventory: Inventory, inputs: ComputeInputs) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._inventory = inventory
        self._initial = inputs.values(inventory)
        self._values = {_value_of(v): value for v, value in self._initial.items()}
        self._scratch = dict(zip(inventory.scratch, inputs.scratch, strict=True))
        self._scratch_reads: dict[ScratchKey, dict[Any, tf.Tensor]] = {}
        self._scratch_writes: dict[ScratchKey, int] = {}
        self._stages: ByIdentity[ParameterServerVariable, list[_Stage]] = ByIdentity()
        self.sources = Sources()
        for variable, value in self._initial.items():
            self.sources.add(value, (id(variable), 0))
        self.num_updates = 0  # the number of updates that the step has recorded
        # The variables that the step has assigned.
        self.assigned: IdentitySet[ParameterServerVariable] = IdentitySet()
        # The variables whose values have changed since this was last cleared.
        self.changed: IdentitySet[ParameterServerVariable] = IdentitySet()
        # The number of seeds that the step draws from each generator.
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

    def last(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the value of a variable at the end of the step, as the trace has read it."""
        key = _value_of(variable)
        reads = self._scratch_reads.get(key, {})
        if key in self._scratch and self._graph in reads:
            return reads[self._graph]
        return self._values[key]

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Set the value of a variable; the change leaves the step."""
        self.assigned.add(variable)
        self.changed.add(variable)
        if is_seed_state(variable):
            self._count_draw(variable)
        stage = self._stages_of(variable)[-1]
        key, spec = _value_of(variable), spec_of(variable)
        if key in self._scratch:
            if stage.kept is None:
                stage.kept = KeptChange(self, variable, len(self._stages[variable]) - 1)
            if not is_seed_state(variable):
                form = self._form(variable, value, self._read_owner(key))
                stage.kept.add(form, value, is_state=not is_metric_state(variable))
        elif not self.in_control_flow():  # else another trace follows
            stage.new = value
        self._set(key, spec, value)

    def set_ahead(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Set `variable` to the value that an update on the ps will give it; do not push it."""
        stages = self._stages_of(variable)
        if stages[-1].is_assigned:
            stages.append(_Stage(self.num_updates, (id(variable), len(stages))))
        stages[-1].after = self.num_updates
        self.changed.add(variable)
        value = tf.stop_gradient(value)  # as a GradientTape treats an assignment
        self.sources.add(value, stages[-1].owner)
        self._set(_value_of(variable), spec_of(variable), value)

    def _stages_of(self, variable: ParameterServerVariable) -> list[_Stage]:
        return self._stages.setdefault(variable, [_Stage(0, (id(variable), 0))])

    def _form(self, variable: ParameterServerVariable, value: tf.Tensor, owner: Owner) -> Form:
        """Return the form of a new value of `variable`."""
        inventory = self._inventory
        is_replaced = variable in inventory.optimizer_state or variable in inventory.replaced
        if is_replaced or is_recurrent_state(variable):
            # The scalar state of an optimizer (a loss scale that is halved) does not add up, and a
            # step replaces the state of a recurrent layer.
            return Form.of_value(value)
        return find_form(self.sources, owner, value)

    def changes(self) -> list[tuple[ParameterServerVariable, int, Form]]:
        """Return the changes of variables that leave the step, without the updates of optimizers.

        For each, the variable, the number of updates before it, and the form of its new value. Call
        at the end of the trace, in the graph of the step.
        """
        return [
            (variable, stage.after, self._form_of(variable, stage))
            for variable in self.assigned
            if not is_metric_state(variable) and not is_seed_state(variable)
            for stage in self._stages[variable]
            if stage.is_assigned
        ]

    def metric_forms(self, variable: ParameterServerVariable) -> list[Form]:
        """Return the forms of the new values that the step has given a metric's state in turn."""
        (stage,) = self._stages_of(variable)
        if stage.kept is not None:
            return stage.kept.forms
        return [] if stage.new is None else [self._form_of(variable, stage)]

    def _form_of(self, variable: ParameterServerVariable, stage: _Stage) -> Form:
        if stage.kept is not None:
            form = stage.kept.form()
            if self._may_be_first(variable, form) and self._is_decided_by_flag(stage.kept):
                self._inventory.add_replaced(variable)
            return form
        assert stage.new is not None  # else it is not assigned
        if variable not in self._initial:  # new in this trace, so another trace follows
            return Form.of_value(stage.new)
        form = self._form(variable, stage.new, stage.owner)
        if self._may_be_first(variable, form) and self._depends_on_flag(form.change.addend):
            return Form.of_value(stage.new).or_else(
                tf.not_equal(form.change.addend, 0), Form(), stage.new.dtype
            )
        return form

    # A shift that the first batch sets may be written as an addition: `shift + where(done, 0, x)`.
    # Two workers that both see no flag would add twice. So where the step adds, its value replaces.

    def _may_be_first(self, variable: ParameterServerVariable, form: Form) -> bool:
        """Return True if a form adds to a state that is no counter."""
        is_state = not is_metric_state(variable) and variable.storage.dtype.is_floating
        return is_state and form.change.only_adds

    def _depends_on_flag(self, tensor: tf.Tensor) -> bool:
        """Return True if a tensor is decided by a flag or counter that the step assigns."""
        flags = {
            id(v)
            for v in self.assigned
            if not (v.storage.dtype.is_floating or is_metric_state(v) or is_seed_state(v))
        }
        return bool(self.sources.of(tensor).by_condition & self.sources.mask(flags))

    def _is_decided_by_flag(self, kept: KeptChange) -> bool:
        """Return True if a condition that such a flag decides is around an assignment."""
        handles = [self._scratch[key] for key in kept.keys if key in self._scratch]
        return any(map(self._depends_on_flag, conditions_around(self._graph, handles)))

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
            self._scratch_writes[key] = self._scratch_writes.get(key, 0) + 1
        else:
            self._inventory.add_scratch(key, spec)

    def has_scratch(self, key: ScratchKey) -> bool:
        """Return True if there is such a scratch resource, or the need of one is noted."""
        return key in self._inventory.scratch

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
            self.sources.add(reads[graph], self._read_owner(key))
        return reads[graph]

    def _read_owner(self, key: ScratchKey) -> Owner:
        """Return the owner of the value that a scratch resource holds now."""
        return key, self._scratch_writes.get(key, 0)


def start_values(
    values: ByIdentity[ParameterServerVariable, tf.Tensor],
) -> dict[ScratchKey, tf.Tensor]:
    """Return the initial values of scratch resources that hold values of variables."""
    return {_value_of(variable): value for variable, value in values.items()}


def start_of(key: ScratchKey, spec: tf.TensorSpec) -> tf.Tensor:
    """Return the initial value of another scratch resource."""
    return kept_start(key, tf.TensorSpec([d or 0 for d in spec.shape], spec.dtype))


def zeros_of(variable: ParameterServerVariable) -> tf.Tensor:
    """Return zeros of a variable's shape and dtype, for a value that the trace does not have."""
    return tf.zeros(variable.storage.shape, variable.storage.dtype)


def _value_of(variable: ParameterServerVariable) -> ScratchKey:
    return ScratchKey("value", id(variable))
