"""`fit`, `evaluate` and `predict` of a model under the strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras

from kerasps import _compat
from kerasps.dynamic import count_rows
from kerasps.errors import InputError
from kerasps.inputs import DatasetCreator, Input, as_input, no_batches, whole_number
from kerasps.runtime.errors import translated_errors
from kerasps.step import PREDICT, TEST, TRAIN, TracedStep
from kerasps.step.running.make_step import step_for
from kerasps.training.backup.backup_callback import FitBackups
from kerasps.training.contract.host import host_of
from kerasps.training.loop.loop import Loop, warn_of_missing_data
from kerasps.training.loop.outputs import concatenated
from kerasps.training.loop.predictions import Predictions
from kerasps.training.methods.keras_rules import check_compiled, is_validated, plain_logs
from kerasps.training.methods.prepare import build_stateful, first_batch_of, prepare
from kerasps.variables import wait_for_steps


def fit(
    model: keras.Model,
    x: object = None,
    y: object = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: object = "auto",
    callbacks: object = None,
    validation_split: float = 0.0,
    validation_data: object = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: object = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: object = 1,
) -> keras.callbacks.History:
    """`keras.Model.fit` on the workers of the model's strategy; the arguments are Keras's."""
    check_compiled(model)
    wait_for_steps()
    prepare(model)
    epochs = _capped("epochs", whole_number("epochs", epochs, least=0), keras.config.max_epochs())
    steps_per_epoch = _steps("steps_per_epoch", steps_per_epoch)
    batch_size = whole_number("batch_size", batch_size)
    validation_batch_size = whole_number("validation_batch_size", validation_batch_size)
    validation_steps = _steps("validation_steps", validation_steps)
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = _compat.train_validation_split(
            (x, y, sample_weight), validation_split=validation_split
        )
    host = host_of(model)
    inputs, callbacks = host.begin_fit(
        x,
        callbacks,
        y=y,
        sample_weight=sample_weight,
        class_weight=class_weight,
        batch_size=batch_size,
        shuffle=shuffle,
        steps=steps_per_epoch,
        goes_on=True,
    )
    build_stateful(model, lambda: first_batch_of(x, batch_size, steps_per_epoch))
    # Before the step builds the metrics: as in Keras, new ones begin with their initial values.
    model.reset_metrics()
    function = step_for(model, TRAIN, inputs)
    host.before_steps(model, TRAIN, function, inputs)
    callbacks = _callback_list(
        model, callbacks, verbose, epochs, steps_per_epoch or inputs.num_batches, add_history=True
    )
    validation = None
    if validation_data is not None:
        size = validation_batch_size or batch_size
        validation = _Validation(model, validation_data, size, validation_steps, validation_freq)
    numbers = range(initial_epoch, epochs)
    _train(model, function, inputs, callbacks, numbers, validation, steps=steps_per_epoch)
    return model.history


def _train(
    model: keras.Model,
    function: TracedStep,
    inputs: Input,
    callbacks: keras.callbacks.CallbackList,
    epochs: range,
    validation: _Validation | None,
    *,
    steps: int | None,
) -> None:
    """Run the epochs of a `fit` with its backups, while its traffic and staleness are measured."""
    host = host_of(model)
    host.traffic_meter.start(function.traffic)
    host.staleness_meter.start(function.devices)
    backups = FitBackups(
        model, callbacks, function, None if validation is None else validation.inputs
    )
    loop = Loop(model, TRAIN, function, inputs, steps=steps, callbacks=callbacks)
    loop.on_turn = lambda: backups.at_turn(loop)
    # The errors are translated before the backups see them.
    with host.run_meter.fit(), backups, translated_errors(host):
        # A second pass over data that can be read only once is empty, and Keras warns of that.
        warns = inputs.reads_once and steps is None
        _run_epochs(model, loop, callbacks, backups, epochs, validation, warns=warns)
        host.staleness_meter.finish()


def _run_epochs(
    model: keras.Model,
    loop: Loop,
    callbacks: keras.callbacks.CallbackList,
    backups: FitBackups,
    epochs: range,
    validation: _Validation | None,
    *,
    warns: bool,
) -> None:
    """Run the epochs of a `fit`."""
    model.stop_training = False
    callbacks.on_train_begin()
    logs = None
    first_epoch = backups.resume(loop)
    if first_epoch is None:
        # `BackupAndRestore` may have restored a backup of plain Keras.
        first_epoch = model._initial_epoch or epochs.start
    for epoch in range(first_epoch, epochs.stop):
        if epoch > first_epoch:
            model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        backups.epoch = epoch
        totals = loop.run_epoch(epoch)
        if not totals.steps and not model.stop_training:
            raise no_batches("fit")
        if warns and epoch > first_epoch:
            warn_of_missing_data()
        logs = plain_logs(totals.logs())
        count_rows(model.weights)
        if validation is not None:
            with backups.in_validation(loop):
                logs.update(validation.logs(epoch, callbacks, backups.stop_if_preempted))
        callbacks.on_epoch_end(epoch, logs)
        backups.at_epoch_end(loop)
        if model.stop_training:
            break
    if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs.stop > 0:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    backups.finish()
    callbacks.on_train_end(logs=logs)


def evaluate(
    model: keras.Model,
    x: object = None,
    y: object = None,
    batch_size: int | None = None,
    verbose: object = "auto",
    sample_weight: object = None,
    steps: int | None = None,
    callbacks: object = None,
    return_dict: bool = False,
    **kwargs: object,
) -> Any:
    """`keras.Model.evaluate` on the workers of the model's strategy; the arguments are Keras's."""
    check_compiled(model)
    if kwargs:
        raise ValueError(f"Arguments not recognized: {kwargs}")
    wait_for_steps()
    prepare(model)
    steps, batch_size = _steps("steps", steps), whole_number("batch_size", batch_size)
    inputs = as_input(
        x,
        host_of(model).num_readers,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps=steps,
    )
    build_stateful(model, lambda: first_batch_of(x, batch_size, steps))
    logs = _evaluate(model, inputs, steps, callbacks, verbose)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(
    model: keras.Model,
    inputs: Input,
    steps: int | None,
    callbacks: object,
    verbose: object,
    on_turn: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    model.reset_metrics()  # before the step builds new ones
    function = step_for(model, TEST, inputs)
    host_of(model).before_steps(model, TEST, function, inputs)
    callback_list = _callback_list(model, callbacks, verbose, 1, steps or inputs.num_batches)
    with translated_errors(host_of(model)):
        model.stop_evaluating = False
        callback_list.on_test_begin()
        loop = Loop(model, TEST, function, inputs, steps=steps, callbacks=callback_list)
        loop.on_turn = on_turn
        totals = loop.run_epoch(0)
        if not totals.steps and not model.stop_evaluating:
            raise no_batches("evaluate")
        logs = plain_logs(totals.logs())
        callback_list.on_test_end(logs)
    return logs


class _Validation:
    """The validation data of one `fit`, evaluated after each epoch that asks for it."""

    def __init__(
        self,
        model: keras.Model,
        data: object,
        batch_size: int | None,
        steps: int | None,
        frequency: object,
    ) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._model = model
        self._steps = steps
        self._frequency = frequency
        try:
            self.inputs = as_input(
                x,
                host_of(model).num_readers,
                y=y,
                sample_weight=sample_weight,
                batch_size=None if isinstance(x, DatasetCreator) else batch_size,
                steps=steps,
            )
        except InputError as exc:
            raise InputError(f"`validation_data`: {exc}") from exc

    def logs(
        self, epoch: int, callbacks: keras.callbacks.CallbackList, on_turn: Callable[[], None]
    ) -> dict[str, Any]:
        """Return the validation's part of the logs of an epoch; empty if it is not validated."""
        if not is_validated(epoch, self._frequency):
            return {}
        logs = _evaluate(
            self._model, self.inputs, self._steps, callbacks, verbose=0, on_turn=on_turn
        )
        return {f"val_{name}": value for name, value in logs.items()}


