"""The Keras variable that lives on a ps task.

`keras.Variable(...)` returns a `ParameterServerVariable` while a `kerasps.ParameterServerStrategy` is current. Outside a
training step it is an ordinary Keras variable whose storage is remote. What it resolves to while a step is traced depends on
the phase, which `phase()` names for the current thread:

* `Compute` (see `compute.py`): the tensor that was pulled for this step; assignments become values of the step;
* `Push` (see `push.py`): the storage itself, and for shared scalars the value that the worker sent;
* `Local` (see `local_phase.py`): a copy on the coordinator, for the methods that run there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat


class Phase(Protocol):
    """What a variable resolves to during one phase of a training step.

    `hides_constraints` says whether a variable shows no constraint, because another phase applies it.
    """

    hides_constraints: bool

    def read(self, variable: ParameterServerVariable) -> Any:
        """The value of `variable`: a tensor or a `tf.Variable`."""

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> Any:
        """Takes the new value of `variable`."""

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> Any:
        """Adds `value` to `variable`."""


class _ThreadState(threading.local):
    phase: Phase | None = None


_STATE = _ThreadState()


def phase() -> Phase | None:
    """The phase that the current thread traces, or None outside a step."""
    return _STATE.phase


@contextlib.contextmanager
def entering(new_phase: Phase | None) -> Iterator[None]:
    """Makes `new_phase` what variables resolve through, in this thread."""
    previous, _STATE.phase = _STATE.phase, new_phase
    try:
        yield
    finally:
        _STATE.phase = previous


class ParameterServerVariable(keras.Variable):
    """A `keras.Variable` whose storage is a `tf.Variable` on a ps task (metric states and seeds: on the coordinator).

    Made by `keras.Variable(...)` and by layers, optimizers and metrics under `strategy.scope()`; the constructor is Keras's.
    The initial value is computed on the task that stores it and never travels. `assign_add` and `assign_sub` are atomic:
    concurrent workers lose nothing.
    """

    _copy: tf.Variable | None = None

    @property
    def storage(self) -> tf.Variable:
        """The `tf.Variable` that holds the value."""
        return self._value

    @property
    def device(self) -> str:
        """The device of the storage, such as `/job:ps/replica:0/task:0/device:CPU:0`."""
        return str(self._value.device)

    def _initialize(self, value: Any) -> None:
        if isinstance(value, tf.Variable):
            self._value = value
            return
        self._create_storage(lambda: tf.cast(value, self._dtype), tuple(value.shape))

    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._create_storage(lambda: initializer(self._shape, dtype=self._dtype), tuple(self._shape))

    def _create_storage(self, initial_value: Any, shape: tuple[int, ...]) -> None:
        extended = tf.distribute.get_strategy().extended
        on_coordinator = is_metric_state(self) or is_seed_state(self)
        with tf.init_scope(), extended.placing(on_coordinator=on_coordinator), entering(None):
            self._value = tf.Variable(initial_value, shape=shape, dtype=self._dtype, trainable=self._trainable, name=self._name)

    def move_to(self, other: ParameterServerVariable) -> None:
        """Moves the storage, with its value, to the device of `other`."""
        value = self._value
        with tf.distribute.get_strategy().extended.colocate_vars_with(other.storage):
            self._create_storage(lambda: value.read_value(), tuple(value.shape))

    def local_copy(self) -> tf.Variable:
        """A `tf.Variable` on the coordinator that takes the value at `refresh_copy`; the storage itself where it is there."""
        if "/job:ps" not in self.device:
            return self._value
        if self._copy is None:
            with tf.init_scope():
                self._copy = tf.Variable(self._value.read_value(), trainable=self._trainable, name=self._name)
        return self._copy

    def refresh_copy(self) -> None:
        """Brings the local copy up to date."""
        copy = self.local_copy()
        if copy is not self._value:
            copy.assign(self._value.read_value())

    def _resolves_through(self) -> Phase | None:
        """The phase that this variable resolves through now; a `keras.StatelessScope` that holds it goes first."""
        current = _STATE.phase
        if current is None or self._value is None:
            return None
        scope = _compat.get_stateless_scope()
        if scope is not None and scope.get_current_value(self) is not None:
            return None
        return current

    @property
    def value(self) -> Any:
        current = self._resolves_through()
        if current is None:
            return super().value
        value = current.read(self)
        if self._trainable and not isinstance(value, tf.Variable):
            _compat.record_variable_access(self)
        return self._maybe_autocast(value)

    @property
    def handle(self) -> Any:
        # A GradientTape takes gradients with respect to this: in a step, the pulled tensor.
        current = self._resolves_through()
        if current is None:
            return self._value.handle
        value = current.read(self)
        return value.handle if isinstance(value, tf.Variable) else value

    def assign(self, value: Any) -> Any:
        if _STATE.phase is None or _compat.get_stateless_scope() is not None:
            return super().assign(value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if not value.shape.is_compatible_with(self.shape):
            raise ValueError(
                f"A new value must have the variable's shape. Expected: {tuple(self.shape)} for variable '{self.path}'. "
                f"Received: {value.shape}."
            )
        _STATE.phase.assign(self, value)
        return value

    def assign_add(self, value: Any) -> Any:
        if _compat.get_stateless_scope() is not None:
            return super().assign_add(value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if _STATE.phase is None:
            self._value.assign_add(value, read_value=False)
        else:
            _STATE.phase.assign_add(self, value)
        return self.value

    def assign_sub(self, value: Any) -> Any:
        return self.assign_add(-self._convert_to_tensor(value, dtype=self._dtype))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # what comes from a ps is a copy
        return np.asarray(tf.convert_to_tensor(self.value).numpy(), dtype)

    @property
    def constraint(self) -> Any:
        # `Optimizer.apply` would run it on the worker, on the value from before the update; the push runs it on the ps.
        return None if _STATE.phase is not None and _STATE.phase.hides_constraints else self._constraint

    @constraint.setter
    def constraint(self, value: Any) -> None:
        keras.Variable.constraint.fset(self, value)


def is_metric_state(variable: keras.Variable) -> bool:
    """Whether `variable` is the state of a metric: Keras marks these, and these alone, as synchronized on read."""
    return bool(variable.synchronization == "on_read")


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether `variable` is the state of a `keras.random.SeedGenerator`: two integers, the seed and a counter."""
    return bool(variable.name == "seed_generator_state" and tuple(variable.shape) == (2,))


def make_parameter_server_variable(cls: type, *args: Any, **kwargs: Any) -> keras.Variable:
    """`keras.Variable.__new__` once a strategy exists: makes ours while one of our strategies is current."""
    if cls is keras.Variable and hasattr(tf.distribute.get_strategy().extended, "placing"):
        return object.__new__(ParameterServerVariable)
    return object.__new__(cls)
