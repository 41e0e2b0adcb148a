"""The replacements of methods of Keras's optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps import training
from kerasps.dynamic.local.local_rows import LocalRows, making_slot
from kerasps.errors import UnsupportedError
from kerasps.hooks.in_place import Original
from kerasps.hooks.patch import scope_of_ours
from kerasps.runtime.connected import connected_strategy
from kerasps.step import Compute
from kerasps.step.updates.updating import UpdatePhase
from kerasps.variables import ParameterServerVariable, current_phase, entering
from kerasps.variables.keras.adoption import adopt_optimizer, keras_variable_of, unsharded
from kerasps.variables.lanes.phase import check_replica


def apply(
    original: Original,
    self: keras.optimizers.Optimizer,
    grads: Iterable[tf.Tensor | tf.IndexedSlices | None],
    trainable_variables: Iterable[keras.Variable] | None = None,
) -> None:
    """`Optimizer.apply`: adopt and build the optimizer that a step uses, outside of the trace."""
    trainable_variables = None if trainable_variables is None else list(trainable_variables)
    phase = current_phase()
    check_replica()
    if trainable_variables is not None:
        grads, trainable_variables = unsharded(list(grads), trainable_variables)
    if isinstance(phase, Compute):
        if phase.trains_bare and trainable_variables is not None:
            trainable_variables = [keras_variable_of(v) for v in trainable_variables]
        adopt_optimizer(connected_strategy(), self)
        phase.meet(self)
        grads = [phase.sums.dense(gradient) for gradient in grads]
        if not self.built and trainable_variables is not None:
            with tf.init_scope(), entering(None):
                self.build(trainable_variables)
        phase.apply_once(lambda sums: original(self, sums, trainable_variables), grads)
    else:
        original(self, grads, trainable_variables)


def apply_scaled(
    original: Original,
    self: keras.optimizers.Optimizer,
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
    trainable_variables: Iterable[keras.Variable] | None = None,
) -> None:
    """`LossScaleOptimizer.apply`: work in the scope outside a step too.

    Keras refuses this under any strategy; here there are no replicas that must agree.
    """
    strategy, phase = connected_strategy(), current_phase()
    if isinstance(phase, Compute):
        trainable_variables = None if trainable_variables is None else list(trainable_variables)
        grads = [phase.sums.dense(gradient) for gradient in grads]
        phase.apply_once(
            lambda sums: original(
                self, _infinite_if_sent_so(self, sums, trainable_variables), trainable_variables
            ),
            grads,
        )
    elif tf.distribute.get_strategy() is strategy and tf.distribute.in_cross_replica_context():
        with training.without_current(strategy):
            original(self, grads, trainable_variables)
    else:
        original(self, grads, trainable_variables)


def _infinite_if_sent_so(
    optimizer: keras.optimizers.LossScaleOptimizer,
    gradients: Sequence[tf.Tensor | None],
    trainable: Sequence[keras.Variable] | None,
) -> list[tf.Tensor | None]:
    """Return gradients with an infinite number if a gradient becomes infinite when it is sent.

    Gradients are sent unscaled and clipped, in the dtypes of `wire_dtype`. So the optimizer sees
    the overflow of float16, and skips the step.
    """
    variables = optimizer._trainable_variables if trainable is None else trainable
    if not optimizer.built:  # another trace follows
        return list(gradients)
    cast: list[tuple[int, tf.DType]] = []
    for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        dtype = getattr(variable, "wire_dtype", None)
        if gradient is not None and dtype is not None and dtype != gradient.dtype:
            cast.append((place, dtype))
    if not cast:
        return list(gradients)
    inner = optimizer.inner_optimizer
    scale = tf.convert_to_tensor(optimizer.dynamic_scale)
    sent = [None if g is None else g / tf.cast(scale, g.dtype) for g in gradients]
    if not inner.gradient_accumulation_steps:
        sent = inner._clip_gradients(sent)
    are_finite = [
        tf.reduce_all(tf.math.is_finite(tf.cast(sent[place], dtype))) for place, dtype in cast
    ]
    addition = tf.where(tf.reduce_all(are_finite), 0.0, float("inf"))
    marked, _ = cast[0]
    return [
        g + tf.cast(addition, g.dtype) if g is not None and place == marked else g
        for place, g in enumerate(gradients)
    ]


def apply_gradients(
    original: Original,
    self: keras.optimizers.Optimizer,
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
    trainable_variables: Sequence[keras.Variable],
) -> None:
    """`Optimizer._backend_apply_gradients`: record the gradients, which the worker will send."""
    phase = current_phase()
    if isinstance(phase, Compute):
        phase.apply_gradients(self, grads, trainable_variables)
    else:
        original(self, grads, trainable_variables)


def update_step(
    original: Original,
    self: keras.optimizers.Optimizer,
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
    trainable_variables: Sequence[keras.Variable],
    learning_rate: tf.Tensor,
) -> None:
    """`Optimizer._backend_update_step`: record an update that an optimizer's override makes."""
    phase = current_phase()
    if isinstance(phase, Compute):
        phase.record_update_step(grads, trainable_variables, learning_rate)
    else:
        original(self, grads, trainable_variables, learning_rate)


