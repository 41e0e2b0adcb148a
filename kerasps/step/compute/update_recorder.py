"""Records `optimizer.apply` in the compute phase: clips gradients, and plans what the ps receive.

The worker clips, since the norm is over all gradients. The rest of the update runs on the ps. The
worker runs it too if the step reads a variable again afterwards (`_Ahead`). An update that couples
rows on several ps is refused (`coupling.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.compute.found_rows import GradientSums
from kerasps.step.compute.step_values import StepValues
from kerasps.step.contract.inventory import Inventory, ScratchKey
from kerasps.step.records.identity import IdentitySet
from kerasps.step.records.packing import filled, leaves_of, specs_of
from kerasps.step.updates.coupling import coupling_of, refusal
from kerasps.step.updates.optimizers import is_known_to_treat_rows_alone
from kerasps.step.updates.update import Update, UpdateTensors
from kerasps.step.updates.updating import Scalars, UpdatePhase, ValueOf, finish
from kerasps.variables import ParameterServerVariable
from kerasps.variables.keras.slots import check_optimizer, shared_state


class RecordingPhase(Protocol):
    """The part of the tracing phase that the recorder uses."""

    inventory: Inventory  # the variables that the traces have met
    values: StepValues  # the values of variables that the trace has whole
    sums: GradientSums  # makes gradients of tables dense

    def read_whole(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the value of `variable` for an operation that needs all of it."""

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Set the new value of `variable`."""

    def is_table(self, variable: ParameterServerVariable) -> bool:
        """Return True if the trace has the variable by rows."""

    def rows(self, table: ParameterServerVariable) -> tf.Tensor:
        """Return the rows of a table that the step asked for."""

    def needs_whole(self, variable: ParameterServerVariable, reason: str) -> bool:
        """Note that an update needs the whole `variable`; True if the trace is done again."""


class _Ahead(UpdatePhase):
    """The phase in which a worker runs an update that the ps will run too.

    It updates a variable that the step reads again. The ps still receive the gradient; this phase
    changes only tensors of the step: the values of the variable and of its slots.
    """

    def __init__(self, phase: RecordingPhase, update: Update) -> None:
        super().__init__(update.optimizer, update.tensors.scalars, update.shared)
        self._phase = phase

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the current value of `variable` in the step."""
        return self._phase.read_whole(variable)

    def held(self, variable: ParameterServerVariable) -> ValueOf:
        return ValueOf(self, variable)

    def assign_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._phase.values.set_ahead(variable, value)

    def add_to_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._phase.values.set_ahead(variable, self.current(variable) + value)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of `_backend_update_step`."""

    gradients: list[Any]
    trainable: list[ParameterServerVariable]
    learning_rate: Any


class UpdateRecorder:
    """Records the calls of optimizers in a step while it is traced."""

    def __init__(self, phase: RecordingPhase) -> None:
        # The updates that the ps run. Complete after `finish`.
        self.updates: list[Update] = []
        # The variables that the updates recorded so far change.
        self.updated: IdentitySet[ParameterServerVariable] = IdentitySet()
        self._phase = phase
        self._inventory = phase.inventory
        self._values = phase.values
        # By the number of an update inside a condition, the scratch keys of its tensors, in their
        # structure. They are read at the end of the step.
        self._pending: dict[int, UpdateTensors] = {}
        self._arguments: _Arguments | None = None

    def apply_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        trainable: Sequence[ParameterServerVariable],
    ) -> None:
        """Clip the gradients as `optimizer` does, and record what the ps tasks need."""
        check_optimizer(optimizer, trainable)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        clip_scale = None
        if not optimizer.gradient_accumulation_steps:
            gradients = optimizer._clip_gradients(gradients)
        elif optimizer.global_clipnorm:
            clip_scale = self._accumulated_clip_scale(optimizer, gradients, trainable)
        shared = shared_state(optimizer)
        arguments, after = self._move_shared_state(optimizer, gradients, trainable, shared)
        learning_rate = tf.cast(tf.convert_to_tensor(arguments.learning_rate), tf.float32)
        update = self._update(
            optimizer, arguments, shared, Scalars(learning_rate, after, clip_scale)
        )
        self._record(update)
        ahead = _Ahead(self._phase, update)
        for gradient, variable in zip(update.tensors.gradients, update.variables, strict=True):
            if variable in self._inventory.ahead:
                finish(ahead, variable, gradient, clip_scale)
            self.updated.add(variable)

    def take_arguments(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        trainable: Sequence[keras.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        """Keep the arguments of `_backend_update_step` instead of updating."""
        self._arguments = _Arguments(list(gradients), list(trainable), learning_rate)

    def _move_shared_state(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[tf.Tensor],
        trainable: Sequence[ParameterServerVariable],
        shared: Sequence[ParameterServerVariable],
    ) -> tuple[_Arguments, list[tf.Tensor]]:
        """Call the optimizer, which advances its shared state and calls `take_arguments` by a hook.

        Returns the arguments of that call, and the shared state for its updates.
        """
        phase, steps = self._phase, optimizer.gradient_accumulation_steps
        before = [phase.read_whole(v) for v in shared]
        optimizer._backend_update_step(gradients, list(trainable), optimizer.learning_rate)
        arguments, self._arguments = self._arguments, None
        if arguments is None:
            raise UnsupportedError(
                f"Optimizer {optimizer.name!r} updates variables in `_backend_update_step` and not "
                "in `update_step`, which is what runs on the ps tasks. Expected: an optimizer "
                f"whose `update_step` updates one variable. Received: {type(optimizer).__name__}. "
                "Move the update into `update_step`, or call `super()._backend_update_step`."
            )
        after = [phase.read_whole(v) for v in shared]
        if steps:
            # State that the optimizer advances with each update advances only when the accumulated
            # gradients are applied.
            is_update = tf.equal((phase.read_whole(optimizer._iterations) + 1) % steps, 0)
            for variable, old, new in zip(shared, before, after, strict=True):
                if new is not old:
                    phase.assign(variable, tf.where(is_update, new, old))
        return arguments, after

    def _update(
        self,
        optimizer: keras.optimizers.Optimizer,
        arguments: _Arguments,
        shared: list[ParameterServerVariable],
        scalars: Scalars,
    ) -> Update:
        variables = arguments.trainable
        gradients = [
            _shaped(tf.convert_to_tensor(g), self._gradient_shape(v))
            for g, v in zip(arguments.gradients, variables, strict=True)
        ]
        addends: list[list[tf.Tensor]] = [[] for _ in variables]
        tensors = UpdateTensors(scalars, gradients, addends=addends)
        update = Update(optimizer, variables, shared, IdentitySet(), tensors)
        if not self._values.in_control_flow():
            for i, (gradient, variable) in enumerate(
                zip(arguments.gradients, variables, strict=True)
            ):
                known = self._phase.sums.addends(gradient, variable)
                if known is not None:
                    update.lookups[variable], addends[i] = known
        for gradient, variable in zip(gradients, variables, strict=True):
            if self._couples_rows(update, variable, gradient.dtype):
                update.coupled.add(variable)
        return update

    def _couples_rows(
        self, update: Update, variable: ParameterServerVariable, gradient_dtype: tf.DType
    ) -> bool:
        """Return True if the update of a table needs all rows; refuse that for shards."""
        optimizer = update.optimizer
        in_rows = variable.sharding is not None or self._phase.is_table(variable)
        if not in_rows or is_known_to_treat_rows_alone(optimizer, variable):
            return False
        found, key = self._inventory.couplings, (id(optimizer), id(variable))
        if key not in found:
            scalars = specs_of(update.tensors.scalars)
            found[key] = coupling_of(optimizer, variable, gradient_dtype, scalars, update.shared)
        how = found[key]
        if how is not None and variable.sharding is not None:
            raise refusal(optimizer, variable, how)
        return how is not None

    def _gradient_shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        if self._phase.is_table(variable):
            return self._phase.rows(variable).shape
        return variable.storage.shape

    def _accumulated_clip_scale(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[tf.Tensor],
        trainable: Sequence[keras.Variable],
    ) -> tf.Tensor:
        # The norm is over all variables and so over all ps tasks. The worker, which has every
        # gradient, computes it.
        for variable in trainable:
            if self._phase.needs_whole(
                variable, "`global_clipnorm` needs the norm of its accumulated gradient"
            ):
                return tf.ones([])
        accumulated = [
            optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in trainable
        ]
        means = [
            (g + a) / optimizer.gradient_accumulation_steps
            for g, a in zip(gradients, accumulated, strict=True)
        ]
        norm = tf.linalg.global_norm(means)
        return optimizer.global_clipnorm / tf.maximum(norm, optimizer.global_clipnorm)

    # Updates inside conditions

    def _record(self, update: Update) -> None:
        values, number = self._values, len(self.updates)
        self.updates.append(update)
        values.num_updates = len(self.updates)
        if not values.in_control_flow():
            return
        if values.in_while_loop():
            raise UnsupportedError(
                "An optimizer was applied inside a `tf.while_loop` of `train_step`, and a "
                "step pushes its gradients once. Expected: `optimizer.apply` outside loops. "
                f"Received: it inside one, for {update.optimizer.name!r}. Unroll the loop in "
                "Python, or accumulate the gradients in the loop and apply them after it."
            )
        # A resource is zeros, and so False, until the step assigns it.
        tensors = update.tensors._replace(applied=tf.constant(True))
        leaves = leaves_of(tensors)
        keys = [ScratchKey("update", number, index) for index in range(len(leaves))]
        for key, tensor in zip(keys, leaves, strict=True):
            values.keep(key, tf.TensorSpec(tensor.shape, tensor.dtype), tensor)
        self._pending[number] = filled(tensors, keys)

    def finish(self) -> None:
        """Complete `updates`. Call at the end of the trace, in the graph of the step."""
        for number, keys in self._pending.items():
            update = self.updates[number]
            tensors = tf.nest.map_structure(
                lambda key: None if key is None else self._values.kept(key), keys
            )
            tensors = tensors._replace(gradients=self._fitted(update, tensors))
            self.updates[number] = replace(update, tensors=tensors)

    def _fitted(self, update: Update, tensors: UpdateTensors) -> list[tf.Tensor]:
        """Return the gradients, those of tables with a row for each row that was pulled.

        If the optimizer was not applied in this step, the scratch resource of a table's gradient
        has no rows, and zeros replace it.
        """
        return [
            tf.cond(
                tensors.applied,
                lambda g=gradient: g,
                lambda v=variable: tf.zeros_like(self._phase.rows(v)),
            )
            if self._phase.is_table(variable)
            else gradient
            for variable, gradient in zip(update.variables, tensors.gradients, strict=True)
        ]


def _shaped(gradient: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    return gradient if gradient.shape == shape else tf.ensure_shape(gradient, shape)
