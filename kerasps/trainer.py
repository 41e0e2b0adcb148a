"""The methods of a model under the strategy: `fit`, `evaluate`, `predict`, and those on one batch."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.adoption import adopt_model, strategy_of
from kerasps.arguments import no_batches, whole_number
from kerasps.dataset_creator import DatasetCreator
from kerasps.datasets import make_input
from kerasps.errors import InputError, KeraspsError
from kerasps.failures import translated_errors
from kerasps.inputs import Input
from kerasps.loop import PREDICT, TEST, TRAIN, Loop, Mode, StepNumbers, warn_of_missing_data
from kerasps.metrics import concatenated, merge_once
from kerasps.placement import COORDINATOR_CPU
from kerasps.step_function import ExecutionResult, StepFunction
from kerasps.variables import come_to_rest


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
    _prepare(model)
    epochs = _capped("epochs", whole_number("epochs", epochs, least=0), _compat.keras_config.max_epochs())
    steps_per_epoch = _steps("steps_per_epoch", steps_per_epoch)
    batch_size = whole_number("batch_size", batch_size)
    validation_batch_size = whole_number("validation_batch_size", validation_batch_size)
    validation_steps = _steps("validation_steps", validation_steps)
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
        steps=steps_per_epoch,
        goes_on=True,
    )
    function = _step_for(model, TRAIN, inputs)
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
            totals = loop.run_epoch(epoch)
            if not totals.steps and not model.stop_training:
                raise no_batches("fit")
            if epoch > initial_epoch and inputs.reads_once and steps_per_epoch is None:
                warn_of_missing_data()
            logs = dict(_compat.pythonify_logs(totals.logs()))
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
    _prepare(model)
    steps, batch_size = _steps("steps", steps), whole_number("batch_size", batch_size)
    inputs = make_input(
        x, model._distribute_strategy.num_workers, y=y, sample_weight=sample_weight, batch_size=batch_size, steps=steps
    )
    logs = _evaluate(model, inputs, steps, callbacks, verbose)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(model: keras.Model, inputs: Input, steps: int | None, callbacks: Any, verbose: Any) -> dict[str, Any]:
    function = _step_for(model, TEST, inputs)
    callbacks = _callback_list(model, callbacks, verbose, 1, steps or inputs.num_batches)
    with translated_errors(model._distribute_strategy):
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        loop = Loop(model, TEST, function, inputs, steps=steps, callbacks=callbacks)
        totals = loop.run_epoch(0)
        if not totals.steps and not model.stop_evaluating:
            raise no_batches("evaluate")
        logs = dict(_compat.pythonify_logs(totals.logs()))
        callbacks.on_test_end(logs)
    return logs


class _Validation:
    """The validation data of one `fit`, made ready once and evaluated after each epoch that asks for it."""

    def __init__(self, model: keras.Model, data: Any, batch_size: int | None, steps: int | None) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._model = model
        self._steps = steps
        try:
            self._inputs = make_input(
                x,
                model._distribute_strategy.num_workers,
                y=y,
                sample_weight=sample_weight,
                batch_size=None if isinstance(x, DatasetCreator) else batch_size,
                steps=steps,
            )
        except InputError as exc:
            raise InputError(f"`validation_data`: {exc}") from exc

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
    _prepare(model)
    strategy = model._distribute_strategy
    steps, batch_size = _steps("steps", steps), whole_number("batch_size", batch_size)
    inputs = make_input(x, strategy.num_workers, batch_size=batch_size, steps=steps, in_order=True)
    function = _step_for(model, PREDICT, inputs)
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
        raise no_batches("predict")
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
    function, result = _run_on_batch(model, mode, batch)
    model.reset_metrics()
    return dict(_compat.pythonify_logs(merge_once(model, function, result)))


def _run_on_batch(model: keras.Model, mode: Mode, batch: tuple[Any, Any, Any]) -> tuple[StepFunction, ExecutionResult]:
    come_to_rest()
    _prepare(model)
    packed = keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(*batch))
    packed = keras.tree.map_structure(_as_tensor, packed)
    spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), packed)
    with translated_errors(model._distribute_strategy):
        function = _step_function(model, mode, spec, in_vectors=False)
        numbers = StepNumbers(model, function)
        with tf.device(COORDINATOR_CPU):
            execution = function.execution(None, 1, checked=False, keeps_totals=False, on_coordinator=True)
        result = function.run_alone(execution, [packed], numbers.take(1))
        numbers.settle(1)
    return function, result


def _as_tensor(value: Any) -> Any:
    if value is None or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor


def _steps(name: str, value: Any) -> int | None:
    steps: int | None = _capped("steps_per_epoch", whole_number(name, value), _compat.keras_config.max_steps_per_epoch())
    return steps


def _step_for(model: keras.Model, mode: Mode, inputs: Input) -> StepFunction:
    """The model's step for batches of `inputs`."""
    try:
        return _step_function(model, mode, inputs.element_spec)
    except (TypeError, ValueError) as exc:
        text = None if isinstance(exc, KeraspsError) else _what_is_wrong(model, mode, inputs)
        if text is None:
            raise
        raise InputError(f"{text} The model's error: {exc}") from exc


def _what_is_wrong(model: keras.Model, mode: Mode, inputs: Input) -> str | None:
    """What may be wrong with the batches for which a step could not be traced."""
    if inputs.differences is not None:
        return (
            "The model takes no batches that are of different shapes on different workers. Received: "
            f"{inputs.differences}. Make `dataset_fn` return the same on each worker."
        )
    _, y, _ = keras.utils.unpack_x_y_sample_weight(inputs.element_spec)
    if y is None and mode is not PREDICT and model._compile_loss is not None:
        return (
            "The model was compiled with a loss, which compares its outputs with y. Expected: y, or a dataset of (x, y). "
            "Received: x alone. Give y, or compile without a loss where the model adds its own (`add_loss`)."
        )
    return None


def _step_function(model: keras.Model, mode: Mode, element_spec: Any, *, in_vectors: bool = True) -> StepFunction:
    """The model's step for batches of `element_spec`; its trace builds what is still to be built, as Keras's does."""
    cached = getattr(model, mode.function)  # `compile` clears it
    if isinstance(cached, StepFunction) and cached.serves(element_spec, in_vectors=in_vectors):
        return cached
    function = StepFunction(model, model._distribute_strategy, element_spec, mode.step, in_vectors=in_vectors)
    setattr(model, mode.function, function)
    return function


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


def _prepare(model: keras.Model) -> None:
    """Makes the model, wherever and by whom it was made, one that the strategy can train."""
    adopt_model(strategy_of(model), model)


def _capped(name: str, value: Any, cap: int | None) -> Any:
    """What the user asked for, or Keras's cap for debugging where that is less."""
    if cap and (not value or cap < value):
        warnings.warn(f"Limiting {name} to {cap}", stacklevel=4)
        return cap
    return value
