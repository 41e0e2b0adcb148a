"""The driver behind `model.fit`, and the other methods of a model under the strategy."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.dataset_creator import DatasetCreator
from kerasps.dispatcher import EXECUTIONS_AHEAD, Dispatcher, translated_errors
from kerasps.errors import InputError, UnsupportedError
from kerasps.inputs import Execution, WorkerInput, worker_input
from kerasps.local_phase import on_coordinator
from kerasps.metrics import BatchCallbacks, MetricTotals, listen_to_batches, merge_once
from kerasps.optimizers import check_optimizer
from kerasps.placement import COORDINATOR_CPU
from kerasps.strategy import ParameterServerStrategy
from kerasps.train_function import TrainFunction, optimizers_of

# What steps add up to may stay on a worker for so long where no callback asks for it with each execution. Should the worker be
# lost, it has to do the steps of this time again.
COLLECT_INTERVAL_S = 0.2
# Executions in flight per worker: those that it has, and one that it takes when one of them is done.
EXECUTIONS_PER_WORKER = EXECUTIONS_AHEAD + 1


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
    _check_model(model)
    epochs, steps_per_epoch = _capped(epochs, steps_per_epoch)
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = _compat.train_validation_split(
            (x, y, sample_weight), validation_split=validation_split
        )
    strategy = model._distribute_strategy
    inputs = worker_input(
        x,
        strategy.num_workers,
        y=y,
        sample_weight=sample_weight,
        class_weight=class_weight,
        batch_size=batch_size,
        shuffle=shuffle,
    )
    function = _train_function(model, inputs.element_spec)
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = keras.callbacks.CallbackList(
            callbacks,
            add_history=True,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=steps_per_epoch,
            model=model,
        )
    validation = None if validation_data is None else _Validation(validation_data, validation_batch_size or batch_size)
    strategy.load_meter.start(function.traffic)
    loop = _TrainingLoop(model, function, inputs, steps_per_epoch, callbacks)
    model.stop_training = False
    with translated_errors(strategy):
        callbacks.on_train_begin()
        logs = None
        initial_epoch = model._initial_epoch or initial_epoch
        for epoch in range(initial_epoch, epochs):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            logs = loop.run_epoch(epoch)
            if validation is not None and model._should_eval(epoch, validation_freq):
                logs.update(validation.evaluate(model, validation_steps, callbacks))
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs=logs)
    return model.history


class _TrainingLoop:
    """Runs the epochs of one `fit`: sends executions, merges what they bring back, calls the callbacks."""

    def __init__(
        self, model: keras.Model, function: TrainFunction, inputs: WorkerInput, steps_per_epoch: int | None, callbacks: Any
    ) -> None:
        self._model = model
        self._function = function
        self._steps_per_epoch = steps_per_epoch
        self._callbacks = callbacks
        self._strategy = model._distribute_strategy
        interval = 0.0 if listen_to_batches(callbacks) else COLLECT_INTERVAL_S
        self._dispatcher = Dispatcher(self._strategy, function, inputs, collect_interval=interval)
        self._has_iterators = False
        self._steps = _StepNumbers(model, function)

    def run_epoch(self, epoch: int) -> dict[str, Any]:
        """Trains one epoch and returns its logs."""
        dispatcher, target, per_execution = self._dispatcher, self._steps_per_epoch, self._model.steps_per_execution
        if target is None or not self._has_iterators:
            dispatcher.make_iterators(epoch, must_end=target is None)
            self._has_iterators = True
        dispatcher.start_epoch()
        done = requested = 0
        totals = MetricTotals(self._model, self._function)
        report = BatchCallbacks(self._callbacks, totals)
        failures = dispatcher.num_failures
        meter = self._strategy.load_meter
        meter.resume()
        try:
            while True:
                while self._wants_more(requested, target):
                    num_steps = per_execution if target is None else min(per_execution, target - requested)
                    dispatcher.send(Execution(num_steps, self._steps.take(num_steps)))
                    requested += num_steps
                if (dispatcher.in_flight == 0 or dispatcher.all_exhausted) and not dispatcher.collect():
                    break
                progress = dispatcher.wait()
                requested -= progress.missing_steps
                result = progress.result
                if result is not None and result.steps:
                    totals.add(result)
                    meter.add(result.steps, result.rows)
                    done += result.steps
                    report.add(done - result.steps, done - 1)
        except BaseException:
            dispatcher.abandon()
            raise
        finally:
            meter.pause()
        report.flush()
        dispatcher.finish_epoch()
        self._steps.settle()
        if dispatcher.num_failures > failures:
            totals.correct_counters()
        if target is not None and done < target and not self._model.stop_training:
            self._has_iterators = False
            warnings.warn(
                "Your input ran out of data; interrupting training. Make sure that your dataset or generator can generate at "
                "least `steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your "
                "dataset.",
                stacklevel=4,
            )
        return dict(_compat.pythonify_logs(totals.logs()))

    def _wants_more(self, requested: int, target: int | None) -> bool:
        busy = self._dispatcher.in_flight < EXECUTIONS_PER_WORKER * self._strategy.num_workers
        return busy and not self._model.stop_training and (target is None or requested < target)


class _StepNumbers:
    """Gives every step its global number, and with it the seeds that it draws.

    The numbers go on from the optimizer's iterations. A step's seeds follow from its number alone, so that no two workers
    draw the same and an execution that is run again draws what it drew before. One worker draws what plain Keras draws.
    """

    def __init__(self, model: keras.Model, function: TrainFunction) -> None:
        self._function = function
        self._next = int(model.optimizer._iterations.numpy()) if model.optimizer is not None else 0
        self._seeds = [v.storage.numpy().astype(np.int64) for v in function.seeds]

    def take(self, num_steps: int) -> np.ndarray:
        """The header of an execution of the next `num_steps` steps."""
        header = np.array([self._next, *(n for seed in self._seeds for n in seed)], np.int64)
        self._next += num_steps
        for seed, draws in zip(self._seeds, self._function.seeds_per_step, strict=True):
            seed[1] += num_steps * draws
        return header

    def settle(self) -> None:
        """Writes the seeds that were used up to the states of their generators."""
        for variable, seed in zip(self._function.seeds, self._seeds, strict=True):
            variable.storage.assign(tf.cast(seed, variable.storage.dtype))


class _Validation:
    """The validation data of one `fit`, read once and evaluated after each epoch that asks for it."""

    def __init__(self, data: Any, batch_size: int | None) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._arguments = {"x": _local_input(x), "y": y, "sample_weight": sample_weight}
        if not isinstance(self._arguments["x"], tf.data.Dataset):
            self._arguments["batch_size"] = batch_size

    def evaluate(self, model: keras.Model, steps: int | None, callbacks: Any) -> dict[str, float]:
        logs = model.evaluate(**self._arguments, steps=steps, callbacks=callbacks, return_dict=True)
        return {f"val_{name}": value for name, value in logs.items()}


def evaluate(original: Any, model: keras.Model, x: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`keras.Model.evaluate`, on the coordinator with a copy of the weights."""
    return _run_on_coordinator(original, model, _local_input(x), *args, **kwargs)


