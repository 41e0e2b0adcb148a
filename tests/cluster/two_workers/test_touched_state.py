"""What a step may touch: each kind of state is exact, or refused by name, whoever made it and
where.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps

NUM_STEPS = 40
DATA = np.random.default_rng(0).normal(size=(NUM_STEPS * 8, 4)).astype("float32")


def fit(strategy, train_step, *, metrics=()):
    """Trains a model whose `train_step` also calls `train_step(model)`; returns the history."""

    class Model(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            train_step(self)
            return logs

    with strategy.scope():
        model = Model([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=list(metrics), steps_per_execution=4)
    return model.fit(DATA, DATA[:, :1], batch_size=8, verbose=0).history


@pytest.mark.parametrize(
    ("assign", "made_in_scope"),
    [
        (lambda v: v.assign(v + 1.0), True),
        (lambda v: v.assign_add(1.0), False),
        pytest.param(lambda v: v.assign(v + 1.0), False, marks=pytest.mark.matrix),
        pytest.param(lambda v: v.assign_add(1.0), True, marks=pytest.mark.matrix),
    ],
    ids=["assign-True", "assign_add-False", "assign-False", "assign_add-True"],
)
def test_a_bare_variable_that_is_assigned_is_refused_by_name(strategy, made_in_scope, assign):
    if made_in_scope:
        with strategy.scope():
            counter = tf.Variable(0.0, name="my_counter")
    else:
        counter = tf.Variable(0.0, name="my_counter")
    with pytest.raises(
        kerasps.UnsupportedError,
        match=r"`train_step` assigns the `tf\.Variable` 'my_counter:0'.*keras\.Variable",
    ):
        fit(strategy, lambda model: assign(counter))
    assert float(counter) == 0.0


def test_python_functions_are_refused_by_name(strategy):
    with pytest.raises(
        kerasps.UnsupportedError,
        match=r"`train_step` calls Python functions.*Received: EagerPyFunc",
    ):
        fit(strategy, lambda model: tf.py_function(lambda: 1.0, [], tf.float32))


def test_a_bare_variable_is_read_as_it_is_in_each_epoch(strategy):
    factor, seen = tf.Variable(2.0), keras.Variable(0.0, trainable=False)
    fit(strategy, lambda model: seen.assign_add(factor))
    assert float(seen) == 2.0 * NUM_STEPS


def test_a_random_generator_draws_differently_in_each_step(strategy):
    generator = tf.random.Generator.from_seed(1)
    drawn = keras.Variable(np.zeros(NUM_STEPS), trainable=False, dtype="float32")

    def step(model):
        place = tf.one_hot(tf.cast(model.optimizer.iterations, tf.int32) - 1, NUM_STEPS)
        drawn.assign_add(place * generator.uniform([]))

    fit(strategy, step)
    total = float(tf.reduce_sum(drawn))
    expected = tf.random.Generator.from_seed(1)
    draws = [float(expected.uniform([])) for _ in range(NUM_STEPS)]
    np.testing.assert_allclose(total, sum(draws), rtol=1e-4)


def test_a_seed_generator_and_dropout_made_outside(strategy):
    seeds, dropped = keras.random.SeedGenerator(4), keras.layers.Dropout(0.5, seed=7)
    ones = keras.Variable(0.0, trainable=False)

    def step(model):
        ones.assign_add(
            tf.reduce_sum(dropped(tf.ones([64]), training=True))
            + 0.0 * keras.random.uniform([], seed=seeds)
        )

    fit(strategy, step)
    assert seeds.state.numpy().tolist() == [4, NUM_STEPS]
    assert 0.8 < float(ones) / (64 * NUM_STEPS) < 1.2


def test_variables_in_containers_and_closures(strategy):
    holder = {
        "list": [keras.Variable(0, dtype="int64", trainable=False)],
        "metric": keras.metrics.Sum(),
    }

    def step(model):
        holder["list"][0].assign_add(2)
        holder["metric"].update_state([1.0, 2.0])

    fit(strategy, step)
    assert int(holder["list"][0]) == 2 * NUM_STEPS
    assert float(holder["metric"].result()) == 3.0 * NUM_STEPS
