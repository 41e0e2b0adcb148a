"""The push phase: what one ps task does with the gradients and new values that a worker sends it.

The optimizer's own `update_step` runs here, beside its slots. One push at a time holds the lock of a ps, so an update reads
and writes the slots of its variables undisturbed and concurrent workers lose nothing. Everything that a push needs has
arrived before it takes the lock, so a worker that dies cannot hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kerasps import variables
from kerasps.compute import Update, shared_state, slots_of, spec_of
from kerasps.errors import UnsupportedError
from kerasps.packing import Packing
from kerasps.storage import call_with
from kerasps.variables import ParameterServerVariable

# Shared state travels with every push to every ps, so it must be small; Keras's own is at most three scalars.
MAX_SHARED_ELEMENTS = 1024


class Push:
    """The phase in which variables are their storage, and shared scalars what the worker sent (see `variables.Phase`)."""

    hides_constraints = False

    def __init__(self, optimizer: Any, learning_rate: tf.Tensor, shared: dict[int, tf.Tensor]) -> None:
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self._shared = shared

    def read(self, variable: ParameterServerVariable) -> Any:
        return self._shared.get(id(variable), variable.storage)

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._check(variable)
        variable.storage.assign(value, read_value=False)

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._check(variable)
        variable.storage.assign_add(value, read_value=False)

    def _check(self, variable: ParameterServerVariable) -> None:
        if id(variable) in self._shared:
            raise UnsupportedError(
                f"Optimizer {self.optimizer.name!r} assigns '{variable.path}' in `update_step`, which runs on every ps, and no "
                "ps sees another's state. Expected: `update_step` assigns the variable and its slots, kept in lists parallel "
                f"to the variables. Received: an assignment to shared state of shape {tuple(variable.shape)}. Assign it in "
                "`_backend_update_step`, as `keras.optimizers.Nadam` does."
            )


@dataclass(frozen=True)
class DevicePush:
    """The push to one ps: which tensors of a step go there, how they travel, and the function that takes them in."""

    device: str
    select: Callable[[dict[str, Any]], list[tf.Tensor]]
    packing: Packing
    function: Any
    captures: list[tf.Tensor]

    def __call__(self, handles: dict[int, tf.Tensor], outputs: dict[str, Any]) -> None:
        """Sends what `device` needs of the compute phase's `outputs`, in a graph that finds variables by `handles`."""
        flats = self.packing.pack(self.select(outputs))
        with tf.device(self.device):
            call_with(handles, self.function, self.captures, *flats)


def build_pushes(
    updates: Sequence[Update],
    deltas: Sequence[ParameterServerVariable],
    assigned: Sequence[ParameterServerVariable],
    mutex: Callable[[str], tf.Tensor],
) -> list[DevicePush]:
    """One `DevicePush` per ps that a step changes.

    Args:
        updates: what the optimizers want applied, in order.
        deltas: variables that a difference is added to.
        assigned: variables that take a value.
        mutex: the lock of a device, by the device's name.
    """
    devices = {v.device for v in [*deltas, *assigned]}
    for update in updates:
        devices |= {v.device for v in _updated_variables(update)}
    return [_build_push(device, updates, deltas, assigned, mutex(device)) for device in sorted(devices)]


def _updated_variables(update: Update) -> list[ParameterServerVariable]:
    # The moving averages follow every variable, also one without a gradient in this step.
    return list(update.optimizer._trainable_variables) if update.optimizer.use_ema else update.variables


