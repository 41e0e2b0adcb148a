"""Models of Keras 2 are refused by name, in the scope of a cluster inside this process."""

from __future__ import annotations

import importlib
import sys
import types

import keras
import pytest
import tensorflow as tf

import kerasps
from kerasps import _compat
from kerasps.worker_driven.shared_variables import SharedExtended


def made_by(package, code):
    """Return a function of a module of that package."""
    namespace = {"__name__": f"{package}.src.engine.base_layer", "tf": tf}
    exec(f"def make(inner=None):\n    return {code}", namespace)
    return namespace["make"]


@pytest.fixture
def tf_keras(monkeypatch):
    """Have the package in this process, whether or not it is installed."""
    monkeypatch.setitem(sys.modules, "tf_keras", types.ModuleType("tf_keras"))


def refused(name, package):
    return rf"Keras 2 makes {name} under a strategy.* Received: one of `{package}`\. Use `import"


@pytest.mark.parametrize("package", _compat.KERAS_2)
def test_a_variable_of_keras_2_is_refused_in_the_scope(strategy, tf_keras, package):
    make = made_by(package, "tf.Variable(1.0, name='kernel')")
    nested = made_by(package, "inner()")
    with strategy.scope():
        with pytest.raises(
            kerasps.UnsupportedError, match=refused("the variable 'kernel'", package)
        ):
            make()
        with pytest.raises(kerasps.UnsupportedError, match=refused("a variable", package)):
            nested(lambda: tf.Variable(1.0))
        with pytest.raises(kerasps.UnsupportedError, match=refused("a variable", package)):
            tf.function(lambda: nested(lambda: tf.Variable(1.0)))()
        # Keras 3 and TensorFlow go on as they were, beside it.
        assert float(tf.Variable(2.0)) == 2.0
        assert float(keras.Variable(2.0)) == 2.0
    assert float(make()) == 1.0


def test_a_model_of_the_keras_2_within_tensorflow_is_refused(strategy):
    old = importlib.import_module(_compat.KERAS_2[1])
    with strategy.scope():
        with pytest.raises(kerasps.UnsupportedError, match="Keras 2 makes"):
            old.Sequential([old.layers.Dense(1)])
        with pytest.raises(kerasps.UnsupportedError, match="the variable 'kernel'"):
            old.layers.Dense(1).build((None, 2))


def test_a_worker_that_drives_its_own_steps_refuses_keras_2(tf_keras):
    extended = types.SimpleNamespace(_placing=types.SimpleNamespace(active=False))
    make = made_by("tf_keras", "inner(None, name='kernel')")
    with pytest.raises(
        kerasps.UnsupportedError, match=refused("the variable 'kernel'", "tf_keras")
    ):
        make(lambda *args, **kwargs: SharedExtended._create_variable(extended, *args, **kwargs))
