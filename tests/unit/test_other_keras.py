"""A Keras on another backend is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import keras
import pytest

import kerasps
from kerasps import _compat

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