def _build_push(
    device: str,
    updates: Sequence[Update],
    deltas: Sequence[ParameterServerVariable],
    assigned: Sequence[ParameterServerVariable],
    mutex: tf.Tensor,
) -> DevicePush:
    here = [(i, u) for i, u in enumerate(updates) if any(v.device == device for v in _updated_variables(u))]
    deltas_here = [(i, v) for i, v in enumerate(deltas) if v.device == device]
    assigned_here = [(i, v) for i, v in enumerate(assigned) if v.device == device]

    def wanted(update: Update) -> list[int]:
        gradients = [update.num_scalars + i for i, v in enumerate(update.variables) if v.device == device]
        return [*range(update.num_scalars), *gradients]

    def select(outputs: dict[str, Any]) -> list[tf.Tensor]:
        tensors: list[tf.Tensor] = []
        for i, update in here:
            tensors += [outputs["updates"][i]["tensors"][j] for j in wanted(update)]
            if "applied" in outputs["updates"][i]:
                tensors.append(tf.cast(outputs["updates"][i]["applied"], tf.float32))
        tensors += [outputs["deltas"][i] for i, _ in deltas_here]
        return tensors + [outputs["assigned"][i] for i, _ in assigned_here]

    specs: list[tf.TensorSpec] = []
    for _, update in here:
        specs += [tf.TensorSpec(update.tensors[j].shape, update.tensors[j].dtype) for j in wanted(update)]
        if update.applied is not None:
            specs.append(tf.TensorSpec([], tf.float32))
    specs += [spec_of(v) for _, v in [*deltas_here, *assigned_here]]
    packing = Packing(specs)

    def take_in(*flats: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        with tf.device(device):
            received = packing.unpack(flats)
            with tf.control_dependencies(received):
                lock = tf.raw_ops.MutexLock(mutex=mutex)
            start = len(graph.get_operations())
            with tf.control_dependencies([lock]):
                for _, update in here:
                    tensors, received = received[: len(wanted(update))], received[len(wanted(update)) :]
                    if update.applied is None:
                        _apply(update, tensors, device)
                    else:
                        applied, received = received[0], received[1:]
                        tf.cond(applied > 0, lambda u=update, t=tensors: _apply(u, t, device), lambda: None)
                for (_, variable), tensor in zip(deltas_here, received[: len(deltas_here)], strict=True):
                    variable.storage.assign_add(tensor, read_value=False)
                for (_, variable), tensor in zip(assigned_here, received[len(deltas_here) :], strict=True):
                    variable.storage.assign(tensor, read_value=False)
            done = [op for op in graph.get_operations()[start:] if op.op_def.is_stateful]
            with tf.control_dependencies(done):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    function = tf.function(take_in, autograph=False, input_signature=packing.carrier_specs).get_concrete_function()
    return DevicePush(device, select, packing, function, list(function.captured_inputs))


def _apply(update: Update, tensors: list[tf.Tensor], device: str) -> None:
    """What follows clipping in `Optimizer.apply`, for the variables on `device`."""
    optimizer = update.optimizer
    learning_rate, *shared = tensors[: 1 + len(update.shared)]
    phase = Push(optimizer, learning_rate, {id(v): t for v, t in zip(update.shared, shared, strict=True)})
    trainable = [v for v in update.variables if v.device == device]
    gradients = tensors[update.num_scalars :]
    with variables.entering(phase):
        if optimizer.gradient_accumulation_steps:
            clip_scale = tensors[update.num_scalars - 1] if update.has_clip_scale else None
            _accumulate(optimizer, trainable, gradients, learning_rate, clip_scale)
        else:
            _update(optimizer, trainable, gradients, learning_rate)
        if optimizer.use_ema:
            _move_averages(optimizer, device)
        for variable in trainable:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))


def _update(optimizer: Any, trainable: list[Any], gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
    optimizer._apply_weight_decay(trainable)
    for gradient, variable in zip(gradients, trainable, strict=True):
        optimizer.update_step(gradient, variable, learning_rate)


def _accumulate(
    optimizer: Any,
    trainable: list[Any],
    gradients: Sequence[tf.Tensor],
    learning_rate: tf.Tensor,
    clip_scale: tf.Tensor | None,
) -> None:
    steps = optimizer.gradient_accumulation_steps
    accumulators = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in trainable]

    def update() -> None:
        means = [(g + a) / steps for g, a in zip(gradients, accumulators, strict=True)]
        means = optimizer._clip_gradients(means) if clip_scale is None else [m * clip_scale for m in means]
        _update(optimizer, trainable, means, learning_rate)
        for accumulator in accumulators:
            accumulator.assign(tf.zeros_like(accumulator))

    def accumulate() -> None:
        for gradient, accumulator in zip(gradients, accumulators, strict=True):
            accumulator.assign_add(gradient)

    tf.cond(tf.equal((optimizer._iterations.value + 1) % steps, 0), update, accumulate)


def _move_averages(optimizer: Any, device: str) -> None:
    # As `BaseOptimizer._update_model_variables_moving_average`, which goes through all variables wherever they are.
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    frequency = optimizer.ema_overwrite_frequency
    iterations = tf.convert_to_tensor(optimizer.iterations)
    for variable, average in pairs:
        if average is None or variable.device != device:
            continue
        momentum = tf.cast(iterations != 0, variable.dtype) * optimizer.ema_momentum
        average.assign(momentum * average + (1 - momentum) * variable)
        if frequency:
            variable.assign(tf.where((iterations + 1) % frequency == 0, average, variable))


def move_slots(optimizer: Any) -> None:
    """Brings each slot to the ps of its variable; optimizers that make slots in their own way leave them elsewhere."""
    slots = slots_of(optimizer)
    for variable, own in zip(optimizer._trainable_variables, slots, strict=True):
        for slot in own:
            if isinstance(slot, ParameterServerVariable) and slot.device != variable.device:
                slot.move_to(variable)
    for variable in shared_state(optimizer):
        if _num_elements(variable) > MAX_SHARED_ELEMENTS:
            raise UnsupportedError(
                f"Optimizer {optimizer.name!r} has state that every ps would need in every step: '{variable.path}'. Expected: "
                f"slots in lists parallel to the variables. Received: shape {tuple(variable.shape)}. Keep one slot per "
                "variable in a list, in the order of `build`'s argument."
            )


def _num_elements(variable: keras.Variable) -> int:
    """The number of elements of `variable`."""
    return int(variable.storage.shape.num_elements()) if isinstance(variable, ParameterServerVariable) else 0
