"""The method that a step calls: a model's, as in `fit`, or a function of a custom loop."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kerasps.step.compute.returned import Returned, noting_results
from kerasps.step.records.identity import IdentitySet
from kerasps.step.updates.optimizers import is_keras_method
from kerasps.variables import is_seed_state
from kerasps.variables.keras.slots import optimizers_of


class Method:
    """A method that a `Tracer` traces. A model's overrides what this class says of a function."""

    name: str  # for messages
    whose = ""  # the text that names its owner, for messages
    owner: keras.Model | None = None  # the model that has it
    jit_compile = False  # whether XLA compiles it

    def expected(self) -> list[Any]:
        """Return the variables that it probably reads, except the states of metrics."""
        return []

    def expected_metrics(self, element_spec: object) -> list[Any]:
        """Return the states of metrics that it probably adds to. Call in the strategy's scope."""
        del element_spec
        return []

    def optimizers(self) -> list[Any]:
        """Return the optimizers that it probably applies."""
        return []

    def call(self, batch: object) -> Returned:
        """Call the method, in the compute phase."""
        raise NotImplementedError


class ModelMethod(Method):
    """A method of a model (see `Method`)."""

    def __init__(self, model: keras.Model, method: str) -> None:
        self._model = self.owner = model
        self._method = method
        self.name, self.whose = f"`{method}`", f" of model '{model.name}'"
        self.jit_compile = bool(model.jit_compile)

    def expected(self) -> list[Any]:
        others = IdentitySet(self._model.metrics_variables)
        # Layers mostly draw random numbers only in training.
        draws = self._method == "train_step"
        return [
            v for v in self._model.variables if v not in others and (draws or not is_seed_state(v))
        ]

    def expected_metrics(self, element_spec: object) -> list[Any]:
        if self._method == "predict_step":
            return []
        self._make_metrics(element_spec)
        return list(self._model.metrics_variables)

    def optimizers(self) -> list[Any]:
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