def predict(
    model: keras.Model,
    x: object,
    batch_size: int | None = None,
    verbose: object = "auto",
    steps: int | None = None,
    callbacks: object = None,
) -> Any:
    """`keras.Model.predict` on the workers of the model's strategy; rows keep the input's order."""
    wait_for_steps()
    prepare(model)
    host = host_of(model)
    steps, batch_size = _steps("steps", steps), whole_number("batch_size", batch_size)
    inputs = as_input(x, host.num_readers, batch_size=batch_size, steps=steps, in_order=True)
    build_stateful(model, lambda: first_batch_of(x, batch_size, steps))
    function = step_for(model, PREDICT, inputs)
    host.before_steps(model, PREDICT, function, inputs)
    callback_list = _callback_list(model, callbacks, verbose, 1, steps or inputs.num_batches)
    predictions = Predictions(inputs.num_splits)
    with translated_errors(host):
        model.stop_predicting = False
        callback_list.on_predict_begin()
        Loop(
            model,
            PREDICT,
            function,
            inputs,
            steps=steps,
            callbacks=callback_list,
            predictions=predictions,
        ).run_epoch(0)
        callback_list.on_predict_end()
    if not predictions.reported:
        raise no_batches("predict")
    return concatenated(predictions.reported)


def _steps(name: str, value: object) -> int | None:
    steps: int | None = _capped(
        "steps_per_epoch", whole_number(name, value), keras.config.max_steps_per_epoch()
    )
    return steps


def _callback_list(
    model: keras.Model,
    callbacks: object,
    verbose: object,
    epochs: int,
    steps: int | None,
    add_history: bool = False,
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


def _capped(name: str, value: Any, cap: int | None) -> Any:
    """Return the user's value, or Keras's cap for debugging if that is less."""
    if cap and (not value or cap < value):
        warnings.warn(f"Limiting {name} to {cap}", stacklevel=4)
        return cap
    return value
