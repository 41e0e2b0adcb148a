"""All that follows clipping in `Optimizer.apply`, for one variable, whatever the variable is to it.

In a push that is a shard on its ps, rows of one, or a fused variable (`push_apply.py`). In the
trace that finds what an update couples it is a tensor that stands for the whole variable
(`traced_update.py`). For a worker that looks ahead it is a tensor of the step
(`update_recorder.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.records.identity import ByIdentity
from kerasps.variables import ParameterServerVariable, entering
from kerasps.variables.sharding import from_start
from kerasps.variables.tensor_like import TensorLike


class Scalars(NamedTuple):
    """The scalars that an update needs beside the gradient; the worker sends them to every ps.

    Holds tensors, their specs, or their names in a graph.

    Attributes:
        learning_rate: a float32 scalar.
        shared: the values of the optimizer's shared state: the iterations, a product of momenta.
        clip_scale: the factor of accumulated gradients that clips them by their global norm; None
            where the optimizer does not.
    """

    learning_rate: Any
    shared: list[Any]
    clip_scale: Any = None


class Values(Protocol):
    """The values of some variables while an update works on them."""

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the value as it stands."""


class ValueOf(TensorLike):
    """Stands for a variable in `update_step`: its value is what was assigned to it last."""

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
        """Return the value as it stands."""
        return self._values.current(self._variable)


class UpdatePhase:
    """A phase in which `update_step` runs; shared state is what the worker sent for it.

    See `variables.Phase`. Who derives from it says where all other variables are.

    Args:
        optimizer: the `keras.optimizers.Optimizer`.
        scalars: its learning rate and shared state.
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
            # Handed on as Keras does: in arithmetic a variable takes a tensor of another dtype, and
            # a tensor does not.
            self.learning_rate = variable
            self._shared[variable] = scalars.learning_rate
        else:
            self.learning_rate = scalars.learning_rate

    def held(self, variable: ParameterServerVariable) -> Any:
        """Return what holds the value of `variable`: a `tf.Variable` or a `ValueOf`.

        Called for all variables but shared state, as are the next two.
        """
        raise NotImplementedError

    def assign_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Take the new value of `variable`."""
        raise NotImplementedError

    def add_to_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Add `value` to `variable`."""
        raise NotImplementedError

    def decay_and_update(self, variable: ParameterServerVariable, gradient: tf.Tensor) -> None:
        """Apply weight decay and `update_step` to `variable`. Call while the phase is entered."""
        self.optimizer._apply_weight_decay([variable])
        self.update(variable, gradient)

    def update(self, variable: ParameterServerVariable, gradient: tf.Tensor) -> None:
        """Do what `update_step` does to `variable`. Call while the phase is entered."""
        self.optimizer.update_step(gradient, variable, self.learning_rate)

    def choose(
        self, condition: tf.Tensor, then: Callable[[], None], otherwise: Callable[[], None]
    ) -> None:
        """Do what `then` does where `condition` holds, else what `otherwise` does."""
        tf.cond(condition, then, otherwise)

    def read(self, variable: ParameterServerVariable) -> Any:
        return self._shared[variable] if variable in self._shared else self.held(variable)

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return self.read(variable).shape

    def source(self, variable: ParameterServerVariable) -> Any:
        value = self.read(variable)
        return value.handle if isinstance(value, tf.Variable) else tf.convert_to_tensor(value)

    def take(
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
    """Do all that follows clipping, for `variable`.

    Args:
        phase: the phase to do it in.
        variable: what is updated.
        gradient: its gradient; without one, its moving average follows it all the same.
        clip_scale: the factor of the accumulated gradient, where the worker has worked that out.
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
        # An operation, where `tf.zeros_like` would be a constant of the variable's size.
        accumulator.assign(tf.raw_ops.ZerosLike(x=gradient))

    phase.choose(tf.equal((optimizer._iterations.value + 1) % steps, 0), update, accumulate)


def _move_average(optimizer: keras.optimizers.Optimizer, variable: ParameterServerVariable) -> None:
    # As `BaseOptimizer._update_model_variables_moving_average`, which goes through all variables
    # wherever they are.
    average = optimizer._model_variables_moving_average[optimizer._get_variable_index(variable)]
    if average is None:
        return
    frequency = optimizer.ema_overwrite_frequency
    iterations = tf.convert_to_tensor(optimizer.iterations)
    momentum = tf.cast(iterations != 0, variable.dtype) * optimizer.ema_momentum
    average.assign(momentum * average + (1 - momentum) * variable)
    if frequency:
        variable.assign(tf.where((iterations + 1) % frequency == 0, average, variable))
