"""Adopts variables, optimizers and models that were made outside `strategy.scope()`.

Callers usually make metrics and optimizers outside it; a function, `clone_model` or `load_model`
often makes models. Adopting a variable makes it a `ParameterServerVariable` in place: the same
object, with the same value, in a storage that the strategy places. So the objects that refer to it
(layers, metrics, slots, closures) need no change.

State that can be reached from a model is adopted when the model is compiled under the strategy, and
before each `fit`, `evaluate` and `predict`. State that only a step reaches, such as that of a loss
or a global, is adopted when the trace touches it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.runtime.connected import connected_strategy
from kerasps.variables.keras.slots import optimizers_of
from kerasps.variables.keras.variable import ParameterServerVariable
from kerasps.variables.lanes.phase import creating_under, entering
from kerasps.variables.rows.sharding import ShardedStorage


def strategy_of(model: keras.Model) -> Any:
    """Return the `ParameterServerStrategy` that trains `model`, else None.

    It trains a model that was made or compiled under it, or is used under it. It also trains a
    model that contains another model or a variable of the strategy.
    """
    strategy = connected_strategy()
    if strategy is None:
        return None
    model_strategy = model._distribute_strategy
    is_current = tf.distribute.get_strategy() is strategy
    if model_strategy is not None and not is_current:
        return strategy if model_strategy is strategy else None
    # The cheap checks first: a model's state can be thousands of variables.
    is_trained = (
        is_current
        or any(m._distribute_strategy is strategy for m in _models_in(model))
        or any(isinstance(v, ParameterServerVariable) for v in _state_of(model))
    )
    return strategy if is_trained else None


def is_of_strategy(thing: object) -> bool:
    """Return True for a variable of the strategy, and for the storage of one in shards."""
    return isinstance(thing, (ParameterServerVariable, ShardedStorage))


def adopt_model(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Adopt a model into `strategy`, with its optimizers, its metrics and its inner models."""
    changed = False
    for inner in _models_in(model):
        changed |= inner._distribute_strategy is not strategy
        inner._distribute_strategy = strategy
    for optimizer in optimizers_of(model):
        optimizer._distribution_strategy = strategy  # its state is among the model's
    changed |= adopt_variables(strategy, _state_of(model))
    if changed:
        for inner in _models_in(model):
            # Functions that were traced before use the previous storages of the variables.
            inner.train_function = inner.test_function = inner.predict_function = None


def adopt_optimizer(
    strategy: tf.distribute.Strategy, optimizer: keras.optimizers.Optimizer
) -> None:
    """Adopt an optimizer into `strategy`, with its state.

    `move_slots` moves its slots beside their variables before the next trace.
    """
    optimizer._distribution_strategy = strategy
    adopt_variables(strategy, optimizer.variables)
    trained = getattr(optimizer, "_trainable_variables", None) or []
    if any(is_bare(variable) for variable in trained):
        optimizer._trainable_variables = [keras_variable_of(variable) for variable in trained]


def is_bare(variable: object) -> bool:
    """Return whether `variable` is a `tf.Variable` on a ps and not a Keras variable."""
    return isinstance(variable, tf.Variable) and "/job:ps" in variable.device


def keras_variable_of(variable: keras.Variable | tf.Variable) -> Any:
    """Return the Keras variable whose storage is a bare `tf.Variable` on a ps; make it once.

    Return any other variable unchanged.
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
    """Return gradients and variables, TensorFlow's `ShardedVariable`s split into their shards."""
    parts: list[tuple[Any, Any]] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(variable, tf.__internal__.distribute.ShardedVariable):
            parts += zip(_shares(gradient, variable), variable.variables, strict=True)
        else:
            parts.append((gradient, variable))
    return [gradient for gradient, _ in parts], [variable for _, variable in parts]


def _shares(
    gradient: tf.Tensor | tf.IndexedSlices | None,
    variable: tf.__internal__.distribute.ShardedVariable,
) -> list[Any]:
    """Return the parts of a gradient, one for each shard."""
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
    """Adopt the Keras variables that are not adopted yet; return True if there was one."""
    # A list instead of a generator in `any`, which would stop at the first.
    adopted = [adopt_variable(strategy, v) for v in found if type(v) is not ParameterServerVariable]
    return any(adopted)


def adopt_variable(strategy: tf.distribute.Strategy, variable: object) -> bool:
    """Turn a Keras variable into a `ParameterServerVariable` with the same value, in place.

    Returns False if nothing changed: `variable` was adopted before, or is not a Keras variable.

    Raises UnsupportedError if the variable belongs to another strategy.
    """
    if not isinstance(variable, keras.Variable) or isinstance(variable, ParameterServerVariable):
        return False
    value = variable._value
    if value is not None and not _is_plain(value):
        raise UnsupportedError(
            f"The variable '{variable.path}' belongs to another strategy. Expected: a variable "
            f"made under this strategy, or under none. Received: a {type(value).__name__}. Make it "
            "outside the other strategy's scope."
        )
    # The object stays the same for all references; only its class and storage change.
    variable.__class__ = _adopted_class(type(variable))
    if value is not None:  # else its storage is not made yet, and the strategy will place it
        with _current(strategy):
            variable.take_over(value)
    return True


def _adopted_class(cls: Any) -> Any:
    return ParameterServerVariable if cls is keras.Variable else _with_ours(cls)


# A user's subclass keeps its methods; those of `ParameterServerVariable` override them. Its
# variables share one class, since code that compares their types expects the same type.
@functools.cache
def _with_ours(cls: Any) -> Any:
    return type(cls.__name__, (ParameterServerVariable, cls), {})


def _is_plain(value: object) -> bool:
    # Another strategy's variable is several variables or a wrapper, which only that strategy uses.
    return isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues)


def _current(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[Any]:
    """In this context, make new variables belong to `strategy`, inside a step or outside."""
    if tf.distribute.get_strategy() is strategy:
        return contextlib.nullcontext()
    return creating_under(strategy)


def _models_in(model: keras.Model) -> list[keras.Model]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]


def _state_of(model: keras.Model) -> list[Any]:
    """Return the variables that can be reached from a model.

    Variables that only its step uses, such as those of a loss, are not included.
    """
    found = [*model.variables]
    # A user's `compile` may call Keras's before it makes the metrics that its property `metrics`
    # lists.
    with contextlib.suppress(AttributeError):
        found += model.metrics_variables
    for optimizer in optimizers_of(model):
        found += optimizer.variables
    return found
