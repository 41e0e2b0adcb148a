"""The method that a step calls: a model's, as in `fit`, or a function of a custom loop."""

from __future__ import annotations

from typing import Any, Protocol

import keras
import tensorflow as tf

from kerasps.step.compute.returned import Returned, noting_results
from kerasps.step.records.identity import IdentitySet
from kerasps.step.updates.optimizers import is_keras_method
from kerasps.variables import is_seed_state
from kerasps.variables.keras.slots import optimizers_of


class Method(Protocol):
    """A method that a `Tracer` traces."""

    @property
    def name(self) -> str:
        """The name of the method, for messages."""

    @property
    def whose(self) -> str:
        """The text that names the method's owner, for messages; empty without one."""

    @property
    def owner(self) -> object | None:
        """The model that has the method; None if it is a function."""

    @property
    def jit_compile(self) -> bool:
        """True if XLA compiles the method."""

    def expected(self) -> list[Any]:
        """Return the variables that it probably reads, except the states of metrics."""

    def expected_metrics(self, element_spec: object) -> list[Any]:
        """Return the states of metrics that it probably adds to. Call in the strategy's scope."""

    def optimizers(self) -> list[Any]:
        """Return the optimizers that it probably applies."""

    def call(self, batch: object) -> Returned:
        """Call the method, in the compute phase."""


class ModelMethod:
    """A method of a model (see `Method`)."""

    def __init__(self, model: keras.Model, method: str) -> None:
        self._model = model
        self._method = method

    @property
    def name(self) -> str:
        """The name of the method, for messages."""
        return f"`{self._method}`"

    @property
    def whose(self) -> str:
        """The text that names its model, for messages."""
        return f" of model '{self._model.name}'"

    @property
    def owner(self) -> keras.Model:
        """The model."""
        return self._model

    @property
    def jit_compile(self) -> bool:
        """True if the model was compiled with `jit_compile`."""
        return bool(self._model.jit_compile)

    def expected(self) -> list[Any]:
        """Return the model's variables, except the states of metrics."""
        others = IdentitySet(self._model.metrics_variables)
        # Layers mostly draw random numbers only in training.
        draws = self._method == "train_step"
        return [
            v for v in self._model.variables if v not in others and (draws or not is_seed_state(v))
        ]

    def expected_metrics(self, element_spec: object) -> list[Any]:
        """Return the states of the model's metrics."""
        if self._method == "predict_step":
            return []
        self._make_metrics(element_spec)
        return list(self._model.metrics_variables)

    def optimizers(self) -> list[Any]:
        """Return the model's optimizers."""
        return list(optimizers_of(self._model)) if self._method == "train_step" else []

    def _make_metrics(self, element_spec: object) -> None:
        """Make the metrics that `compile` was given by name, if their shapes are known.

        Keras makes them in the first step, whose trace would then be repeated.
        """
        model = self._model
        metrics = model._compile_metrics
        _, y, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
        if metrics is None or metrics.built or not isinstance(y, tf.TensorSpec):
            return
        output = _only_output(model)
        if output is None or not all(is_keras_method(type(model), name) for name in _MAKE_METRICS):
            return
        metrics.build(keras.KerasTensor(y.shape, y.dtype.name), output)

    def call(self, batch: object) -> Returned:
        """Call the method."""
        method = getattr(self._model, self._method)
        if self._method == "predict_step":
            return Returned(predicted=tf.nest.map_structure(_as_tensor, method(batch)))
        with noting_results(self._model.metrics) as results:
            logs = method(batch)
        return Returned.of_logs(logs, self._model, results)


# Methods of a model on which it depends whether a step makes the metrics, and of which shapes.
_MAKE_METRICS = ("train_step", "test_step", "compute_metrics", "call")


def _only_output(model: keras.Model) -> keras.KerasTensor | None:
    """Return the symbolic output of a functional or sequential model that has one, and no dict."""
    if isinstance(model, keras.Sequential):
        outputs = getattr(model, "outputs", None)  # it has none before it is built
        return outputs[0] if outputs else None
    is_functional = getattr(model, "outputs", None) is not None
    output = model.output if is_functional else None
    return output if isinstance(output, keras.KerasTensor) else None


def _as_tensor(value: object) -> Any:
    is_composite = isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
    return value if is_composite else tf.convert_to_tensor(value)
