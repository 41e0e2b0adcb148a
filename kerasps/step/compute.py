"""The compute phase: an unmodified `train_step` as a pure function of a batch and of pulled values.

While `train_step` is traced, a `ParameterServerVariable` resolves to the tensor that was pulled for
it, an assignment becomes a value of the step, and `optimizer.apply` is recorded instead of carried
out (`update_recorder.py`). What comes out are tensors: gradients and new values, for the push phase
to bring to the ps tasks. Nothing in here touches a remote resource.

A variable that is read by rows only, through `take`, is a table: in a step it is the tensor of the
rows that the step asked for, each once, and a gradient with respect to it has a row for each of
these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.step.compute_messages import (
    ComputeInputs,
    ComputeOutputs,
    InputNames,
    Update,
)
from kerasps.step.found_rows import GradientSums, rows_found
from kerasps.step.identity import ByIdentity, IdentitySet
from kerasps.step.inventory import Inventory, ScratchKey, spec_of
from kerasps.step.row_requests import LookupIds, checked
from kerasps.step.update_recorder import UpdateRecorder
from kerasps.step.value_reads import ValueReads
from kerasps.variables import (
    ParameterServerVariable,
    from_start,
    is_metric_state,
    is_recurrent_state,
    is_seed_state,
)

if TYPE_CHECKING:
    from kerasps.step.replicas import Replicas

# Seeds to keep between two steps for a generator that draws inside a loop, where the number of
# draws is unknown.
SEEDS_PER_STEP_OF_A_LOOP = 2**20

_IN_ANOTHER_WAY = "the step does not only look rows up, or does so inside a loop or a condition"

# Regularizers that are a sum over elements, of which a table's rows have theirs.
_SUMS_OVER_ELEMENTS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class Compute:
    """The phase in which variables are the tensors of one step (see `variables.Phase`).

    A variable that is news to the inventory reads as zeros: the trace goes on to meet what else
    there is, and is done again.

    Args:
        inventory: what traces before have met; this one adds to it.
        inputs: the arguments of the graph that is traced; of it, this replica's.
        trains_bare: whether optimizers may be given bare `tf.Variable`s.
        has_gpu: whether it computes on a GPU, and may use kernels that a GPU alone has.
        replicas: all replicas of the step. Default: this is the only one.

    Attributes:
        has_gpu: as given.
        inputs: the names of those arguments.
        whole: the variables that this trace read whole, and why that was.
        lookups: the look-ups, by the table.
        draws: how many seeds the step draws from each generator.
        changed: the variables that were given another value since this was last cleared.
        sums: makes gradients of tables dense.
        value_reads: the values that were handed out and of which rows may be all that is wanted.
    """

    hides_constraints = True

    def __init__(
        self,
        inventory: Inventory,
        inputs: ComputeInputs,
        *,
        trains_bare: bool = False,
        has_gpu: bool = False,
        replicas: Replicas | None = None,
    ) -> None:
        self.has_gpu = has_gpu
        self._graph = tf.compat.v1.get_default_graph()
        self.inventory = inventory
        self.trains_bare = trains_bare
        self.inputs = InputNames.of(inputs, inventory)
        self._initial = inputs.values(inventory)
        self._tables = inputs.tables_of(inventory)
        self.sums = GradientSums(self._tables)
        self._values = {_value_of(v): value for v, value in self._initial.items()}
        self._scratch = dict(zip(inventory.scratch, inputs.scratch, strict=True))
        self._scratch_reads: dict[ScratchKey, dict[Any, tf.Tensor]] = {}
        self._assigned: IdentitySet[ParameterServerVariable] = IdentitySet()
        self._recorder = UpdateRecorder(self)
        self._replicas = replicas
        self.whole: ByIdentity[ParameterServerVariable, str] = ByIdentity()
        self.lookups: ByIdentity[ParameterServerVariable, list[LookupIds]] = ByIdentity()
        self.draws: ByIdentity[ParameterServerVariable, int] = ByIdentity()
        self.changed: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.value_reads = ValueReads()

    # What variables resolve to

    def read(self, variable: ParameterServerVariable) -> tf.Tensor:
        if _compat.in_symbolic_scope():
            return _zeros(variable)
        if not self._may_be_read_by_rows(variable):
            return self.read_whole(variable)
        if self.is_table(variable):
            value = _zeros(variable)
        elif self._is_known(variable):
            value = self._current(_value_of(variable))
        else:
            self.inventory.add_value(variable)
            value = _zeros(variable)
        return self.value_reads.hand_out(variable, value)

    def _may_be_read_by_rows(self, variable: ParameterServerVariable) -> bool:
        """Return whether a value may be asked for to look rows up in it, which is told later."""
        return (
            self.inventory.may_be_table(variable)
            and not self.in_control_flow()
            and variable not in self._assigned
            and variable not in self._recorder.updated
            and _value_of(variable) not in self._scratch
        )

    def settle_reads(self) -> None:
        """Find which values that were handed out are used otherwise. Call after the trace."""
        for variable in self.value_reads.used():
            self.inventory.use_whole(variable)
            if not self.needs_whole(variable, _IN_ANOTHER_WAY):
                self.inventory.add(variable)

    def read_whole(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the value of `variable` for what needs all of it."""
        self.whole.setdefault(variable, _IN_ANOTHER_WAY)
        self._look_ahead(variable)
        if self.is_table(variable):
            self.inventory.read_whole(variable, _IN_ANOTHER_WAY)
            return _zeros(variable)
        if not self._is_known(variable):
            self.inventory.add(variable)
            return _zeros(variable)
        return self._current(_value_of(variable))

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return variable.storage.shape

    def source(self, variable: ParameterServerVariable) -> tf.Tensor:
        if self.is_table(variable):
            return self._tables[variable].rows
        return self._current(_value_of(variable)) if self._is_known(variable) else _zeros(variable)

    def take(
        self, variable: ParameterServerVariable, ids: tf.Tensor, *, from_end: bool
    ) -> tf.Tensor:
        if _compat.in_symbolic_scope():
            return _no_rows(variable, ids)
        if getattr(ids, "graph", None) is not tf.compat.v1.get_default_graph():
            ids = tf.identity(ids)  # of a value, or of a function around this one
        number = len(self.lookups.setdefault(variable, []))
        self.lookups[variable].append(LookupIds(ids, from_end))
        self._look_ahead(variable)
        if not self.is_table(variable) and self._is_known(variable):
            if self.in_control_flow():
                self.whole.setdefault(variable, _IN_ANOTHER_WAY)
            value = self._current(_value_of(variable))
            ids = from_start(ids, variable.shape[0]) if from_end else ids
            return self.value_reads.gather(value, checked(ids, variable))
        if self.in_control_flow():
            # Ids that only a loop or a condition knows cannot be found ahead of the step.
            self.inventory.read_whole(variable, _IN_ANOTHER_WAY)
        elif not self.is_table(variable) or number >= len(self._tables[variable].positions):
            self.inventory.add_table(variable, number + 1)
        else:
            return rows_found(self._tables[variable], number, ids)
        return _no_rows(variable, ids)

    def regularizer(self, variable: ParameterServerVariable, regularizer: Any) -> Any:
        is_sum = type(regularizer) in _SUMS_OVER_ELEMENTS
        if is_sum and (self.is_table(variable) or _value_of(variable) in self._values):
            self._look_ahead(variable)
            return lambda _: regularizer(self.value_reads.apart(self.source(variable)))
        return regularizer

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        if not value.shape.is_compatible_with(variable.storage.shape):
            raise ValueError(
                f"A new value must have the variable's shape. Expected: {tuple(variable.shape)} "
                f"for variable '{variable.path}'. Received: {value.shape}."
            )
        key = _value_of(variable)
        if key not in self._values:
            self.inventory.add(variable)
        self.whole.setdefault(variable, _IN_ANOTHER_WAY)
        self._look_ahead(variable)
        self._assigned.add(variable)
        self.changed.add(variable)
        if is_seed_state(variable):
            self._count_draw(variable)
        self._set(key, spec_of(variable), value)

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.assign(variable, self.read_whole(variable) + value)

    def _count_draw(self, variable: ParameterServerVariable) -> None:
        # A generator assigns its state once for each seed that it gives. One that draws in a loop
        # has a scratch resource, and how often it draws is unknown.
        in_loop = _value_of(variable) in self._scratch
        self.draws[variable] = (
            SEEDS_PER_STEP_OF_A_LOOP if in_loop else self.draws.get(variable, 0) + 1
        )

    # Tables

    def is_table(self, variable: ParameterServerVariable) -> bool:
        """Return whether this trace has the variable by rows."""
        return variable in self._tables

    def rows(self, table: ParameterServerVariable) -> tf.Tensor:
        """Return the rows of a table that the step asked for."""
        return self._tables[table].rows

    def needs_whole(self, variable: ParameterServerVariable, reason: str) -> bool:
        """Note that an update needs the whole `variable`.

        Returns True where that is news, for which the trace is done again.
        """
        self.whole.setdefault(variable, reason)
        if self.is_table(variable):
            self.inventory.read_whole(variable, reason)
        return self.is_table(variable)

    # Values of the step

    def set_ahead(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Give `variable` the value that an update on the ps will give it; it is not pushed."""
        spec = spec_of(variable)
        if variable in self._assigned:
            # What the step itself has changed before is pushed all the same.
            self._set(_pending_of(variable), spec, self.difference(variable))
        self.changed.add(variable)
        value = tf.stop_gradient(value)  # an assignment, to a GradientTape
        self._set(_value_of(variable), spec, value)
        self._set(_base_of(variable), spec, value)

    def difference(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return what the step has added to `variable`, beside the updates of optimizers."""
        if variable not in self._initial:  # met in this trace, so there will be another
            return _zeros(variable)
        base = self._current(_base_of(variable), self._initial[variable])
        difference = self._current(_value_of(variable)) - base
        pending = _pending_of(variable)
        if pending in self._values or pending in self._scratch:
            return difference + self._current(pending)
        return difference

    def _look_ahead(self, variable: ParameterServerVariable) -> None:
        if variable in self._recorder.updated:
            self.inventory.look_ahead(variable)

    def _is_known(self, variable: ParameterServerVariable) -> bool:
        return _value_of(variable) in self._values or _value_of(variable) in self._scratch

    def _set(self, key: ScratchKey, spec: tf.TensorSpec, value: tf.Tensor) -> None:
        if key in self._scratch or self.in_control_flow():
            self.keep(key, spec, value)
        else:
            self._values[key] = value

    def _current(self, key: ScratchKey, default: tf.Tensor | None = None) -> tf.Tensor:
        return self.kept(key) if key in self._scratch else self._values.get(key, default)

    # Scratch: what is assigned inside control flow

    def in_control_flow(self) -> bool:
        """Return whether a condition, a loop or a function inside the step is being traced."""
        return tf.compat.v1.get_default_graph() is not self._graph

    def in_while_loop(self) -> bool:
        """Return whether that is inside a `tf.while_loop`."""
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
            self.inventory.add_scratch(key, spec)

    def kept(self, key: ScratchKey) -> tf.Tensor:
        """Read what was kept; zeros where it is news that anything is."""
        spec = self.inventory.scratch[key]
        if key not in self._scratch:
            return tf.zeros([d or 0 for d in spec.shape], spec.dtype)
        # As long as nothing is assigned, one tensor: a GradientTape knows a variable by it.
        graph = tf.compat.v1.get_default_graph()
        reads = self._scratch_reads.setdefault(key, {})
        if graph not in reads:
            reads[graph] = tf.raw_ops.ReadVariableOp(resource=self._scratch[key], dtype=spec.dtype)
            reads[graph].set_shape(spec.shape)
        return reads[graph]

    # Optimizers (called by the hooks)

    def meet(self, optimizer: Any) -> None:
        """Note an optimizer. Call before it is applied."""
        self.inventory.meet(optimizer)

    def apply_once(self, apply: Callable[[Any], None], gradients: Sequence[Any]) -> None:
        """Have an optimizer applied: once, to the sums of the gradients of all replicas.

        Args:
            apply: applies it to gradients.
            gradients: those of this replica.
        """
        if self._replicas is None:
            apply(gradients)
        else:
            self._replicas.apply(self, apply, gradients)

    def share_updates(self, first: Compute) -> None:
        """Have the first replica record what is applied for all of them."""
        self._recorder = first._recorder

    def apply_gradients(
        self, optimizer: Any, gradients: Sequence[Any], trainable: Sequence[ParameterServerVariable]
    ) -> None:
        """Stand in for `Optimizer._backend_apply_gradients`: record what the ps tasks need."""
        self._recorder.apply_gradients(optimizer, gradients, trainable)

    def record_update_step(
        self, gradients: Sequence[Any], trainable: Sequence[Any], learning_rate: Any
    ) -> None:
        """Stand in for `TFOptimizer._backend_update_step`, which an optimizer may have wrapped.

        `keras.optimizers.Nadam` does.
        """
        self._recorder.take_arguments(gradients, trainable, learning_rate)

    # Results

    @property
    def updates(self) -> list[Update]:
        """What optimizers are to do on the ps. Call after `outputs`."""
        return self._recorder.updates

    def outputs(self) -> ComputeOutputs:
        """Return the tensors that leave the step, but logs and predictions.

        Call once, at the end of the trace, in the graph of the step.
        """
        self._recorder.finish()
        deltas, assigned = self.state_changes()
        return ComputeOutputs(
            metrics=[self.read_whole(v) for v in self.inventory.metrics],
            updates=[update.tensors for update in self.updates],
            deltas=[self.difference(v) for v in deltas],
            assigned=[self._current(_value_of(v), self._initial.get(v)) for v in assigned],
            logs=[],
            predicted=[],
        )

    def state_changes(self) -> tuple[list[ParameterServerVariable], list[ParameterServerVariable]]:
        """Return the variables that are pushed as a difference, and those pushed as a value.

        A difference loses nothing when two workers push at once: counters, and the state of layers.
        The scalar state of an optimizer (a loss scale that is halved) does not add up, nor does the
        state of a recurrent layer, which a step replaces; so there the last value stands.
        """
        deltas, assigned = [], []
        for variable in self._assigned:
            if is_metric_state(variable) or is_seed_state(variable):
                continue
            if (
                variable.storage.dtype == tf.bool
                or variable in self.inventory.optimizer_state
                or is_recurrent_state(variable)
            ):
                assigned.append(variable)
            else:
                deltas.append(variable)
        return deltas, assigned


def _value_of(variable: ParameterServerVariable) -> ScratchKey:
    return ScratchKey("value", id(variable))


def _base_of(variable: ParameterServerVariable) -> ScratchKey:
    return ScratchKey("base", id(variable))


def _pending_of(variable: ParameterServerVariable) -> ScratchKey:
    return ScratchKey("pending", id(variable))


def start_values(
    values: ByIdentity[ParameterServerVariable, tf.Tensor],
) -> dict[ScratchKey, tf.Tensor]:
    """Return what scratch resources begin a step with, where that is not zeros."""
    return {
        key: value
        for variable, value in values.items()
        for key in (_value_of(variable), _base_of(variable))
    }


def _zeros(variable: ParameterServerVariable) -> tf.Tensor:
    return tf.zeros(variable.storage.shape, variable.storage.dtype)


def _no_rows(variable: ParameterServerVariable, ids: tf.Tensor) -> tf.Tensor:
    """Return zeros in place of the rows `ids`."""
    row_shape = variable.storage.shape[1:]
    rows = tf.zeros(tf.concat([tf.shape(ids), row_shape], 0), variable.storage.dtype)
    rows.set_shape(ids.shape.concatenate(row_shape))
    return rows
