"""Puts wrappers on what users may call of Keras and TensorFlow, as other libraries do."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter

import keras
import tensorflow as tf

_COORDINATOR = tf.distribute.coordinator.ClusterCoordinator
# Not `compile`: with a wrapper there, Keras compiles no model that it loads.
WRAPPED = (
    *((keras.Model, name) for name in ("fit", "evaluate", "predict")),
    *((keras.Model, f"{name}_on_batch") for name in ("train", "test", "predict")),
    (keras.Variable, "__init__"),
    (keras.Variable, "assign"),
    (keras.Variable, "value"),
    (keras.layers.Layer, "_open_name_scope"),
    (keras.optimizers.Optimizer, "apply"),
    (keras.optimizers.Optimizer, "add_variable_from_reference"),
    (keras.callbacks.BackupAndRestore, "_save_model"),
    (keras.ops, "take"),
    (keras.saving, "load_model"),
    (keras.saving, "save_model"),
    (tf.GradientTape, "gradient"),
    (tf.GradientTape, "watch"),
    (type(tf.function(lambda: None)), "__call__"),
    (_COORDINATOR, "schedule"),
    (_COORDINATOR, "join"),
)


class Wrappers:
    """Wrappers that count calls in `calls`, from `put_on` to `take_off`."""

    def __init__(self):
        self.calls = Counter()
        self._stack = contextlib.ExitStack()

    def put_on(self):
        for owner, name in WRAPPED:
            if name in vars(owner):
                self._stack.callback(setattr, owner, name, vars(owner)[name])
            else:  # it is inherited, and will be again
                self._stack.callback(delattr, owner, name)
            setattr(owner, name, self._wrapper(name, getattr(owner, name)))

    def take_off(self):
        self._stack.close()

    def _wrapper(self, name, original):
        if isinstance(original, property):
            return property(self._wrapper(name, original.fget))

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            self.calls[name] += 1
            return original(*args, **kwargs)

        return wrapper
