"""Running Keras's own methods on the coordinator: variables resolve to local copies of what the ps tasks hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat, variables
from kerasps.errors import UnsupportedError
from kerasps.variables import ParameterServerVariable


class Local:
    """The phase in which variables are copies on the coordinator, as of when it was entered (see `variables.Phase`)."""

    hides_constraints = False

    def __init__(self, model: keras.Model) -> None:
        for variable in model.variables:
            if isinstance(variable, ParameterServerVariable):
                self.read(variable)
                variable.refresh_copy()

    def read(self, variable: ParameterServerVariable) -> tf.Variable:
        return variable.local_copy()

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return variable.storage.shape

    def source(self, variable: ParameterServerVariable) -> tf.Tensor:
        return self.read(variable).handle

    def take(self, variable: ParameterServerVariable, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.read(variable), ids)

    def regularizer(self, variable: ParameterServerVariable, regularizer: Any) -> Any:
        return regularizer

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._writable(variable).assign(value)

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._writable(variable).assign_add(value)

    def _writable(self, variable: ParameterServerVariable) -> tf.Variable:
        storage = self.read(variable)
        if storage is not variable.storage:
            raise UnsupportedError(
                f"'{variable.path}' was assigned while the model ran on the coordinator, on a copy of its weights. Expected: "
                "`evaluate` and `predict` leave weights alone; metrics and seeds may change. Received: an assignment of shape "
                f"{tuple(variable.shape)}. Assign weights in `train_step`, or outside the call."
            )
        return storage


@contextlib.contextmanager
def on_coordinator(model: keras.Model) -> Iterator[None]:
    """While active, `model` is a plain Keras model in this process, with the weights that it has on the ps now."""
    strategy = model._distribute_strategy
    mode = _compat.get_default_replica_mode()
    _compat.push_per_thread_mode(mode)
    model._distribute_strategy = None
    try:
        with tf.device(None), variables.entering(Local(model)):
            yield
    finally:
        model._distribute_strategy = strategy
        _compat.pop_per_thread_mode()
