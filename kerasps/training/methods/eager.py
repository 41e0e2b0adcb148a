"""`run_eagerly=True`: steps run as plain Python in the coordinator's process.

There, `print` and a debugger see every value. Keras runs its loop and reads the data. The model's
variables stay on the ps, and each read or assignment goes there. One process does one batch at a
time, so all is done in the order of plain Keras.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.inputs import DatasetCreator
from kerasps.step import TracedStep
from kerasps.training.contract.host import Host
from kerasps.variables import wait_for_steps
from kerasps.variables.keras.adoption import adopt_model, strategy_of
from kerasps.variables.lanes.phase import creating_under
from kerasps.variables.storage.named import plain_variable

_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()


class _Running(threading.local):
    models: tuple[keras.Model, ...] = ()


_RUNNING = _Running()


def runs_eagerly(model: keras.Model) -> bool:
    """Return whether steps of `model` run eagerly.

    They do if it was compiled with `run_eagerly=True`, and for every model after
    `tf.config.run_functions_eagerly(True)`.
    """
    return bool(model.run_eagerly or tf.config.functions_run_eagerly())


def run_eagerly(
    original: Callable[..., object], model: keras.Model, *args: object, **kwargs: object
) -> Any:
    """Call a method of Keras's trainer, `fit` or another, so that its steps run in this process."""
    wait_for_steps()
    strategy = strategy_of(model)
    host: Host = strategy.extended.host
    if host.why_no_eager_steps is not None:
        raise UnsupportedError(host.why_no_eager_steps)
    adopt_model(strategy, model)
    _warn_once(model)
    for name in ("train_function", "test_function", "predict_function"):
        if isinstance(getattr(model, name), TracedStep):  # made when steps ran on workers
            setattr(model, name, None)
    args, kwargs = _with_datasets((args, kwargs))
    x = args[0] if args else kwargs.get("x")
    is_fit = original.__name__ == "fit"
    if is_fit and isinstance(x, tf.data.Dataset) and len(args) < 9:
        # Otherwise Keras warns that it does not shuffle, though nobody asked for it.
        kwargs.setdefault("shuffle", False)
    before, _RUNNING.models = _RUNNING.models, (*_RUNNING.models, model)
    try:
        with host.run_meter.fit() if is_fit else contextlib.nullcontext():
            return original(model, *args, **kwargs)
    finally:
        _RUNNING.models = before


def is_running_eagerly(model: object) -> bool:
    """Return whether this thread is in `run_eagerly` with `model`."""
    return any(model is running for running in _RUNNING.models)


class StrategyOfLoop:
    """Replaces the strategy in Keras's loop while steps run in this process."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the dataset unchanged, since this process reads all of it."""
        return dataset

    def run(self, step: Callable[..., object], args: tuple[object, ...]) -> Any:
        """Run a step with no strategy current, as plain Keras does.

        Variables that it makes still belong to the kerasps strategy.
        """
        with without_current(self._strategy):
            return step(*args)


@contextlib.contextmanager
def without_current(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Make no strategy current within this context, also inside `strategy.scope()`.

    New variables still belong to `strategy`.
    """
    with tf.Graph().as_default():  # no scope has been entered in a new graph
        of_no_strategy = tf.distribute.get_replica_context()
    # The next creator is the strategy's, which works only while the strategy is current.
    with (
        of_no_strategy,
        tf.variable_creator_scope(lambda next_creator, **kwargs: plain_variable(**kwargs)),
        creating_under(strategy),
    ):
        yield


def _warn_once(model: keras.Model) -> None:
    if model in _warned:
        return
    _warned.add(model)
    warnings.warn(
        f"Steps of model '{model.name}' run eagerly: in this process, one batch at a time, and "
        "every read of a variable asks a ps. The workers are idle. This is exact but slow, and "
        "meant for `print` and a debugger. Compile without `run_eagerly=True` to train on the "
        "workers.",
        stacklevel=5,
    )


def _with_datasets(arguments: object) -> Any:
    """Return the arguments of a method with each `DatasetCreator` called, for one reader."""

    def made(value: object) -> Any:
        if isinstance(value, DatasetCreator):
            return value(tf.distribute.InputContext(1, 0, num_replicas_in_sync=1))
        if isinstance(value, tuple):  # `validation_data`
            return tuple(made(item) for item in value)
        return (
            {name: made(item) for name, item in value.items()} if isinstance(value, dict) else value
        )

    return made(arguments)