def learning_rate(original: Original, self: keras.optimizers.Optimizer) -> Any:
    """`Optimizer._get_current_learning_rate`: on a ps, return the rate that the worker sent."""
    phase = current_phase()
    if isinstance(phase, UpdatePhase) and phase.optimizer is self:
        return phase.learning_rate
    return original(self)


def add_variable(
    original: Original, self: keras.optimizers.Optimizer, *args: object, **kwargs: object
) -> Any:
    """`Optimizer.add_variable`: make the state of an optimizer of ours in the scope."""
    with scope_of_ours() if _is_ours(self) and current_phase() is None else _nothing():
        return original(self, *args, **kwargs)


def add_slot(
    original: Original,
    self: keras.optimizers.Optimizer,
    reference_variable: keras.Variable | tf.Variable,
    name: str | None = None,
    initializer: object = "zeros",
) -> Any:
    """`Optimizer.add_variable_from_reference`: make a slot beside the storage.

    It is not beside the value of a step, and not within a function that XLA compiles.
    """
    if isinstance(reference_variable, LocalRows):
        _check_same_strategy(self, reference_variable)
        with making_slot(reference_variable.table, initializer):
            return original(self, reference_variable, name, initializer)
    with (
        tf.init_scope(),
        entering(None),
        scope_of_ours() if _is_ours(self) else _nothing(),
    ):
        return original(self, reference_variable, name, initializer)


def _check_same_strategy(
    optimizer: keras.optimizers.Optimizer, table: keras.Variable | tf.Variable
) -> None:
    """Raise `UnsupportedError` if TensorFlow would refuse to make a slot, without naming it."""
    expected, received = tf.distribute.get_strategy(), optimizer._distribution_strategy
    if received is not expected:
        raise UnsupportedError(
            f"The optimizer {optimizer.name!r} of the table '{table.path}' was made in the scope "
            "of another strategy, or outside of any. Expected: one that is made in that of "
            f"{type(expected).__name__}. Received: one of {type(received).__name__}. Make the "
            "optimizer, as well as the model, within `with strategy.scope():`."
        )


def var_key(
    original: Original, self: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable
) -> Any:
    """`Optimizer._var_key`: find the slots of our variables by their storage."""
    if isinstance(variable, ParameterServerVariable):
        return variable.storage._unique_id
    return original(self, variable)


def apply_weight_decay(
    original: Original,
    self: keras.optimizers.Optimizer,
    variables: Iterable[keras.Variable | tf.Variable],
) -> None:
    """`Optimizer._apply_weight_decay`: decay what a push updates, which may be rows of a table.

    The TensorFlow optimizer's method takes only storages; the base class's takes any values.
    """
    if isinstance(current_phase(), UpdatePhase):
        bases = keras.optimizers.Optimizer.__mro__
        *_, base = (each for each in bases if "_apply_weight_decay" in vars(each))
        base._apply_weight_decay(self, variables)
    else:
        original(self, variables)


def assigning(name: str) -> Callable[..., None]:
    """Return the hook for `Optimizer.assign`, `assign_add` or `assign_sub`.

    In a step it assigns to our variables; Keras would assign to the storage.
    """

    def assign(
        original: Original,
        self: keras.optimizers.Optimizer,
        variable: keras.Variable | tf.Variable,
        value: object,
    ) -> None:
        if current_phase() is not None and isinstance(variable, ParameterServerVariable):
            getattr(variable, name)(value)
        else:
            original(self, variable, value)

    return assign


def _is_ours(optimizer: keras.optimizers.Optimizer) -> bool:
    return getattr(optimizer, "_distribution_strategy", None) is connected_strategy()


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
