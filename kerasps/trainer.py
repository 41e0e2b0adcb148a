"""The methods of a model under the strategy: `fit`, `evaluate`, `predict`, and those on one batch."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.datasets import make_input
from kerasps.errors import InputError, UnsupportedError
from kerasps.failures import translated_errors
from kerasps.inputs import Input
from kerasps.loop import PREDICT, TEST, TRAIN, Loop, Mode, StepNumbers
from kerasps.metrics import concatenated, merge_once
from kerasps.optimizers import check_optimizer
from kerasps.placement import COORDINATOR_CPU
from kerasps.step_function import ExecutionResult, StepFunction, optimizers_of
from kerasps.strategy import ParameterServerStrategy
from kerasps.variables import come_to_rest


def is_ours(model: keras.Model) -> bool:
    """Whether `model` was made under a `kerasps.ParameterServerStrategy`."""
    return isinstance(model._distribute_strategy, ParameterServerStrategy)


def fit(
    original: Any,
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> keras.callbacks.History:
    """`keras.Model.fit` on the workers of the model's strategy; the arguments are Keras's."""
    del original
    model._assert_compile_called("fit")
    come_to_rest()
    _check_model(model)
    epochs = _capped("epochs", epochs, _compat.keras_config.max_epochs())
    steps_per_epoch = _capped("steps_per_epoch", steps_per_epoch, _compat.keras_config.max_steps_per_epoch())
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = _compat.train_validation_split(
            (x, y, sample_weight), validation_split=validation_split
        )
    strategy = model._distribute_strategy
    inputs = make_input(
        x,
        strategy.num_workers,
        y=y,
        sample_weight=sample_weight,
        class_weight=class_weight,
        batch_size=batch_size,
        shuffle=shuffle,
    )
    function = _step_function(model, TRAIN, inputs.element_spec)
    callbacks = _callback_list(model, callbacks, verbose, epochs, steps_per_epoch or inputs.num_batches, add_history=True)
    validation = None
    if validation_data is not None:
        validation = _Validation(model, validation_data, validation_batch_size or batch_size, validation_steps)
    strategy.load_meter.start(function.traffic)
    loop = Loop(model, TRAIN, function, inputs, steps=steps_per_epoch, callbacks=callbacks)
    model.stop_training = False
    with translated_errors(strategy):
        callbacks.on_train_begin()
        logs = None
        initial_epoch = model._initial_epoch or initial_epoch
        for epoch in range(initial_epoch, epochs):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            logs = dict(_compat.pythonify_logs(loop.run_epoch(epoch).logs()))
            if validation is not None and model._should_eval(epoch, validation_freq):
                logs.update({f"val_{name}": value for name, value in validation.evaluate(callbacks).items()})
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs=logs)
    return model.history


def evaluate(
    original: Any,
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    **kwargs: Any,
) -> Any:
    """`keras.Model.evaluate` on the workers of the model's strategy; the arguments are Keras's."""
    del original
    model._assert_compile_called("evaluate")
    if kwargs:
        raise ValueError(f"Arguments not recognized: {kwargs}")
    come_to_rest()
    steps = _capped("steps_per_epoch", steps, _compat.keras_config.max_steps_per_epoch())
    inputs = make_input(
        x, model._distribute_strategy.num_workers, y=y, sample_weight=sample_weight, batch_size=batch_size, limit=steps
    )
    logs = _evaluate(model, inputs, steps, callbacks, verbose)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(model: keras.Model, inputs: Input, steps: int | None, callbacks: Any, verbose: Any) -> dict[str, Any]:
    _check_model(model)
    function = _step_function(model, TEST, inputs.element_spec)
    callbacks = _callback_list(model, callbacks, verbose, 1, steps or inputs.num_batches)
    with translated_errors(model._distribute_strategy):
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        loop = Loop(model, TEST, function, inputs, steps=steps, callbacks=callbacks)
        logs = dict(_compat.pythonify_logs(loop.run_epoch(0).logs()))
        callbacks.on_test_end(logs)
    return logs


class _Validation:
    """The validation data of one `fit`, made ready once and evaluated after each epoch that asks for it."""

    def __init__(self, model: keras.Model, data: Any, batch_size: int | None, steps: int | None) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        arrays = y is not None
        self._model = model
        self._steps = _capped("steps_per_epoch", steps, _compat.keras_config.max_steps_per_epoch())
        self._inputs = make_input(
            x,
            model._distribute_strategy.num_workers,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size if arrays else None,
            limit=self._steps,
        )

    def evaluate(self, callbacks: Any) -> dict[str, Any]:
        return _evaluate(self._model, self._inputs, self._steps, callbacks, verbose=0)


def predict(
    original: Any,
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """`keras.Model.predict` on the workers of the model's strategy; rows come in the order of the input."""
    del original
    come_to_rest()
    strategy = model._distribute_strategy
    steps = _capped("steps_per_epoch", steps, _compat.keras_config.max_steps_per_epoch())
    inputs = make_input(x, strategy.num_workers, batch_size=batch_size, limit=steps, in_order=True)
    function = _step_function(model, PREDICT, inputs.element_spec)
    callbacks = _callback_list(model, callbacks, verbose, 1, steps or inputs.num_batches)
    batches: dict[int, Any] = {}

    def take(result: ExecutionResult, part: int | None, first: int) -> None:
        # A part has every so-manieth batch of the input.
        for index, outputs in enumerate(result.outputs, start=first):
            batches[index if part is None else index * strategy.num_workers + part] = outputs

    with translated_errors(strategy):
        model.stop_predicting = False
        callbacks.on_predict_begin()
        Loop(model, PREDICT, function, inputs, steps=steps, callbacks=callbacks, take=take).run_epoch(0)
        callbacks.on_predict_end()
    if not batches:
        raise InputError("There is nothing to predict. Expected: at least one batch. Received: x without any.")
    return concatenated([batches[index] for index in sorted(batches)])


