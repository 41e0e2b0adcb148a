"""The part of `Optimizer.apply` after clipping, for one variable in any of its forms.

In a push the variable is a shard on its ps, rows of a shard, or a fused variable (`push_apply.py`).
In the trace that finds coupled rows it is a tensor of some rows (`coupling.py`). For
a worker that updates ahead it is a tensor of the step (`update_recorder.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.records.identity import ByIdentity
from kerasps.variables import ParameterServerVariable, entering
from kerasps.variables.rows.sharding import from_start
from kerasps.variables.storage.tensor_like import TensorLike


class Scalars(NamedTuple):
    """The scalars that an update needs beside the gradient; the worker sends them to every ps.

    Holds tensors, their specs, or their names in a graph.
    """

    learning_rate: Any  # a float32 scalar
    # The values of the optimizer's shared state: the iterations, a product of momenta.
    shared: list[Any]
    # The factor that clips accumulated gradients by their global norm; None if the optimizer does
    # not.
    clip_scale: Any = None


class Values(Protocol):
    """The values of some variables while an update works on them."""

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the current value."""


class ValueOf(TensorLike):
    """Represents a variable in `update_step`: its value is the last one assigned to it."""

    def __init__(self, values: Values, variable: ParameterServerVariable) -> None:
        self._values = values
        self._variable = variable

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the variable."""
        return self._variable.storage.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the value."""
        return self.read_value().shape

    def read_value(self) -> tf.Tensor:
        """Return the current value."""
        return self._values.current(self._variable)


class UpdatePhase:
    """A phase in which `update_step` runs; it reads the shared state that the worker sent.

    See `variables.Phase`. A subclass says where all other variables are.

    Args:
        shared: the variables of the shared state, in the order of the scalars.
    """

    hides_constraints = False

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        scalars: Scalars,
        shared: list[ParameterServerVariable],
    ) -> None:
        self.optimizer = optimizer
        self._shared = ByIdentity(zip(shared, scalars.shared, strict=True))
        variable = getattr(optimizer, "_learning_rate", None)
        if isinstance(variable, ParameterServerVariable):
            # The variable itself, as in Keras: in arithmetic a variable accepts a tensor of another
            # dtype, and a tensor does not.
            self.learning_rate = variable
            self._shared[variable] = scalars.learning_rate
        else:
            self.learning_rate = scalars.learning_rate

    def held(self, variable: ParameterServerVariable) -> Any:
        """Return the storage of `variable`: a `tf.Variable` or a `ValueOf`.

        Called for all variables except shared state, as are the next two methods.
        """
        raise NotImplementedError

    def assign_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Set the new value of `variable`."""
        raise NotImplementedError

    def add_to_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Add `value` to `variable`."""
        raise NotImplementedError

    def decay_and_update(self, variable: ParameterServerVariable, gradient: tf.Tensor) -> None:
        """Apply weight decay and `update_step` to `variable`. Call while the phase is entered."""
        self.optimizer._apply_weight_decay([variable])
        self.update(variable, gradient)

    def update(self, variable: ParameterServerVariable, gradient: tf.Tensor) -> None:
        """Run `update_step` on `variable`. Call while the phase is entered."""
        self.optimizer.update_step(gradient, variable, self.learning_rate)

    def choose(
        self, condition: tf.Tensor, then: Callable[[], None], otherwise: Callable[[], None]
    ) -> None:
        """Run `then` if `condition` holds, else `otherwise`."""
        tf.cond(condition, then, otherwise)

    def read(self, variable: ParameterServerVariable) -> Any:
        return self._shared[variable] if variable in self._shared else self.held(variable)

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return self.read(variable).shape

    def source(self, variable: ParameterServerVariable) -> Any:
        value = self.read(variable)
        return value.handle if isinstance(value, tf.Variable) else tf.convert_to_tensor(value)

    def read_rows(
        self, variable: ParameterServerVariable, ids: tf.Tensor, *, from_end: bool
    ) -> tf.Tensor:
        ids = from_start(ids, variable.shape[0]) if from_end else ids
        return tf.gather(self.read(variable), ids)

    def regularizer(
        self, variable: ParameterServerVariable, regularizer: keras.regularizers.Regularizer | None
    ) -> Any:
        return regularizer

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._check(variable)
        self.assign_held(variable, value)

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._check(variable)
        self.add_to_held(variable, value)

    def _check(self, variable: ParameterServerVariable) -> None:
        if variable in self._shared:
            raise UnsupportedError(
                f"Optimizer {self.optimizer.name!r} assigns '{variable.path}' in `update_step`, "
                "which runs on every ps, and no ps sees another's state. Expected: `update_step` "
                "assigns the variable and its slots, kept in lists parallel to the variables. "
                f"Received: an assignment to shared state of shape {tuple(variable.shape)}. Assign "
                "it in `_backend_update_step`, as `keras.optimizers.Nadam` does."
            )


def finish(
    phase: UpdatePhase,
    variable: ParameterServerVariable,
    gradient: tf.Tensor | None,
    clip_scale: tf.Tensor | None,
) -> None:
    """Run the part of an update after clipping, for `variable`.

    Args:
        gradient: its gradient; None moves only its moving average.
        clip_scale: the factor of the accumulated gradient, if the worker has computed it.
    """
    optimizer = phase.optimizer
    with entering(phase):
        if gradient is not None and optimizer.gradient_accumulation_steps:
            _accumulate(phase, variable, gradient, clip_scale)
        elif gradient is not None:
            phase.decay_and_update(variable, gradient)
        if optimizer.use_ema:
            _move_average(optimizer, variable)
        if gradient is not None and variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def _accumulate(
    phase: UpdatePhase,
    variable: ParameterServerVariable,
    gradient: tf.Tensor,
    clip_scale: tf.Tensor | None,
) -> None:
    optimizer = phase.optimizer
    steps = optimizer.gradient_accumulation_steps
    accumulator = optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]

    def accumulate() -> None:
        accumulator.assign_add(gradient)

    def update() -> None:
        mean = (gradient + accumulator) / steps
        mean = optimizer._clip_gradients([mean])[0] if clip_scale is None else mean * clip_scale
        phase.decay_and_update(variable, mean)
        # An operation: `tf.zeros_like` would be a constant of the variable's size.
        accumulator.assign(tf.raw_ops.ZerosLike(x=gradient))

    phase.choose(tf.equal((optimizer._iterations.value + 1) % steps, 0), update, accumulate)


def _move_average(optimizer: keras.optimizers.Optimizer, variable: ParameterServerVariable) -> None:
    # As `BaseOptimizer._update_model_variables_moving_average`, which loops over all variables on
    # all devices.
    average = optimizer._model_variables_moving_average[optimizer._get_variable_index(variable)]
    if average is None:
        return
    frequency = optimizer.ema_overwrite_frequency
    iterations = tf.convert_to_tensor(optimizer.iterations)
    momentum = tf.cast(iterations != 0, variable.dtype) * optimizer.ema_momentum
    average.assign(momentum * average + (1 - momentum) * variable)
    if frequency:
        variable.assign(tf.where((iterations + 1) % frequency == 0, average, variable))
