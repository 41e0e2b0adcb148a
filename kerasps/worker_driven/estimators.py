"""Tells users of TensorFlow's estimators the replacement of each argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])

_CALLBACK = "Give a `keras.callbacks.Callback` in `callbacks`"
_SESSIONS = "It is gone, with sessions: leave it out"
_TENSORBOARD = "Give `keras.callbacks.TensorBoard` in the `callbacks` of `kerasps.TrainSpec`"
_STRATEGY = "Give a function that makes the strategy in `strategy`"

OF_TRAIN_SPEC = {
    "hooks": _CALLBACK,
    "saving_listeners": _CALLBACK,
}
OF_EVAL_SPEC = {
    "name": "Run a `kerasps.SidecarEvaluator` with another `log_dir` for each evaluation",
    "hooks": _CALLBACK,
}
OF_RUN_CONFIG = {
    "train_distribute": _STRATEGY,
    "experimental_distribute": _STRATEGY,
    "eval_distribute": "It is gone, since the evaluator is one process: leave it out",
    "tf_random_seed": "Call it `random_seed`",
    "save_summary_steps": _TENSORBOARD,
    "log_step_count_steps": _TENSORBOARD,
    "keep_checkpoint_every_n_hours": "It is gone: leave it out",
    "session_config": _SESSIONS,
    "device_fn": _SESSIONS,
    "protocol": _SESSIONS,
    "session_creation_timeout_secs": _SESSIONS,
    "experimental_max_worker_delay_secs": "It is gone, since no worker waits for another",
    "checkpoint_save_graph_def": "It is gone: checkpoints hold weights, and no graph",
}
OF_TRAIN_AND_EVALUATE = {
    "estimator": "Give a function that returns a compiled Keras model as `model_fn`",
    "executor_cls": "It is gone: leave it out",
}


def naming_moved(moved: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """Return a class decorator that refuses arguments of TensorFlow's estimators by name."""

    def decorate(cls: _Class) -> _Class:
        init: Any = cls.__init__  # type: ignore[misc]
        cls.__init__ = refusing_moved(cls.__name__, moved)(init)  # type: ignore[misc]
        return cls

    return decorate


def refusing_moved(name: str, moved: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Return a function decorator that refuses arguments as `naming_moved` does."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> Any:
            for argument in kwargs:
                if argument in moved:
                    raise TypeError(
                        f"Argument `{argument}` of TensorFlow's estimators is not an argument of "
                        f"`kerasps.{name}`. Expected: the arguments of `kerasps.{name}`. Received: "
                        f'{argument}={kwargs[argument]!r}. {moved[argument]}. The table "Where an '
                        "argument of TensorFlow's estimators went\" (docs/worker_driven.md) has "
                        "all of them."
                    )
            return function(*args, **kwargs)

        return cast(_Function, checked)

    return decorate
