"""What was made outside `strategy.scope()` and takes part in a training under it: variables, optimizers, models.

Metrics and optimizers are mostly made by the caller, models often by a function, `clone_model` or `load_model`. To be
adopted, a variable becomes a `ParameterServerVariable` in place: the same object, with the same value, whose storage is where
the strategy puts it. So whatever refers to it (layers, metrics, slots, closures) goes on as it is.

What can be reached from a model is adopted when it is compiled under the strategy, and before each `fit`, `evaluate` and
`predict`. What a step reaches in another way (a loss with state of its own, a global) is adopted when the trace touches it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from kerasps import variables
from kerasps.errors import UnsupportedError
from kerasps.optimizers import optimizers_of
from kerasps.variables import ParameterServerVariable

_connected: list[Any] = []


def connect(strategy: Any) -> None:
    """Takes note of the strategy of this process, which connects once."""
    _connected[:] = [strategy]


def strategy_of(model: keras.Model) -> Any:
    """The `ParameterServerStrategy` that trains `model`, else None.

    It is so where the model was made, compiled or is used under the strategy, and where a model in it, or a variable, is.
    """
    for strategy in _connected:
        own = model._distribute_strategy
        if own is not None and tf.distribute.get_strategy() is not strategy:
            return strategy if own is strategy else None
        if tf.distribute.get_strategy() is strategy or any(m._distribute_strategy is strategy for m in _models_in(model)):
            return strategy
        if any(isinstance(v, ParameterServerVariable) for v in _state_of(model)):
            return strategy
    return None


def adopt_model(strategy: Any, model: keras.Model) -> None:
    """Makes a model one of `strategy`, with its optimizers, its metrics and the models in it."""
    changed = False
    for inner in _models_in(model):
        changed |= inner._distribute_strategy is not strategy
        inner._distribute_strategy = strategy
    for optimizer in optimizers_of(model):
        optimizer._distribution_strategy = strategy  # its state is among the model's
    changed |= adopt_variables(strategy, _state_of(model))
    if changed:
        for inner in _models_in(model):  # what was traced before computes with the variables that there were
            inner.train_function = inner.test_function = inner.predict_function = None


def adopt_optimizer(strategy: Any, optimizer: Any) -> None:
    """Makes an optimizer one of `strategy`, with its state; slots come beside their variables before the next trace."""
    optimizer._distribution_strategy = strategy
    adopt_variables(strategy, optimizer.variables)


def adopt_variables(strategy: Any, found: Iterable[Any]) -> bool:
    """Adopts those Keras variables that are not the strategy's yet; returns whether there was one."""
    adopted = [adopt_variable(strategy, v) for v in found if type(v) is not ParameterServerVariable]
    return any(adopted)


def adopt_variable(strategy: Any, variable: Any) -> bool:
    """Makes a Keras variable a `ParameterServerVariable` with the same value; returns whether it was none."""
    if not isinstance(variable, keras.Variable) or isinstance(variable, ParameterServerVariable):
        return False
    value = variable._value
    if value is not None and not _is_plain(value):
        raise UnsupportedError(
            f"The variable '{variable.path}' belongs to another strategy. Expected: one made under this strategy, or under "
            f"none. Received: a {type(value).__name__}. Make it outside the other strategy's scope."
        )
    variable.__class__ = _adopted_class(type(variable))
    if value is not None:  # else it is about to be made, where the strategy says
        with _current(strategy):
            variable.take_over(value)
    return True


def _adopted_class(cls: Any) -> Any:
    return ParameterServerVariable if cls is keras.Variable else _with_ours(cls)


@functools.cache
def _with_ours(cls: Any) -> Any:
    return type(cls.__name__, (ParameterServerVariable, cls), {})


def _is_plain(value: Any) -> bool:
    return isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues)


def _current(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes new variables belong to `strategy`, in a step or out of it."""
    if tf.distribute.get_strategy() is strategy:
        return contextlib.nullcontext()
    return variables.creating_under(strategy)


def _models_in(model: keras.Model) -> list[keras.Model]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]


def _state_of(model: keras.Model) -> list[Any]:
    """The variables that can be reached from a model, but for those that only its step knows."""
    found = [*model.variables]
    # A `compile` of the user's own may call Keras's before it makes the metrics that its property `metrics` lists.
    with contextlib.suppress(AttributeError):
        found += model.metrics_variables
    for optimizer in optimizers_of(model):
        found += optimizer.variables
    return found
