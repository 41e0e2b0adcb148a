"""CentralStorageStrategy on one device: its arguments, and that it trains as plain Keras does.

Several devices have a process of their own: `tests/processes/test_central_storage.py`.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.runtime.connected import connected_strategy
from support.conversions import conversions, small_variables

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.mark.parametrize("name", ["CPU:0", "cpu:0", "/cpu:0", "/device:CPU:0", "CPU", CPU])
def test_a_device_has_the_names_that_tensorflow_gives_it(name):
    strategy = kerasps.CentralStorageStrategy([name], name)
    assert strategy.compute_devices == (CPU,)
    assert strategy.parameter_device == CPU
    assert strategy.num_replicas_in_sync == 1
    assert repr(strategy) == (
        "<CentralStorageStrategy compute_devices=[CPU:0] parameter_device=CPU:0>"
    )


def test_by_default_all_gpus_compute_or_else_the_cpu():
    gpus = tf.config.list_logical_devices("GPU")
    strategy = kerasps.CentralStorageStrategy()
    assert strategy.num_replicas_in_sync == max(1, len(gpus))
    kind = "GPU" if gpus else "CPU"
    assert all(f"device:{kind}:" in device for device in strategy.compute_devices)
    only = strategy.compute_devices[0] if len(gpus) < 2 else CPU
    assert strategy.parameter_device == only


@pytest.mark.parametrize(
    "name", ["GPU:7", "CPU:9", "nonsense", "", "/job:worker/task:0/device:CPU:0"]
)
@pytest.mark.parametrize("argument", ["compute_devices", "parameter_device"])
def test_a_device_that_is_not_there_is_refused_by_name(argument, name):
    value = [name] if argument == "compute_devices" else name
    with pytest.raises(ValueError, match="a device that this process does not have") as caught:
        kerasps.CentralStorageStrategy(**{argument: value})
    message = str(caught.value)
    assert f"Argument `{argument}` names" in message
    assert "Expected: a name among CPU:0" in message
    assert f"Received: {name!r}." in message


@pytest.mark.parametrize("names", ["CPU:0", 2, {"CPU:0"}])
def test_compute_devices_are_a_list(names):
    with pytest.raises(TypeError, match="`compute_devices` is a list of names") as caught:
        kerasps.CentralStorageStrategy(names)
    assert f"Received: compute_devices={names!r}." in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("compute_devices", [0]), ("compute_devices", [None]), ("parameter_device", 0)],
)
def test_a_name_is_a_string(argument, value):
    with pytest.raises(TypeError, match=f"`{argument}` has to hold names of devices"):
        kerasps.CentralStorageStrategy(**{argument: value})


@pytest.mark.parametrize("names", [[], ["CPU:0", "CPU:0"], ["CPU:0", "/device:CPU:0"]])
def test_a_device_computes_once(names):
    with pytest.raises(ValueError, match="names no device, or one of them twice") as caught:
        kerasps.CentralStorageStrategy(names)
    assert f"Received: compute_devices={names!r}." in str(caught.value)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_one_device_trains_as_plain_keras_does_and_no_cluster_is_there(jit_compile):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dense(3), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile("adam", "mse", jit_compile=jit_compile)
        history = model.fit(x, x[:, :1], batch_size=16, verbose=0, shuffle=False)
        return [*model.get_weights(), history.history["loss"]]

    plain = trained(tf.distribute.get_strategy())
    central = trained(kerasps.CentralStorageStrategy(["CPU:0"]))
    for expected, value in zip(plain, central, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)
    assert connected_strategy() is None


def test_variables_convert_as_plain_ones_do():
    plain = conversions(small_variables())
    with kerasps.CentralStorageStrategy(["CPU:0"]).scope():
        assert conversions(small_variables()) == plain
