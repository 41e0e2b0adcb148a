"""`train_and_evaluate`: one program for all tasks of a training with worker-driven steps."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.description.cluster_description import EVALUATOR, ClusterDescription
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.server import serve
from kerasps.cluster.serving.renewal import AfterTheEnd
from kerasps.evaluator.arguments import check_exports
from kerasps.evaluator.sidecar import Evaluation, SidecarEvaluator
from kerasps.evaluator.training_end import TrainingEnd, TrainingEndMarker
from kerasps.evaluator.watched import newest_checkpoint
from kerasps.inputs import DatasetCreator
from kerasps.worker_driven.estimators import OF_TRAIN_AND_EVALUATE, refusing_moved
from kerasps.worker_driven.host import WorkerHost
from kerasps.worker_driven.specs import EvalSpec, RunConfig, TrainSpec, check_takes_nothing

_BUILD_THERE = "Build it in a function, which each worker calls under its strategy."
# A ps ends when no worker is connected any more, or this long after the training's end.
_LINGER_S = 60.0


@refusing_moved("train_and_evaluate", OF_TRAIN_AND_EVALUATE)
def train_and_evaluate(
    model_fn: Callable[[], keras.Model],
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
    *,
    config: RunConfig,
) -> keras.callbacks.History | list[Evaluation]:
    """Train a model with workers that drive their own steps, and evaluate its checkpoints.

    Every task of the cluster calls this function with the same arguments. `TF_CONFIG` gives its
    role:

    * `worker` and `chief` train until they have done `max_steps` steps together. The chief saves
      checkpoints into `model_dir`, and starts from the newest one there.
    * `evaluator` evaluates each new checkpoint, exports models, and ends after the last one.
    * `ps` holds variables until the training is over and no worker is connected. Then its process
      ends. `kerasps serve` may replace it, and does not end.

    ```python
    def model_fn():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    # In each task; TF_CONFIG lists `worker` and `ps` tasks, and names this one.
    kerasps.train_and_evaluate(
        model_fn,
        kerasps.TrainSpec(train_input_fn, max_steps=1000),
        kerasps.EvalSpec(eval_input_fn),
        config=kerasps.RunConfig("run"),
    )
    ```

    Args:
        model_fn: returns the model, built and compiled.
        train_spec: the training data, and the number of steps.
        eval_spec: the data for evaluations, and the models to export.
        config: the directory of checkpoints, the frequency of saves, and the strategy.

    Returns:
        In a worker, the `keras.callbacks.History`; in the evaluator, its evaluations.

    Raises:
        ClusterConfigError: TF_CONFIG is not set, or wrong.
        UnsupportedError: the backend of Keras is not TensorFlow.
        ValueError: the model is not built or compiled.
        CheckpointError: in the evaluator, a checkpoint cannot be read.

    Follows `tf.estimator.train_and_evaluate`.
    """
    _compat.check_backend()
    _check_arguments(model_fn, train_spec, eval_spec, config)
    cluster = read_tf_config(needs_chief=False)
    if config.random_seed is not None:
        keras.utils.set_random_seed(config.random_seed)
    if cluster.task_type == "ps":
        _serve(cluster, Path(config.model_dir))
    if cluster.task_type == EVALUATOR:
        return _evaluate(model_fn, eval_spec, Path(config.model_dir))
    return _train(model_fn, train_spec, config)


def _check_arguments(model_fn: object, train_spec: object, eval_spec: Any, config: Any) -> None:
    """Check all arguments in every task, so that none waits for a task that ended in an error."""
    if isinstance(model_fn, keras.Model) or not callable(model_fn):
        raise TypeError(
            "Argument `model_fn` is not a function that returns a model. Expected: a function "
            "without parameters that returns a compiled `keras.Model`, which each worker calls "
            f"under its strategy. Received: model_fn={model_fn!r}. {_BUILD_THERE}"
        )
    check_takes_nothing(
        "model_fn",
        model_fn,
        advice="A `model_fn` of TensorFlow's estimators, of features, labels and mode, becomes one "
        "that returns a compiled Keras model; `functools.partial` binds parameters.",
    )
    for name, value, kind in (
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
        ("config", config, RunConfig),
    ):
        if not isinstance(value, kind):
            raise TypeError(
                f"Argument `{name}` is not a `kerasps.{kind.__name__}`. Expected: "
                f"`kerasps.{kind.__name__}(...)`. Received: {name}={value!r}. Give the arguments "
                "in the order model_fn, train_spec, eval_spec, and config by name."
            )
    check_exports(
        eval_spec.exporters or (), Path(config.model_dir), argument="RunConfig(model_dir)"
    )


def _serve(cluster: ClusterDescription, model_dir: Path) -> None:
    """Serve until the training has ended, then end the process."""
    end = TrainingEnd(model_dir)
    serve(cluster, until=AfterTheEnd(str(cluster.address), end.has_come, linger_s=_LINGER_S))


def _evaluate(
    model_fn: Callable[[], keras.Model], eval_spec: EvalSpec, model_dir: Path
) -> list[Evaluation]:
    time.sleep(eval_spec.start_delay_secs)
    dataset = _call(eval_spec.input_fn, tf.distribute.InputContext(1, 0, num_replicas_in_sync=1))
    if eval_spec.steps is not None:
        dataset = dataset.take(eval_spec.steps)  # not `steps`, since there may be fewer batches
    evaluator = _ThrottledEvaluator(
        _made(model_fn),
        dataset,
        model_dir,
        callbacks=[*(eval_spec.callbacks or ()), *(eval_spec.exporters or ())],
        log_dir=model_dir,
    )
    evaluator.throttle_secs = eval_spec.throttle_secs
    return evaluator.start()


def _train(
    model_fn: Callable[[], keras.Model], train_spec: TrainSpec, config: RunConfig
) -> keras.callbacks.History:
    strategy = config.strategy()
    host: WorkerHost = strategy.extended.host
    model_dir = Path(config.model_dir)
    with strategy.scope():
        model = _made(model_fn)
        # Before a checkpoint is read, since it includes the optimizer's state.
        model.optimizer.build(model.trainable_variables)
    callbacks: list[keras.callbacks.Callback] = [*(train_spec.callbacks or ())]
    if strategy.is_chief:
        model_dir.mkdir(parents=True, exist_ok=True)
        newest = newest_checkpoint(model_dir) if host.begins_run else None
        if newest is not None:
            model.load_weights(newest.path)
        # The marker comes last, since the evaluator then ends after the newest checkpoint.
        callbacks += [_SaveCheckpoints(config), TrainingEndMarker(model_dir)]

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return _call(train_spec.input_fn, context)

    with host.limited_to(train_spec.max_steps):
        history: keras.callbacks.History = model.fit(
            DatasetCreator(dataset_fn),
            epochs=1,
            steps_per_epoch=train_spec.max_steps,
            callbacks=callbacks,
            verbose=2 if strategy.is_chief else 0,
        )
    return history


def _made(model_fn: Callable[[], keras.Model]) -> keras.Model:
    """Return the model that `model_fn` makes."""
    model = model_fn()
    if not isinstance(model, keras.Model):
        raise TypeError(
            "The `model_fn` returned no model. Expected: a compiled `keras.Model`. Received: "
            f"{model!r} of type {type(model).__name__}. Return the model."
        )
    for state, fix in (
        ("built", "Begin it with a `keras.Input`, or call `model.build(input_shape)`"),
        ("compiled", "Call `model.compile(optimizer, loss)`"),
    ):
        if not getattr(model, state):
            raise ValueError(
                f"The model that `model_fn` returned is not {state}. Expected: a model that is "
                f"built and compiled. Received: {model!r}. {fix} in the `model_fn`."
            )
    return model


def _call(
    input_fn: Callable[..., tf.data.Dataset], context: tf.distribute.InputContext
) -> tf.data.Dataset:
    takes_context = "input_context" in inspect.signature(input_fn).parameters
    dataset = input_fn(input_context=context) if takes_context else input_fn()
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "An `input_fn` returned no dataset. Expected: a batched `tf.data.Dataset`. Received: "
            f"{dataset!r} of type {type(dataset).__name__}. Return one, such as "
            "`tf.data.Dataset.from_tensor_slices((x, y)).batch(32)`."
        )
    return dataset


class _ThrottledEvaluator(SidecarEvaluator):
    """Evaluates at most once in `throttle_secs` seconds, except the last checkpoint."""

    throttle_secs = 0.0
    _last = float("-inf")

    def _is_due(self) -> bool:
        return time.monotonic() - self._last >= self.throttle_secs

    def _evaluate(self, *args: Any) -> Evaluation:
        self._last = time.monotonic()
        return super()._evaluate(*args)


class _SaveCheckpoints(keras.callbacks.Callback):
    """Saves checkpoints of a model during its training, and at the end."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self._directory = Path(config.model_dir)
        self._steps = config.save_checkpoints_steps
        self._secs = config.save_checkpoints_secs
        self._keep = config.keep_checkpoint_max or 0
        self._saved: list[Path] = []
        self._saved_at = (0, time.monotonic())

    def on_train_begin(self, logs: object = None) -> None:
        self._saved_at = (self._iterations, time.monotonic())

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        step, at = self._saved_at
        if self._steps is not None:
            is_due = self._iterations - step >= self._steps
        else:
            is_due = self._secs is not None and time.monotonic() - at >= self._secs
        if is_due:
            self._save()

    def on_train_end(self, logs: object = None) -> None:
        self._save()

    def _save(self) -> None:
        step = self._iterations
        path = self._directory / f"model-{step}.weights.h5"
        self.model.save_weights(path)
        self._saved_at = (step, time.monotonic())
        self._saved = [*(p for p in self._saved if p != path), path]
        num_old = max(0, len(self._saved) - self._keep) if self._keep else 0
        for old in self._saved[:num_old]:
            old.unlink(missing_ok=True)
        del self._saved[:num_old]

    @property
    def _iterations(self) -> int:
        return int(self.model.optimizer.iterations.numpy())