def train_on_batch(
    original: Any,
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """`keras.Model.train_on_batch`: computes on the coordinator and pushes to the ps, like a step of `fit`.

    Metrics are those of this batch alone, under every version of Keras; Keras 3.12 itself adds them up from call to call.
    """
    del original
    model._assert_compile_called("train_on_batch")
    if class_weight is not None:
        if sample_weight is not None:
            raise InputError("Give `class_weight` or `sample_weight` to `train_on_batch`. Received: both.")
        sample_weight = _compat.class_weight_to_sample_weights(y, class_weight)
    logs = _logs_on_batch(model, TRAIN, (x, y, sample_weight))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def test_on_batch(
    original: Any, model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
) -> Any:
    """`keras.Model.test_on_batch`, on the coordinator."""
    del original
    model._assert_compile_called("test_on_batch")
    logs = _logs_on_batch(model, TEST, (x, y, sample_weight))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def predict_on_batch(original: Any, model: keras.Model, x: Any) -> Any:
    """`keras.Model.predict_on_batch`, on the coordinator."""
    del original
    _, result = _run_on_batch(model, PREDICT, (x, None, None))
    return concatenated(result.outputs)


def _logs_on_batch(model: keras.Model, mode: Mode, batch: tuple[Any, Any, Any]) -> dict[str, Any]:
    _check_model(model)
    function, result = _run_on_batch(model, mode, batch)
    model.reset_metrics()
    return dict(_compat.pythonify_logs(merge_once(model, function, result)))


def _run_on_batch(model: keras.Model, mode: Mode, batch: tuple[Any, Any, Any]) -> tuple[StepFunction, ExecutionResult]:
    come_to_rest()
    packed = keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(*batch))
    packed = keras.tree.map_structure(_as_tensor, packed if isinstance(packed, tuple) else (packed,))
    spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), packed)
    with translated_errors(model._distribute_strategy):
        function = _step_function(model, mode, spec, in_vectors=False)
        numbers = StepNumbers(model, function)
        with tf.device(COORDINATOR_CPU):
            execution = function.execution(None, 1, checked=False, keeps_totals=False)
            function.begin()
            try:
                result = function.run(execution, [packed], numbers.take(1))
            finally:
                function.end()
        numbers.settle(1)
    return function, result


def _as_tensor(value: Any) -> Any:
    if value is None or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor


def _step_function(model: keras.Model, mode: Mode, element_spec: Any, *, in_vectors: bool = True) -> StepFunction:
    """The model's step for batches of `element_spec`; builds model and optimizer where that is still to do."""
    cached = getattr(model, mode.function)  # `compile` clears it
    if isinstance(cached, StepFunction) and cached.serves(element_spec, in_vectors=in_vectors):
        return cached
    _build(model, mode, element_spec)
    function = StepFunction(model, model._distribute_strategy, element_spec, mode.step, in_vectors=in_vectors)
    setattr(model, mode.function, function)
    return function


def _build(model: keras.Model, mode: Mode, element_spec: Any) -> None:
    batch = keras.tree.map_structure(_symbolic, element_spec)
    with model._distribute_strategy.scope():
        if mode is not PREDICT:
            model._symbolic_build(data_batch=batch)
        elif not all(layer.built for layer in model._flatten_layers()):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            _compat.compute_output_spec(model, x, training=False)


def _symbolic(spec: Any) -> Any:
    if not hasattr(spec, "shape"):  # that of None
        return None
    shape, dtype = tuple(spec.shape), spec.dtype.name
    if isinstance(spec, tf.RaggedTensorSpec):
        ragged = {"ragged_rank": spec.ragged_rank, "row_splits_dtype": spec.row_splits_dtype}
        return keras.KerasTensor(shape, dtype, ragged=True, **ragged)
    return keras.KerasTensor(shape, dtype, sparse=isinstance(spec, tf.SparseTensorSpec))


def _callback_list(
    model: keras.Model, callbacks: Any, verbose: Any, epochs: int, steps: int | None, add_history: bool = False
) -> keras.callbacks.CallbackList:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=add_history,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def _check_model(model: keras.Model) -> None:
    for optimizer in optimizers_of(model):
        check_optimizer(optimizer)
    if model.run_eagerly:
        raise UnsupportedError(
            "A step runs on the workers as a graph. Expected: `run_eagerly=False` in `compile`. Received: "
            "run_eagerly=True. To debug a step eagerly, run the same model outside `strategy.scope()`."
        )


def _capped(name: str, value: Any, cap: int | None) -> Any:
    """What the user asked for, or Keras's cap for debugging where that is less."""
    if cap and (not value or cap < value):
        warnings.warn(f"Limiting {name} to {cap}", stacklevel=4)
        return cap
    return value
