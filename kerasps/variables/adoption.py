"""Adopts what was made outside `strategy.scope()` into a training under it.

Metrics and optimizers are mostly made by the caller, models often by a function, `clone_model` or
`load_model`. To adopt a variable is to make it a `ParameterServerVariable` in place: the same
object, with the same value, whose storage is where the strategy puts it. So whatever refers to it
(layers, metrics, slots, closures) goes on as it is.

State that can be reached from a model is adopted when the model is compiled under the strategy. So
it is before each `fit`, `evaluate` and `predict`. State that only a step reaches, such as a loss's
own or a global, is adopted when the trace touches it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.errors import UnsupportedError
from kerasps.runtime.connected import connected_strategy
from kerasps.variables.phase import creating_under, entering
from kerasps.variables.slots import optimizers_of
from kerasps.variables.variable import ParameterServerVariable


def strategy_of(model: keras.Model) -> Any:
    """Return the `ParameterServerStrategy` that trains `model`, else None.

    It trains a model that was made or compiled under it, or is used under it. It also trains one
    that holds another of its models, or a variable of it.
    """
    strategy = connected_strategy()
    if strategy is None:
        return None
    model_strategy = model._distribute_strategy
    is_current = tf.distribute.get_strategy() is strategy
    if model_strategy is not None and not is_current:
        return strategy if model_strategy is strategy else None
    # The cheap questions first: a model's state can be thousands of variables.
    is_trained = (
        is_current
        or any(m._distribute_strategy is strategy for m in _models_in(model))
        or any(isinstance(v, ParameterServerVariable) for v in _state_of(model))
    )
    return strategy if is_trained else None


def adopt_model(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Make a model one of `strategy`, with its optimizers, its metrics and the models in it."""
    changed = False
    for inner in _models_in(model):
        changed |= inner._distribute_strategy is not strategy
        inner._distribute_strategy = strategy
    for optimizer in optimizers_of(model):
        optimizer._distribution_strategy = strategy  # its state is among the model's
    changed |= adopt_variables(strategy, _state_of(model))
    if changed:
        for inner in _models_in(model):
            # What was traced before computes with the storages that the variables had then.
            inner.train_function = inner.test_function = inner.predict_function = None


def adopt_optimizer(
    strategy: tf.distribute.Strategy, optimizer: keras.optimizers.Optimizer
) -> None:
    """Make an optimizer one of `strategy`, with its state.

    `move_slots` brings its slots beside their variables before the next trace.
    """
    optimizer._distribution_strategy = strategy
    adopt_variables(strategy, optimizer.variables)
    trained = getattr(optimizer, "_trainable_variables", None) or []
    if any(is_bare(variable) for variable in trained):
        optimizer._trainable_variables = [keras_variable_of(variable) for variable in trained]


def is_bare(variable: object) -> bool:
    """Return whether `variable` is a `tf.Variable` on a ps, and none of Keras's."""
    return isinstance(variable, tf.Variable) and "/job:ps" in variable.device


def keras_variable_of(variable: keras.Variable | tf.Variable) -> Any:
    """Return the Keras variable whose storage a bare `tf.Variable` on a ps is; it is made once.

    Any other variable is returned as it is.
    """
    if not is_bare(variable):
        return variable
    if not hasattr(variable, "keras_variable"):
        name = variable.name.split(":")[0].replace("/", "_")
        with tf.init_scope(), entering(None):
            variable.keras_variable = ParameterServerVariable(
                variable, dtype=variable.dtype.name, trainable=variable.trainable, name=name
            )
    return variable.keras_variable


def unsharded(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], variables: Sequence[object]
) -> tuple[list[Any], list[Any]]:
    """Return gradients and variables with TensorFlow's `ShardedVariable`s taken apart.

    Args:
        gradients: a gradient for each variable.
        variables: what they are of.
    """
    parts: list[tuple[Any, Any]] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(variable, _compat.ShardedVariable):
            parts += zip(_shares(gradient, variable), variable.variables, strict=True)
        else:
            parts.append((gradient, variable))
    return [gradient for gradient, _ in parts], [variable for _, variable in parts]


def _shares(
    gradient: tf.Tensor | tf.IndexedSlices | None, variable: _compat.ShardedVariable
) -> list[Any]:
    """Return the part of a gradient that is of each shard."""
    heights = [int(shard.shape[0]) for shard in variable.variables]
    if gradient is None:
        return [None] * len(heights)
    if not isinstance(gradient, tf.IndexedSlices):
        return list(tf.split(gradient, heights))
    shares = []
    for first, height in zip(itertools.accumulate([0, *heights]), heights, strict=False):
        places = gradient.indices - first
        mine = tf.where((places >= 0) & (places < height))[:, 0]
        shares.append(
            tf.IndexedSlices(
                tf.gather(gradient.values, mine),
                tf.gather(places, mine),
                tf.constant([height, *variable.shape[1:]], places.dtype),
            )
        )
    return shares


def adopt_variables(strategy: tf.distribute.Strategy, found: Iterable[object]) -> bool:
    """Adopt those Keras variables that are not ours yet, and return whether there was one."""
    # A list, and not a generator in `any`, which would stop at the first.
    adopted = [adopt_variable(strategy, v) for v in found if type(v) is not ParameterServerVariable]
    return any(adopted)


def adopt_variable(strategy: tf.distribute.Strategy, variable: object) -> bool:
    """Make a Keras variable a `ParameterServerVariable` with the same value, in place.

    Returns:
        False where there was nothing to do: `variable` is ours already, or none of Keras's.

    Raises:
        UnsupportedError: the variable belongs to another strategy.
    """
    if not isinstance(variable, keras.Variable) or isinstance(variable, ParameterServerVariable):
        return False
    value = variable._value
    if value is not None and not _is_plain(value):
        raise UnsupportedError(
            f"The variable '{variable.path}' belongs to another strategy. Expected: one made under "
            f"this strategy, or under none. Received: a {type(value).__name__}. Make it outside "
            "the other strategy's scope."
        )
    # The object stays what it is, for all that refer to it; only its class and storage change.
    variable.__class__ = _adopted_class(type(variable))
    if value is not None:  # else it is about to be made, where the strategy says
        with _current(strategy):
            variable.take_over(value)
    return True


def _adopted_class(cls: Any) -> Any:
    return ParameterServerVariable if cls is keras.Variable else _with_ours(cls)


# A user's subclass keeps its methods, behind ours. One class for all of its variables, since code
# that asks two of them for their type expects the same.
@functools.cache
def _with_ours(cls: Any) -> Any:
    return type(cls.__name__, (ParameterServerVariable, cls), {})


def _is_plain(value: object) -> bool:
    # Another strategy's variable is several, or a wrapper, and only that strategy may touch it.
    return isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues)


def _current(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[Any]:
    """In this context, have new variables belong to `strategy`, in a step or out of it."""
    if tf.distribute.get_strategy() is strategy:
        return contextlib.nullcontext()
    return creating_under(strategy)


def _models_in(model: keras.Model) -> list[keras.Model]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]


def _state_of(model: keras.Model) -> list[Any]:
    """Return the variables that can be reached from a model.

    Those that only its step knows, such as a loss's own, are not among them.
    """
    found = [*model.variables]
    # A `compile` of the user's own may call Keras's before it makes the metrics that its property
    # `metrics` lists.
    with contextlib.suppress(AttributeError):
        found += model.metrics_variables
    for optimizer in optimizers_of(model):
        found += optimizer.variables
    return found
