"""Small variables are updated as one in `fit`, and are themselves whenever someone looks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.compare import assert_equal, assert_learned, dataset, regression_data, train_both

STEPS = 12


def make_model(optimizer=None, **last):
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(6, activation="tanh"),
        keras.layers.Dense(4, activation="tanh"),
    ]
    model = keras.Sequential([*layers, keras.layers.Dense(1, name="last", **last)])
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", steps_per_execution=3)
    return model


def paths_in_vectors(model):
    return sorted(
        shard.variable.path
        for fused in model.train_function._plan.fused.all
        for shard in fused.shards
    )


def paths_of(model, but=()):
    return sorted(v.path for v in model.trainable_variables if v.path not in but)


def fit(model, **arguments):
    data = kerasps.DatasetCreator(lambda context: dataset(regression_data()))
    return model.fit(data, steps_per_epoch=STEPS, verbose=0, **arguments)


@pytest.mark.parametrize(
    ("make", "left_out"),
    [
        (make_model, ()),
        (lambda: make_model(keras.optimizers.Lamb(0.01)), "all"),
        (lambda: make_model(keras.optimizers.Adam(0.01, use_ema=True)), "all"),
        (lambda: make_model(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)), "all"),
        (lambda: make_model(kernel_constraint=keras.constraints.MaxNorm(1.0)), ("last/kernel",)),
    ],
    ids=["adam", "lamb", "ema", "accumulation", "constraint"],
)
def test_which_variables_are_updated_as_one(strategy, make, left_out):
    with strategy.scope():
        model = make()
    fit(model)
    expected = (
        []
        if left_out == "all"
        else [path for path in paths_of(model) if not path.endswith(tuple(left_out) or "\0")]
    )
    fused = paths_in_vectors(model)
    alone_on_their_ps = set(expected) - set(fused)
    assert set(fused) <= set(expected)
    assert len(alone_on_their_ps) < strategy.num_ps or left_out == "all"


def test_variables_that_decay_and_those_that_do_not(strategy):
    def make():
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return make_model(optimizer)

    plain, ours = train_both(strategy, make, regression_data())
    assert len(paths_in_vectors(ours)) > 2
    for fused in ours.train_function._plan.fused.all:
        assert len({shard.variable.name for shard in fused.shards}) == 1
    assert_equal(plain, ours)


def test_a_step_that_reads_a_slot_finds_it_as_it_is(strategy):
    class Watching(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "velocity": keras.ops.sum(keras.ops.abs(self.optimizer._velocities[0]))}

    def make():
        layers = [
            keras.Input((8,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dense(1),
        ]
        model = Watching(layers)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    plain, ours = train_both(strategy, make, regression_data(), steps=STEPS)
    assert ours.trainable_variables[0].path not in paths_in_vectors(ours)
    assert ours.history.history["velocity"][-1] > 0  # as it was before the last step's update
    assert_equal(plain, ours)


def test_a_batch_callback_reads_and_sets_weights(strategy):
    seen = []

    class Halving(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == 6:
                seen.append(self.model.get_weights())
                self.model.set_weights([weight / 2 for weight in self.model.get_weights()])

    keras.utils.set_random_seed(7)
    plain = make_model(keras.optimizers.SGD(0.1))
    plain.fit(
        dataset(regression_data()),
        steps_per_epoch=STEPS,
        verbose=0,
        shuffle=False,
        callbacks=[Halving()],
    )
    keras.utils.set_random_seed(7)
    with strategy.scope():
        ours = make_model(keras.optimizers.SGD(0.1))
    before = [v.numpy() for v in ours.trainable_variables]
    fit(ours, callbacks=[Halving()])
    assert_learned(ours, before)
    for expected, actual in zip(*seen, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert_equal(plain, ours)


def test_fit_and_train_on_batch_in_turn(strategy):
    x, y = regression_data(num_examples=16)

    def train(model, fit):
        for _ in range(2):
            fit(model)
            model.train_on_batch(x, y)

    keras.utils.set_random_seed(7)
    plain = make_model()
    train(
        plain,
        lambda model: model.fit(
            dataset(regression_data()), steps_per_epoch=STEPS, verbose=0, shuffle=False
        ),
    )
    keras.utils.set_random_seed(7)
    with strategy.scope():
        ours = make_model()
    before = [v.numpy() for v in ours.trainable_variables]
    train(ours, fit)
    assert_learned(ours, before)
    assert_equal(plain, ours)


def test_steps_before_an_error_count(strategy):
    def fails_late(context):
        def check(x, y):
            tf.debugging.assert_less(tf.reduce_max(y), 100.0, message="too large")
            return x, y

        x, y = regression_data(num_examples=160)
        y[100] = 1000.0
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(16).map(check)

    with strategy.scope():
        model = make_model()
    before = [v.numpy() for v in model.trainable_variables]
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        model.fit(kerasps.DatasetCreator(fails_late), verbose=0)
    steps = int(model.optimizer.iterations.numpy())
    assert 0 < steps < 10
    assert_learned(model, before)