def predict(original: Any, model: keras.Model, x: Any, *args: Any, **kwargs: Any) -> Any:
    """`keras.Model.predict`, on the coordinator with a copy of the weights."""
    return _run_on_coordinator(original, model, _local_input(x), *args, **kwargs)


def test_on_batch(original: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """`keras.Model.test_on_batch`, on the coordinator with a copy of the weights."""
    return _run_on_coordinator(original, model, *args, **kwargs)


def predict_on_batch(original: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """`keras.Model.predict_on_batch`, on the coordinator with a copy of the weights."""
    return _run_on_coordinator(original, model, *args, **kwargs)


def _run_on_coordinator(original: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    strategy = model._distribute_strategy
    with translated_errors(strategy), on_coordinator(model):
        return original(model, *args, **kwargs)


def train_on_batch(
    original: Any,
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """`keras.Model.train_on_batch`: computes on the coordinator and pushes to the ps, like a step of `fit`."""
    del original
    model._assert_compile_called("train_on_batch")
    _check_model(model)
    if class_weight is not None:
        if sample_weight is not None:
            raise InputError("Give `class_weight` or `sample_weight` to `train_on_batch`. Received: both.")
        sample_weight = _compat.class_weight_to_sample_weights(y, class_weight)
    batch = tf.nest.map_structure(tf.convert_to_tensor, keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
    if not isinstance(batch, tuple):
        batch = (batch,)
    strategy = model._distribute_strategy
    with translated_errors(strategy):
        spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), batch)
        function = _train_function(model, spec)
        model.reset_metrics()
        steps = _StepNumbers(model, function)
        with tf.device(COORDINATOR_CPU):
            execution = function.execution(None, 1, checked=False, keeps_totals=False)
            result = function.run(execution, batch, steps.take(1))
        steps.settle()
        logs = _compat.pythonify_logs(merge_once(model, function, result))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _train_function(model: keras.Model, element_spec: Any) -> TrainFunction:
    """The model's `TrainFunction` for batches of `element_spec`; builds model and optimizer where that is still to do."""
    key = (element_spec, [v.trainable for v in model.variables])
    cached = model.train_function  # `compile` clears it
    if isinstance(cached, TrainFunction) and cached.key == key:
        return cached
    strategy = model._distribute_strategy
    _build(model, element_spec)
    function = TrainFunction(model, strategy, element_spec)
    function.key = (element_spec, [v.trainable for v in model.variables])
    model.train_function = function
    return function


def _build(model: keras.Model, element_spec: Any) -> None:
    def symbolic(spec: Any) -> Any:
        return None if spec is None else keras.KerasTensor(tuple(spec.shape), spec.dtype.name)

    with model._distribute_strategy.scope():
        model._symbolic_build(data_batch=keras.tree.map_structure(symbolic, element_spec))


def _local_input(x: Any) -> Any:
    """What runs here instead of `x`: a `DatasetCreator` makes one dataset, as if there were one worker."""
    return x(tf.distribute.InputContext(1, 0, num_replicas_in_sync=1)) if isinstance(x, DatasetCreator) else x


def _check_model(model: keras.Model) -> None:
    for optimizer in optimizers_of(model):
        check_optimizer(optimizer)
    if model.run_eagerly:
        raise UnsupportedError(
            "A training step runs on the workers as a graph. Expected: `run_eagerly=False` in `compile`. Received: "
            "run_eagerly=True. To debug a step eagerly, train the same model outside `strategy.scope()`."
        )


def _capped(epochs: int, steps_per_epoch: int | None) -> tuple[int, int | None]:
    max_epochs, max_steps = _compat.keras_config.max_epochs(), _compat.keras_config.max_steps_per_epoch()
    if max_epochs and max_epochs < epochs:
        warnings.warn(f"Limiting epochs to {max_epochs}", stacklevel=4)
        epochs = max_epochs
    if max_steps and (not steps_per_epoch or max_steps < steps_per_epoch):
        warnings.warn(f"Limiting steps_per_epoch to {max_steps}", stacklevel=4)
        steps_per_epoch = max_steps
    return epochs, steps_per_epoch
