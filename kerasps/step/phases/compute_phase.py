"""The compute phase in a step graph: calls the traced step on the pulled values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.step.compute.step_values import start_of, start_values
from kerasps.step.contract.compute_messages import ComputeInputs, ComputeOutputs, TableRows
from kerasps.step.contract.inventory import Inventory
from kerasps.step.phases.step_context import ReplicaInputs, StepContext
from kerasps.step.updates.update import Update, UpdateTensors
from kerasps.variables import call_with

# The name scope of the phase's operations, in the graphs that workers run.
NAME_SCOPE = "compute_phase"


@dataclass(frozen=True)
class ComputePhase:
    """The traced step (see `StepPhase`)."""

    # Its concrete function, from the `ComputeInputs` of each replica to `ComputeOutputs`.
    function: Any
    captures: list[tf.Tensor]  # the tensors that the function captured
    inventory: Inventory  # the variables that it touches
    updates: list[Update]  # the updates of its optimizers
    # The device of the worker that runs it, in short ("GPU:0"). Operations for which the trace
    # names no other device are placed there; if the device has no kernel for one, TensorFlow takes
    # the CPU.
    device: str
    # Whether to pad tables to a shape that does not change with the number of different ids in a
    # batch. XLA compiles anew for each shape.
    pads_rows: bool

    @property
    def functions(self) -> list[Any]:
        """The traced step alone."""
        return [self.function]

    def add_to(self, step: StepContext) -> None:
        """Set `outputs` of the context."""
        for replica in step.replicas:
            self._fill_scratch(replica)
        inputs = [argument for replica in step.replicas for argument in self._inputs(replica)]
        with tf.name_scope(NAME_SCOPE), tf.device(f"/device:{self.device}"):
            outputs = call_with(step.handles, self.function, self.captures, *inputs)
        step.outputs = self._without_padding(outputs, step) if self.pads_rows else outputs

    def _fill_scratch(self, replica: ReplicaInputs) -> None:
        start = start_values(replica.values)
        for key, handle in replica.scratch.items():
            spec = self.inventory.scratch[key]
            value = start.get(key)
            if value is None:
                value = start_of(key, spec)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def _inputs(self, replica: ReplicaInputs) -> ComputeInputs:
        inventory = self.inventory
        tables = [replica.tables[table] for table in inventory.tables]
        return ComputeInputs(
            batch=replica.batch,
            pulled=[replica.values[v] for v in inventory.pulled],
            metrics=[replica.values[v] for v in inventory.metrics],
            seeds=[replica.values[v] for v in inventory.seeds],
            tables=[_padded(rows) for rows in tables] if self.pads_rows else tables,
            scratch=[replica.scratch[key] for key in inventory.scratch],
        )

    def _without_padding(self, outputs: ComputeOutputs, step: StepContext) -> ComputeOutputs:
        return outputs._replace(
            updates=[
                tensors._replace(gradients=_cut_to_rows(update, tensors, step))
                for update, tensors in zip(self.updates, outputs.updates, strict=True)
            ]
        )


def _padded(table: TableRows) -> TableRows:
    """Pad the rows with zeros to the number of ids that the step looks up."""
    num_ids = tf.add_n([tf.size(p) for p in table.positions])
    missing = num_ids - tf.shape(table.rows)[0]
    of_other_axes = [[0, 0]] * (len(table.rows.shape) - 1)
    return table._replace(rows=tf.pad(table.rows, [[0, missing], *of_other_axes]))


def _cut_to_rows(update: Update, tensors: UpdateTensors, step: StepContext) -> list[tf.Tensor]:
    """Return the gradients, those of tables cut to the rows that were pulled."""
    return [
        gradient[: step.requests[variable].num_rows(variable)]
        if variable in step.requests
        else gradient
        for variable, gradient in zip(update.variables, tensors.gradients, strict=True)
    ]
