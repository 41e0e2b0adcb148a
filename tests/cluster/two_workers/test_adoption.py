"""What was made outside the scope takes part in a training as if it had been made in it: by whom,
when and wherever.
"""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.variables.keras.variable import ParameterServerVariable
from support.matrix import with_matrix

NUM_BATCHES = 40


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(NUM_BATCHES * 16, 4)).astype("float32")
    return x, x[:, :1]


class Batches(keras.metrics.Metric):
    """Counts batches as anyone would write it: with a read and a write."""

    def __init__(self, name: str = "batches") -> None:
        super().__init__(name=name)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + 1.0)

    def result(self):
        return self.count


class CountingLoss(keras.losses.Loss):
    """A loss with state of its own, which no model knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False, name="calls")

    def call(self, y_true, y_pred):
        self.calls.assign(self.calls + 1.0)
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def make_layers() -> list[keras.layers.Layer]:
    return [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)]


def fit(model: keras.Model, **arguments) -> keras.callbacks.History:
    return model.fit(*data(), batch_size=16, verbose=0, **arguments)


def assert_on_the_cluster(model: keras.Model) -> None:
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    assert all(isinstance(v, ParameterServerVariable) for v in variables)
    assert all("/job:ps" in v.device for v in [*model.weights, *model.optimizer.variables])


def test_a_metric_made_outside_counts_every_batch(strategy):
    metric = Batches()
    with strategy.scope():
        model = keras.Sequential(make_layers())
        model.compile("sgd", "mse", metrics=[metric])
    assert fit(model, epochs=3).history["batches"] == [NUM_BATCHES] * 3
    assert (
        model.evaluate(*data(), batch_size=16, verbose=0, return_dict=True)["batches"]
        == NUM_BATCHES
    )


def test_a_loss_and_a_global_with_state_count_every_batch(strategy):
    loss, seen = CountingLoss(), keras.Variable(np.zeros(2, "int64"), trainable=False, name="seen")

    class Model(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            seen.assign(seen + np.array([1, 2]))
            return logs

    with strategy.scope():
        model = Model(make_layers())
        model.compile("sgd", loss)
    fit(model, epochs=2)
    assert float(loss.calls) == 2 * NUM_BATCHES
    assert seen.numpy().tolist() == [2 * NUM_BATCHES, 4 * NUM_BATCHES]
    assert "/job:ps" in seen.device


@pytest.mark.parametrize(
    ("built", "wrapped"),
    with_matrix(
        [(False, False), (False, True), (True, False), (True, True)],
        at_length=[(False, False), (False, True), (True, False)],
    ),
)
def test_an_optimizer_made_outside_is_adopted_with_its_slots(strategy, built, wrapped):
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    model = keras.Sequential(make_layers())
    optimizer.exclude_from_weight_decay([model.layers[0].bias])
    if wrapped:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    inner = optimizer.inner_optimizer if wrapped else optimizer
    slots: list[np.ndarray] = []
    if built:
        optimizer.build(model.trainable_variables)
        inner._momentums[0].assign(np.full((4, 8), 3.0))
        slots = [v.numpy() for v in optimizer.variables]
    with strategy.scope():
        model.compile(optimizer, "mse")
    for before, variable in zip(slots, optimizer.variables, strict=False):
        np.testing.assert_array_equal(variable.numpy(), before)
    assert not inner._use_weight_decay(model.layers[0].bias)
    assert inner._use_weight_decay(model.layers[0].kernel)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(data()[0]))
    optimizer.apply(
        tape.gradient(loss, model.trainable_variables), model.trainable_variables
    )  # here, on the ps
    fit(model)
    assert int(inner.iterations) == 1 + NUM_BATCHES
    assert_on_the_cluster(model)
    assert all(
        slot.device == v.device
        for slot, v in zip(inner._momentums, model.trainable_variables, strict=True)
    )


def test_a_model_made_outside_moves_to_the_ps_byte_by_byte(strategy):
    rows = 150_000  # 19 MB: more than one piece, and in two shards
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(rows, 32),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    before, made = model.get_weights(), [id(v) for v in model.variables]
    with strategy.scope():
        model.compile("adam", "mse", metrics=["mae", Batches()])
    for expected, actual in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert [id(v) for v in model.variables] == made
    assert len(model.layers[0].embeddings.shards) == 2
    x = np.random.default_rng(1).integers(0, rows, size=(640, 2))
    history = model.fit(x, x[:, :1] / rows, batch_size=16, epochs=2, verbose=0).history
    assert history["batches"] == [NUM_BATCHES] * 2
    assert_on_the_cluster(model)
    untouched = np.setdiff1d(np.arange(rows), x)
    np.testing.assert_array_equal(model.get_weights()[0][untouched], before[0][untouched])


def test_compile_outside_the_scope_is_in_it(strategy):
    with strategy.scope():
        model = keras.Sequential(make_layers())
    model.compile("adam", "mse", metrics=["mae", Batches()])
    assert isinstance(model.optimizer.iterations, ParameterServerVariable)
    assert fit(model).history["batches"] == [NUM_BATCHES]
    assert_on_the_cluster(model)


@pytest.mark.parametrize("how", ["call", "build", "nothing"])
def test_a_model_of_ours_is_built_outside_the_scope(strategy, how):
    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = [keras.layers.Dense(8), keras.layers.Dense(8)]

        def call(self, x):
            for layer in self.hidden:
                x = layer(x)
            return self.late(x)

        def build(self, shape):
            self.late = keras.layers.Dense(1)

    with strategy.scope():
        model = Lazy()
    model.summary(print_fn=lambda *_, **__: None)
    if how == "call":
        model(data()[0][:2])
    if how == "build":
        model.build((None, 4))
    assert all(isinstance(v, ParameterServerVariable) for v in model.variables)
    model.compile("adam", "mse")
    fit(model)
    assert len(model.variables) == 6
    assert_on_the_cluster(model)


def test_a_model_that_trained_plainly_goes_on_under_the_strategy(strategy):
    model = keras.Sequential(make_layers())
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[Batches()])
    plain_loss = fit(model).history["loss"][-1]
    with strategy.scope():
        logs = fit(model, validation_data=data()).history
        assert model.predict(data()[0], verbose=0).shape == (NUM_BATCHES * 16, 1)
    assert int(model.optimizer.iterations) == 2 * NUM_BATCHES
    assert logs["batches"] == [NUM_BATCHES]
    assert logs["loss"][-1] < plain_loss
    assert_on_the_cluster(model)


def test_a_model_made_of_models_of_ours_is_ours(strategy):
    with strategy.scope():
        encoder, decoder = (
            keras.Sequential([keras.layers.Dense(2)]),
            keras.Sequential([keras.layers.Dense(4)]),
        )
    outer = keras.Sequential([encoder, decoder, keras.layers.Dense(1)])
    outer.compile("sgd", "mse", metrics=[Batches()])
    assert fit(outer).history["batches"] == [NUM_BATCHES]
    assert_on_the_cluster(outer)
    assert encoder.predict(data()[0], verbose=0).shape == (NUM_BATCHES * 16, 2)


def test_clones_and_loaded_models_are_adopted(strategy, tmp_path):
    with strategy.scope():
        model = keras.Sequential(make_layers())
        model.compile("adam", "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(
        tmp_path / "model.keras"
    )  # outside: a plain model, with its slots
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    with strategy.scope():
        loaded.compile(loaded.optimizer, "mse")
        clone.compile("adam", "mse")
    assert int(loaded.optimizer.iterations) == NUM_BATCHES
    fit(loaded)
    fit(clone)
    assert int(loaded.optimizer.iterations) == 2 * NUM_BATCHES
    assert_on_the_cluster(loaded)
    assert_on_the_cluster(clone)


def test_a_plain_model_stays_plain(strategy):
    model = keras.Sequential(make_layers())
    model.compile("adam", "mse", metrics=[Batches()])
    assert fit(model).history["batches"] == [NUM_BATCHES]
    assert not any(
        isinstance(v, ParameterServerVariable)
        for v in [*model.variables, *model.optimizer.variables]
    )


def test_what_was_moved_is_freed(strategy):
    gc.collect()
    held = strategy.placement().num_bytes
    model = keras.Sequential(make_layers())
    with strategy.scope():
        model.compile("adam", "mse")
    fit(model)
    assert strategy.placement().num_bytes > held
    del model
    gc.collect()
    assert strategy.placement().num_bytes == held


def test_a_variable_of_another_strategy_is_refused_by_name(strategy):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="elsewhere")])
    with (
        strategy.scope(),
        pytest.raises(
            kerasps.UnsupportedError, match="elsewhere/kernel' belongs to another strategy"
        ),
    ):
        model.compile("adam", "mse")
