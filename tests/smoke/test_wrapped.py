"""What other libraries put around methods of Keras, before the strategy and after it.

The strategy of these tests was made while wrappers were there (see `conftest.py`).
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.variables import ParameterServerVariable
from support.models import Examples, endless, ids_data
from support.wrappers import WRAPPED

NAMES = {name for _, name in WRAPPED}
# Held since before there was a strategy, or a wrapper.
COMPILE, FIT, EVALUATE = keras.Model.compile, keras.Model.fit, keras.Model.evaluate
ASSIGN = keras.Variable.assign


class Model(keras.Sequential):
    """A model with a `fit` of its own, as users write it."""

    num_fits = 0

    def fit(self, *args, **kwargs):
        self.num_fits += 1
        return super().fit(*args, **kwargs)


@pytest.fixture(autouse=True)
def no_calls_yet(wrappers):
    wrappers.calls.clear()


def batches():
    return tf.data.Dataset.from_tensor_slices(ids_data(64)).batch(8)


def made(strategy):
    with strategy.scope():
        model = Model([keras.Input((2,)), keras.layers.Dense(1)])
    # Outside of the scope: the hook makes the state of the metrics and the optimizer in it.
    COMPILE(model, "adam", "mae", metrics=[Examples()])
    assert isinstance(model.optimizer.iterations, ParameterServerVariable)
    return model


def train(strategy, directory):
    """Use all that is wrapped. Return how many examples methods have seen, and the updates."""
    model, data = made(strategy), kerasps.DatasetCreator(endless)
    backup = keras.callbacks.BackupAndRestore(directory / "backup")
    fitted = model.fit(data, steps_per_epoch=6, callbacks=[backup], verbose=0).history["examples"]
    assert model.num_fits == 1
    fitted += FIT(model, data, steps_per_epoch=3, verbose=0).history["examples"]
    evaluated = model.evaluate(batches(), return_dict=True, verbose=0)["examples"]
    assert EVALUATE(model, batches(), return_dict=True, verbose=0)["examples"] == evaluated
    predicted = len(model.predict(batches(), verbose=0))
    x, y = (part[:8] for part in ids_data(64))
    model.train_on_batch(x, y)
    model.test_on_batch(x, y)
    keras.saving.save_model(model, directory / "model.keras")
    with strategy.scope():
        loaded = keras.saving.load_model(
            directory / "model.keras", custom_objects={"Model": Model}, compile=False
        )
    assert all(map(np.array_equal, loaded.get_weights(), model.get_weights()))
    ASSIGN(model.weights[1], [3.0])
    assert np.array_equal(model.predict_on_batch(x), x @ model.get_weights()[0] + 3.0)
    custom_loop(strategy, model, x, y)
    return fitted, evaluated, predicted, int(model.optimizer.iterations)


def custom_loop(strategy, model, x, y):
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    table = keras.Variable(np.zeros((3, 2), "float32"))

    @tf.function
    def inner(x):
        return model(x, training=True)

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(tf.constant(1.0))
            rows = keras.ops.take(table, [1], axis=0)
            loss = keras.ops.mean((inner(x) - y) ** 2) + keras.ops.sum(rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    for _ in range(5):
        coordinator.schedule(step)
    coordinator.join()


EXPECTED = ([48.0, 24.0], 64.0, 64, 6 + 3 + 1 + 5)


def test_wrappers_that_were_there_before_the_strategy_call_the_hooks(strategy, wrappers, tmp_path):
    assert train(strategy, tmp_path) == EXPECTED
    assert {name for name, count in wrappers.calls.items() if count} == NAMES


def test_wrappers_that_are_taken_off_leave_the_hooks(strategy, wrappers, tmp_path):
    wrappers.take_off()
    try:
        assert train(strategy, tmp_path) == EXPECTED
        assert not wrappers.calls
    finally:
        wrappers.put_on()
    # These were put on after the strategy.
    assert len(made(strategy).predict(batches(), verbose=0)) == 64
    assert wrappers.calls["predict"] == 1


def test_a_wrapper_leaves_models_outside_of_the_scope_to_keras(strategy, wrappers):
    model = Model([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mae", metrics=[Examples()])
    assert type(model.weights[0]) is keras.Variable
    for fit in (FIT, Model.fit):
        assert fit(model, batches(), shuffle=False, verbose=0).history["examples"] == [64.0]
    assert wrappers.calls["fit"] == 1
