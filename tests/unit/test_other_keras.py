"""A Keras on another backend, and models of Keras 2, are refused by name."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types

import keras
import pytest
import tensorflow as tf

import kerasps
from kerasps import _compat
from kerasps.worker_driven.shared_variables import SharedExtended

# The backend


def evaluator():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    return kerasps.SidecarEvaluator(model, None, "checkpoints")


@pytest.mark.parametrize(
    "make",
    [
        kerasps.ParameterServerStrategy,
        kerasps.WorkerDrivenStrategy,
        kerasps.CentralStorageStrategy,
        evaluator,
        lambda: kerasps.train_and_evaluate(None, None, None, config=None),
    ],
)
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_another_backend_is_refused_before_anything_else(monkeypatch, make, backend):
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    with pytest.raises(kerasps.UnsupportedError) as caught:
        make()
    assert str(caught.value) == (
        f"Keras runs on the backend '{backend}', and kerasps trains on TensorFlow alone. Expected: "
        f"the backend 'tensorflow'. Received: KERAS_BACKEND={backend}. Set "
        "KERAS_BACKEND=tensorflow in the environment before Keras is imported, and start the "
        "process again."
    )


@pytest.fixture
def keras_home(monkeypatch, tmp_path):
    """A home of Keras whose file says which backend, and an environment that does not."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
    return tmp_path


def test_a_backend_that_kerass_file_names_is_refused_where_keras_cannot_be_imported(keras_home):
    """Keras imports its backend, and jax may not be installed; a strategy is refused either way."""
    code = """
import kerasps
try:
    kerasps.CentralStorageStrategy()
except kerasps.UnsupportedError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert f'Received: "backend": "jax" in {keras_home / "keras.json"}.' in done.stdout


@pytest.mark.parametrize(
    ("in_environment", "in_file", "imported", "refused"),
    [
        ("tensorflow", "jax", "tensorflow", None),
        ("", "jax", None, "keras.json"),
        ("jax", "tensorflow", None, "KERAS_BACKEND=jax"),
        ("tensorflow", "torch", None, None),
        (None, None, None, None),
        (None, "tensorflow", "openvino", "keras.config.backend() is 'openvino'"),
    ],
)
def test_the_backend_is_the_one_that_keras_has_or_would_choose(
    monkeypatch, keras_home, in_environment, in_file, imported, refused
):
    if in_environment is not None:
        monkeypatch.setenv("KERAS_BACKEND", in_environment)
    (keras_home / "keras.json").write_text(
        "" if in_file is None else json.dumps({"backend": in_file})
    )
    config = types.SimpleNamespace(backend=lambda: imported)
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(config=imported and config))
    error = _compat.backend_error()
    assert (error is None) == (refused is None)
    assert refused is None or refused in str(error)


def test_a_module_that_is_missing_for_another_reason_is_said_to_be_missing(monkeypatch):
    monkeypatch.setitem(kerasps._MODULES, "Evaluation", "no_such_module")
    monkeypatch.delitem(vars(kerasps), "Evaluation", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        _ = kerasps.Evaluation


# Keras 2


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
