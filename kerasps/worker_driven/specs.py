"""The arguments of `train_and_evaluate`: training, evaluation, and files."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from kerasps.checks import count, path, seconds
from kerasps.evaluator.arguments import check_list
from kerasps.evaluator.best_model import SidecarEvaluatorModelExport
from kerasps.worker_driven.estimators import (
    OF_EVAL_SPEC,
    OF_RUN_CONFIG,
    OF_TRAIN_SPEC,
    naming_moved,
)
from kerasps.worker_driven.strategy import WorkerDrivenStrategy


@naming_moved(OF_TRAIN_SPEC)
@dataclass(frozen=True)
class TrainSpec:
    """The data that workers train on, and the number of steps.

    ```python
    def input_fn(input_context):
        dataset = tf.data.Dataset.from_tensor_slices((np.ones((1000, 64)), np.ones(1000)))
        dataset = dataset.shard(
            input_context.num_input_pipelines, input_context.input_pipeline_id
        )
        return dataset.shuffle(1000).repeat().batch(32)

    train_spec = kerasps.TrainSpec(input_fn, max_steps=1000)
    ```

    Args:
        input_fn: returns the batched `tf.data.Dataset` of a worker. It is called without arguments
            or, if it has a parameter `input_context`, with a `tf.distribute.InputContext`.
        max_steps: the total number of steps of all workers. Default None: until each worker has
            read its data to the end.
        callbacks: callbacks for `fit`, in each worker. Only the chief calls those that write files
            or steer the training.

    Raises:
        TypeError: `input_fn` cannot be called, or `max_steps` is not an integer.
        ValueError: `max_steps` is not positive.

    Follows `tf.estimator.TrainSpec`.
    """

    input_fn: Callable[..., tf.data.Dataset]
    max_steps: int | None = None
    callbacks: Sequence[keras.callbacks.Callback] | None = ()

    def __post_init__(self) -> None:
        _check_input_fn(self.input_fn)
        if self.max_steps is not None:
            _check_count("max_steps", self.max_steps)
        _check_callbacks(self.callbacks)


@naming_moved(OF_EVAL_SPEC)
@dataclass(frozen=True)
class EvalSpec:
    """The data for the evaluation of checkpoints, and the models to export.

    ```python
    eval_spec = kerasps.EvalSpec(
        lambda: tf.data.Dataset.from_tensors((np.ones((100, 64)), np.ones(100))),
        steps=None,
        exporters=[kerasps.SidecarEvaluatorModelExport("run/best/model.keras")],
    )
    ```

    Args:
        input_fn: returns the batched `tf.data.Dataset` to evaluate on.
        steps: the number of batches of an evaluation; None for all. Default 100.
        exporters: `kerasps.SidecarEvaluatorModelExport`s, which say which models to export.
        callbacks: callbacks for `evaluate`.
        start_delay_secs: the seconds to wait before the first evaluation. Default 0.
        throttle_secs: the least number of seconds from one evaluation to the next. The last
            checkpoint is evaluated at once. Default 0: no pause.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: a number is out of its range.

    Follows `tf.estimator.EvalSpec`.
    """

    input_fn: Callable[..., tf.data.Dataset]
    steps: int | None = 100
    exporters: Sequence[SidecarEvaluatorModelExport] | None = ()
    callbacks: Sequence[keras.callbacks.Callback] | None = ()
    start_delay_secs: float = 0.0
    throttle_secs: float = 0.0

    def __post_init__(self) -> None:
        _check_input_fn(self.input_fn)
        if self.steps is not None:
            _check_count("steps", self.steps)
        for name in ("start_delay_secs", "throttle_secs"):
            if getattr(self, name) != 0:
                _check_seconds(name, getattr(self, name))
        if self.exporters is not None:
            check_list("exporters", self.exporters, SidecarEvaluatorModelExport)
        _check_callbacks(self.callbacks)


@naming_moved(OF_RUN_CONFIG)
@dataclass(frozen=True)
class RunConfig:
    """The directory of a training's checkpoints, the frequency of saves, and the strategy.

    ```python
    config = kerasps.RunConfig("run", save_checkpoints_steps=500)
    ```

    Args:
        model_dir: the directory for checkpoints. All tasks must see it.
        strategy: makes the strategy, in each worker. Default: `kerasps.WorkerDrivenStrategy`.
        save_checkpoints_steps: the number of steps of all workers between two saves. Default None:
            save by time.
        save_checkpoints_secs: the seconds between two saves; ignored with `save_checkpoints_steps`.
            Default 600.
        keep_checkpoint_max: how many checkpoints to keep; None or 0 for all. Default 5.
        random_seed: a seed for `keras.utils.set_random_seed` in each task. Default None.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: a number is out of its range.

    Follows `tf.estimator.RunConfig`.
    """

    model_dir: str | os.PathLike[str]
    strategy: Callable[[], WorkerDrivenStrategy] = WorkerDrivenStrategy
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = 600.0
    keep_checkpoint_max: int | None = 5
    random_seed: int | None = None

    def __post_init__(self) -> None:
        path("model_dir", self.model_dir)
        if isinstance(self.strategy, tf.distribute.Strategy) or not callable(self.strategy):
            raise TypeError(
                "Argument `strategy` must be a function that makes the strategy: each worker calls "
                "it, and a ps and the evaluator do not. Expected: one like "
                "`lambda: kerasps.WorkerDrivenStrategy()`. Received: "
                f"strategy={self.strategy!r}. Put a `lambda:` before it."
            )
        if self.save_checkpoints_steps is not None:
            _check_count("save_checkpoints_steps", self.save_checkpoints_steps)
        if self.save_checkpoints_secs is not None or self.save_checkpoints_steps is None:
            _check_seconds("save_checkpoints_secs", self.save_checkpoints_secs)
        if self.keep_checkpoint_max is not None:
            _check_count("keep_checkpoint_max", self.keep_checkpoint_max, least=0)
        if self.random_seed is not None:
            _check_count("random_seed", self.random_seed, least=0)


def check_takes_nothing(
    name: str, function: Callable[..., object], *, but: str = "", advice: str
) -> None:
    """Raise `TypeError` if a function needs arguments that it will not get."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return
    wanted = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name != but
    ]
    if wanted:
        expected = f"no parameters, or one that is called `{but}`" if but else "no parameters"
        raise TypeError(
            f"Argument `{name}` is a function that needs arguments which it will not get. "
            f"Expected: a function with {expected}. Received: {name}={function!r}, which needs "
            f"{', '.join(wanted)}. {advice}"
        )


def _check_callbacks(value: object) -> None:
    if value is not None:
        check_list("callbacks", value, keras.callbacks.Callback)


def _check_input_fn(value: object) -> None:
    if not callable(value):
        raise TypeError(
            "Argument `input_fn` must be a function that returns a `tf.data.Dataset`. Received: "
            f"input_fn={value!r}. Wrap a dataset that you have: `lambda: dataset`."
        )
    check_takes_nothing(
        "input_fn",
        value,
        but="input_context",
        advice="Wrap it: `lambda: input_fn(...)`.",
    )


def _check_count(name: str, value: object, *, least: int = 1) -> None:
    count(f"Argument `{name}` is not a count", value, least=least, received=f"{name}={value!r}")


def _check_seconds(name: str, value: object) -> None:
    seconds(f"Argument `{name}` is not a time", value, received=f"{name}={value!r}")
