"""The replacements of methods of Keras's models, layers and trainers."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from kerasps import training
from kerasps.errors import InputError
from kerasps.hooks.in_place import Original
from kerasps.hooks.patch import scope_of_ours
from kerasps.hooks.thread_state import left_as_found
from kerasps.inputs import DatasetCreator
from kerasps.runtime.connected import check_not_closed, connected_host, connected_strategy
from kerasps.runtime.errors import translated_errors
from kerasps.saving.saved_model import exporting, track_stand_ins
from kerasps.saving.updatable import export_updatable
from kerasps.variables.keras.adoption import adopt_model, strategy_of


def compile_model(original: Original, self: keras.Model, *args: object, **kwargs: object) -> None:
    """`Trainer.compile`: compile a model of ours in its strategy's scope, and adopt it."""
    if strategy_of(self) is None:
        original(self, *args, **kwargs)
        return
    with scope_of_ours():
        original(self, *args, **kwargs)
    adopt_model(connected_strategy(), self)


def open_name_scope(original: Original, self: keras.layers.Layer) -> Any:
    """`Layer._open_name_scope`: build a model of ours in the scope, also if called outside it."""
    opened = original(self)
    strategy = connected_strategy()
    is_ours = (
        getattr(self, "_distribute_strategy", None) is strategy
        and tf.distribute.get_strategy() is not strategy
    )
    if not is_ours or all(layer.built for layer in self._flatten_layers()):
        return opened
    return _both(strategy.scope(), opened)


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[Any]:
    with outer, inner as entered:
        yield entered


def on_workers(method: Callable[..., object]) -> Callable[..., Any]:
    """Return the hook for a method of Keras's trainer that runs steps."""

    @functools.wraps(method)
    def hook(original: Original, self: keras.Model, *args: object, **kwargs: object) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            _check_needs_no_workers(self, args, kwargs)
            return original(self, *args, **kwargs)
        check_not_closed(f"`{method.__name__}` of a model of the strategy")
        with translated_errors(connected_host()), left_as_found():
            if training.runs_eagerly(self):
                return training.run_eagerly(original, self, *args, **kwargs)
            return method(self, *args, **kwargs)

    # The canary compares signatures: the hook takes the original, and then our method's arguments.
    signature = inspect.signature(method)
    original = inspect.Parameter("original", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    hook.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[original, *signature.parameters.values()]
    )
    return hook


def _check_needs_no_workers(
    model: object, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Raise `InputError` if a model of plain Keras is given data that only workers can read."""
    given = next((v for v in (*args, *kwargs.values()) if isinstance(v, DatasetCreator)), None)
    if given is not None:
        raise InputError(
            "The workers of a strategy read a DatasetCreator, and this model does not belong to a "
            "strategy: it was made and compiled outside of a scope. Expected: a model that is "
            f"made in `with strategy.scope():`. Received: {given!r} for {model!r}. Make and "
            "compile the model in the scope, or give plain Keras a `tf.data.Dataset`."
        )


def symbolic_build(original: Original, self: keras.Model, *args: object, **kwargs: object) -> None:
    """`Trainer._maybe_symbolic_build`: let the first step build a model that is eager."""
    if not training.is_running_eagerly(self):
        original(self, *args, **kwargs)


def distribute_strategy(original: Original, self: keras.Model) -> Any:
    """`Trainer.distribute_strategy`: for eager steps, return one that runs them here."""
    strategy = original(self)
    return training.StrategyOfLoop(strategy) if training.is_running_eagerly(self) else strategy


def export(original: Original, self: keras.Model, filepath: str, *args: Any, **kwargs: Any) -> None:
    """`Model.export`: with `updatable=True`, export a SavedModel that deltas update."""
    if kwargs.pop("updatable", False):
        export_updatable(self, filepath, *args, **kwargs)
    else:
        original(self, filepath, *args, **kwargs)


def exported(original: Original, obj: object, *args: object, **kwargs: object) -> Any:
    """Read our variables as a SavedModel can, in a function that traces for a SavedModel."""
    with exporting():
        track_stand_ins(obj)
        return original(obj, *args, **kwargs)
