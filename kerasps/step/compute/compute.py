"""The compute phase: an unmodified `train_step` as a pure function of a batch and of pulled values.

While `train_step` is traced, a `ParameterServerVariable` resolves to the tensor that was pulled for
it, an assignment becomes a value of the step, and `optimizer.apply` is recorded instead of carried
out (`update_recorder.py`). The outputs are tensors: gradients and new values, which the push phase
sends to the ps tasks. No code here touches a remote resource.

A variable that is read by rows only, through `read_rows`, is a table. In a step it is the tensor of
the rows that the step asked for, each once. A gradient with respect to it has a row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.step.changes.metric_joins import metric_joins
from kerasps.step.compute.found_rows import GradientSums, rows_found
from kerasps.step.compute.step_values import StepValues, zeros_of
from kerasps.step.compute.update_recorder import UpdateRecorder
from kerasps.step.compute.value_reads import ValueReads
from kerasps.step.contract.change import StateChange
from kerasps.step.contract.compute_messages import ComputeInputs, ComputeOutputs, InputNames
from kerasps.step.contract.inventory import Inventory
from kerasps.step.records.identity import ByIdentity
from kerasps.step.rows.row_requests import LookupIds, checked
from kerasps.step.updates.update import Update
from kerasps.variables import ParameterServerVariable
from kerasps.variables.keras.joins import Join
from kerasps.variables.rows.sharding import from_start
from kerasps.variables.storage.tensor_like import note_read

_IN_ANOTHER_WAY = "the step does not only look rows up, or does so inside a loop or a condition"

# Regularizers that are a sum over elements, so that they can be computed from a table's rows.
_SUMS_OVER_ELEMENTS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)

ApplyTogether = Callable[["Compute", Callable[[Any], None], Sequence[Any]], None]


class Compute:
    """The phase in which variables are the tensors of one step (see `variables.Phase`).

    A variable that is not yet in the inventory reads as zeros: the trace goes on to meet other
    variables, and is done again.

    Args:
        trains_bare: whether optimizers may be given bare `tf.Variable`s.
        has_gpu: whether it computes on a GPU, and may use kernels that only a GPU has.
        apply_together: applies an optimizer once for all replicas of the step. Default: the step
            has one replica.
    """

    hides_constraints = True

    def __init__(
        self,
        inventory: Inventory,
        inputs: ComputeInputs,
        *,
        trains_bare: bool = False,
        has_gpu: bool = False,
        apply_together: ApplyTogether | None = None,
    ) -> None:
        self.has_gpu = has_gpu
        self.inventory = inventory
        self.trains_bare = trains_bare
        self.inputs = InputNames.of(inputs, inventory)  # the names of those arguments
        self.values = StepValues(inventory, inputs)  # the values of variables that it has whole
        self._tables = inputs.tables_of(inventory)
        self.sums = GradientSums(self._tables)  # makes gradients of tables dense
        self._recorder = UpdateRecorder(self)
        self._apply_together = apply_together
        # The variables that this trace read whole, and the reasons.
        self.whole: ByIdentity[ParameterServerVariable, str] = ByIdentity()
        # The look-ups, by the table.
        self.lookups: ByIdentity[ParameterServerVariable, list[LookupIds]] = ByIdentity()
        # The values that the step has asked for; it may use only rows of them.
        self.value_reads = ValueReads()
        # The changes of variables beside updates. Set by `outputs`.
        self.changes: list[StateChange] = []
        # The joins of the metrics' states; None for a state that cannot be joined. Set by
        # `outputs`.
        self.joins: list[Join | None] = []

    # Reads and assignments of variables

    def read(self, variable: ParameterServerVariable) -> tf.Tensor:
        if _compat.in_symbolic_scope():
            return zeros_of(variable)
        if not self._may_be_read_by_rows(variable):
            return self.read_whole(variable)
        if self.is_table(variable):
            value = self._zeros_of_table(variable)
        elif self.values.has(variable):
            value = self.values.current(variable)
        else:
            self.inventory.add_value(variable)
            value = zeros_of(variable)
        return self.value_reads.hand_out(variable, value)

    def _may_be_read_by_rows(self, variable: ParameterServerVariable) -> bool:
        """Return True if the step may use the value only to look rows up; the graph tells later."""
        return (
            self.inventory.may_be_table(variable)
            and not self.values.in_control_flow()
            and variable not in self.values.assigned
            and variable not in self._recorder.updated
            and not self.values.is_in_scratch(variable)
        )

    def settle_reads(self) -> None:
        """Find the values that were used for more than look-ups. Call after the trace."""
        for variable in self.value_reads.used():
            self.inventory.use_whole(variable)
            if not self.needs_whole(variable, _IN_ANOTHER_WAY):
                self.inventory.add(variable)

    def read_whole(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the value of `variable` for an operation that needs all of it."""
        self.whole.setdefault(variable, _IN_ANOTHER_WAY)
        self._look_ahead(variable)
        if self.is_table(variable):
            self.inventory.read_whole(variable, _IN_ANOTHER_WAY)
            return self._zeros_of_table(variable)
        if not self.values.has(variable):
            self.inventory.add(variable)
            return zeros_of(variable)
        return self.values.current(variable)

    def _zeros_of_table(self, table: ParameterServerVariable) -> tf.Tensor:
        """Return zeros in place of a whole table."""
        zeros = zeros_of(table)
        if not self.inventory.presumes:
            return zeros
        # The presumed table is none. Keras warns of variables without a gradient, so this adds a
        # gradient of zeros in the trace that finds out.
        note_read(table)
        return zeros + tf.zeros((), zeros.dtype) * tf.reduce_sum(self.rows(table))

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return variable.storage.shape

    def source(self, variable: ParameterServerVariable) -> tf.Tensor:
        if self.is_table(variable):
            return self._tables[variable].rows
        return self.values.current(variable) if self.values.has(variable) else zeros_of(variable)

    def read_rows(
        self, variable: ParameterServerVariable, ids: tf.Tensor, *, from_end: bool
    ) -> tf.Tensor:
        if _compat.in_symbolic_scope():
            return _no_rows(variable, ids)
        if getattr(ids, "graph", None) is not tf.compat.v1.get_default_graph():
            ids = tf.identity(ids)  # an eager value, or a tensor of a function around this one
        number = len(self.lookups.setdefault(variable, []))
        self.lookups[variable].append(LookupIds(ids, from_end))
        self._look_ahead(variable)
        if not self.is_table(variable) and self.values.has(variable):
            if self.values.in_control_flow():
                self.whole.setdefault(variable, _IN_ANOTHER_WAY)
            value = self.values.current(variable)
            ids = from_start(ids, variable.shape[0]) if from_end else ids
            return self.value_reads.gather(value, checked(ids, variable))
        if self.values.in_control_flow():
            # Ids that are computed in a loop or a condition cannot be found ahead of the step.
            self.inventory.read_whole(variable, _IN_ANOTHER_WAY)
        elif not self.is_table(variable) or number >= len(self._tables[variable].positions):
            self.inventory.add_table(variable, number + 1)
        else:
            return rows_found(self._tables[variable], number, ids)
        return _no_rows(variable, ids)

    def regularizer(self, variable: ParameterServerVariable, regularizer: Any) -> Any:
        is_sum = type(regularizer) in _SUMS_OVER_ELEMENTS
        if is_sum and (self.is_table(variable) or self.values.has_tensor(variable)):
            self._look_ahead(variable)
            return lambda _: regularizer(self.value_reads.uncounted_copy(self.source(variable)))
        return regularizer

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        if not value.shape.is_compatible_with(variable.storage.shape):
            raise ValueError(
                f"A new value must have the variable's shape. Expected: {tuple(variable.shape)} "
                f"for variable '{variable.path}'. Received: {value.shape}."
            )
        if not self.values.has_tensor(variable):
            self.inventory.add(variable)
        self.whole.setdefault(variable, _IN_ANOTHER_WAY)
        self._look_ahead(variable)
        self.values.assign(variable, value)

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.assign(variable, self.read_whole(variable) + value)

    # Tables

    def is_table(self, variable: ParameterServerVariable) -> bool:
        """Return True if this trace has the variable by rows."""
        return variable in self._tables

    def rows(self, table: ParameterServerVariable) -> tf.Tensor:
        """Return the rows of a table that the step asked for."""
        return self._tables[table].rows

    def needs_whole(self, variable: ParameterServerVariable, reason: str) -> bool:
        """Note that an update needs the whole `variable`.

        Returns True if the inventory did not know that: the trace is then done again.
        """
        self.whole.setdefault(variable, reason)
        if self.is_table(variable):
            self.inventory.read_whole(variable, reason)
        return self.is_table(variable)

    def _look_ahead(self, variable: ParameterServerVariable) -> None:
        if variable in self._recorder.updated:
            self.inventory.look_ahead(variable)

    # Optimizers (called by the hooks)

    def meet(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Note an optimizer. Call before it is applied."""
        self.inventory.meet(optimizer)

    def apply_once(
        self,
        apply: Callable[[Sequence[tf.Tensor | tf.IndexedSlices | None]], None],
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    ) -> None:
        """Apply an optimizer once, to the sums of the gradients of all replicas."""
        if self._apply_together is None:
            apply(gradients)
        else:
            self._apply_together(self, apply, gradients)

    def share_updates(self, first: Compute) -> None:
        """Use the recorder of the first replica, which records the updates of all replicas."""
        self._recorder = first._recorder

    def apply_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        trainable: Sequence[ParameterServerVariable],
    ) -> None:
        """Replace `Optimizer._backend_apply_gradients`: record what the ps tasks need."""
        self._recorder.apply_gradients(optimizer, gradients, trainable)

    def record_update_step(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        trainable: Sequence[keras.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        """Replace `TFOptimizer._backend_update_step`, around which an optimizer may add code.

        `keras.optimizers.Nadam` does so.
        """
        self._recorder.take_arguments(gradients, trainable, learning_rate)

    # Results

    @property
    def updates(self) -> list[Update]:
        """The updates that optimizers make on the ps. Call after `outputs`."""
        return self._recorder.updates

    def outputs(self) -> ComputeOutputs:
        """Return the tensors that leave the step, except logs and predictions.

        Call once, at the end of the trace, in the graph of the step.
        """
        self._recorder.finish()
        changes = [
            StateChange.of(variable, after, form.change, replaces=form.replaces)
            for variable, after, form in self.values.changes()
        ]
        self.changes = [change for change, _ in changes]
        metrics = [(v, self.values.metric_forms(v)) for v in self.inventory.metrics]
        self.joins = metric_joins(self.values.sources, metrics)
        return ComputeOutputs(
            metrics=[self.read_whole(v) for v in self.inventory.metrics],
            updates=[update.tensors for update in self.updates],
            changes=[tensors for _, tensors in changes],
            logs=[],
            predicted=[],
        )


def _no_rows(variable: ParameterServerVariable, ids: tf.Tensor) -> tf.Tensor:
    """Return zeros in place of the rows `ids`."""
    row_shape = variable.storage.shape[1:]
    rows = tf.zeros(tf.concat([tf.shape(ids), row_shape], 0), variable.storage.dtype)
    rows.set_shape(ids.shape.concatenate(row_shape))
    return rows
