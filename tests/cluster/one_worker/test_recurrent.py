"""Recurrent layers that keep their states from batch to batch (`stateful=True`).

One worker must leave weights and states as plain Keras does, whatever has moved the states on.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from kerasps.variables.storage.kinds import is_recurrent_state
from support.compare import assert_equal
from support.versions import warned_since

BATCH, LENGTH, FEATURES = 4, 5, 3
X = np.random.default_rng(0).normal(size=(16, LENGTH, FEATURES)).astype("float32")
X[::3, 3:] = 0.0  # for the mask
Y = X.sum(axis=(1, 2))[:, None]


class Cell(layers.Layer):
    """A cell of a user's."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.state_size, self.output_size = [units, units], units
        self.dense = layers.Dense(units, activation="tanh")

    def build(self, shape):
        self.dense.build((None, shape[-1] + self.output_size))

    def call(self, inputs, states):
        last, mean = states
        output = self.dense(keras.ops.concatenate([inputs, last], axis=-1))
        return output, [output, 0.5 * (mean + output)]


def every_kind():
    """A functional model with layers of several kinds side by side."""
    x = keras.Input(batch_shape=(BATCH, LENGTH, FEATURES))
    image = layers.Reshape((LENGTH, FEATURES, 1, 1))(x)
    sequence = layers.LSTM(4, stateful=True, return_sequences=True)(layers.Masking()(x))
    parts = [
        layers.SimpleRNN(4, stateful=True)(sequence),
        layers.RNN(Cell(4), stateful=True)(x),
        layers.Bidirectional(layers.GRU(4, stateful=True, dropout=0.2))(x),
        layers.Flatten()(layers.ConvLSTM2D(2, (3, 1), padding="same", stateful=True)(image)),
    ]
    return keras.Model(x, layers.Dense(1)(layers.concatenate(parts)))


class Subclassed(keras.Model):
    """What `every_kind` is not: layers of a class, which the first step builds."""

    def __init__(self):
        super().__init__()
        self.first = layers.GRU(6, stateful=True, return_sequences=True)
        self.second = layers.LSTM(4, stateful=True)
        self.out = layers.Dense(1, dtype="float32")

    def call(self, x):
        return self.out(self.second(self.first(x)))


def mixed():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return Subclassed()
    finally:
        keras.config.set_dtype_policy(before)


def stateful_layers(model):
    return [layer for layer in model._flatten_layers() if getattr(layer, "states", None)]


def states_of(model):
    return [
        state
        for layer in stateful_layers(model)
        for state in keras.tree.flatten(layer.states)
        if isinstance(state, keras.Variable)
    ]


class Resets(keras.callbacks.Callback):
    """Resets the states before each epoch, and after the second batch of each."""

    def reset(self):
        for layer in stateful_layers(self.model):
            layer.reset_state()

    def on_epoch_begin(self, epoch, logs=None):
        self.reset()

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.reset()


def driven(make, callbacks, **arguments):
    """Make a model and use it in every way; return it, its states at times, and its outputs."""
    keras.utils.set_random_seed(7)
    model = make()
    model.compile("adam", "mse", **arguments)
    found = []

    def note(*values):
        found.extend([*map(np.asarray, values), *(s.numpy() for s in states_of(model))])

    fit = model.fit(X, Y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
    note(fit.history["loss"])
    if not callbacks:
        note(model.evaluate(X, Y, batch_size=BATCH, verbose=0))
        note(model.predict(X, batch_size=BATCH, verbose=0))
        note(model.train_on_batch(X[:BATCH], Y[:BATCH]))
        note(model(X[:BATCH]))
        for layer in stateful_layers(model):
            layer.reset_state()
        note(model.predict(X[:BATCH], batch_size=BATCH, verbose=0))
    return model, found


@pytest.mark.filterwarnings("ignore:Steps of model .* run eagerly")
@warned_since((3, 16), "Layer '.*was passed an input with a mask")
@pytest.mark.parametrize(
    ("make", "callbacks", "arguments"),
    [
        (every_kind, [], {}),
        pytest.param(Subclassed, [Resets], {}, marks=pytest.mark.matrix),
        pytest.param(Subclassed, [], {"run_eagerly": True}, marks=pytest.mark.matrix),
        pytest.param(mixed, [], {"steps_per_execution": 2}, marks=pytest.mark.matrix),
    ],
    ids=["every kind", "reset by a callback", "eager", "mixed precision, several steps at once"],
)
def test_one_worker_equals_plain_keras(strategy, make, callbacks, arguments):
    plain, expected = driven(make, [callback() for callback in callbacks], **arguments)
    with strategy.scope():
        ours, found = driven(make, [callback() for callback in callbacks], **arguments)
    assert states_of(ours)
    assert all(map(is_recurrent_state, states_of(ours)))
    relative = 1e-2 if make is mixed else 1e-4
    for actual, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=relative, atol=relative / 10)
    assert_equal(plain, ours, relative=relative)
    assert any(np.any(state.numpy() != 0) for state in states_of(ours))


def test_a_model_from_outside_takes_its_states_along(strategy):
    plain, _ = driven(Subclassed, [Resets()])
    ours, _ = driven(Subclassed, [Resets()])
    with strategy.scope():
        ours.compile("adam", "mse")
    plain.compile("adam", "mse")
    for model in (plain, ours):
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for actual, expected in zip(states_of(ours), states_of(plain), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
        assert "/job:ps" in actual.device
