"""Batches of different shapes in turn: a model keeps the steps of some, and makes others anew."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from kerasps.step.running.kept_graphs import KEPT_GRAPHS
from kerasps.step.running.make_step import MAX_STEPS

X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = X.sum(1, keepdims=True)


def made(strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        hidden = [keras.layers.Dense(8), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *hidden])
        model.compile("adam", "mse", steps_per_execution=2)
    return model


def batches(size):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    return dataset.batch(size, drop_remainder=size is not None)


def fit(model, size):
    """Train one epoch, on arrays if `size` is None; return the step."""
    if size is None:
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    else:
        model.fit(batches(size), verbose=0, shuffle=False)
        model.evaluate(batches(size), verbose=0)
    return model.train_function


def test_a_shape_that_comes_back_finds_its_step(strategy):
    model = made(strategy)
    arrays, fixed = fit(model, None), fit(model, 8)
    assert arrays is not fixed
    model.train_on_batch(X[:8], Y[:8])
    assert fit(model, None) is arrays
    assert fit(model, 8) is fixed
    model.layers[0].trainable = False
    assert fit(model, None) is not arrays
    assert not model.train_function.earlier


def test_shapes_in_turn_train_as_plain_keras(strategy):
    sizes = [None, 8, 4, None, 8]
    model = made(strategy)
    for size in sizes:
        fit(model, size)
    keras.utils.set_random_seed(3)
    hidden = [keras.layers.Dense(8), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    plain = keras.Sequential([keras.Input((8,)), *hidden])
    plain.compile("adam", "mse")
    for size in sizes:
        fit(plain, size)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_shapes_in_turn_leave_no_graphs(strategy):
    """More shapes than a model keeps steps: those that were dropped are made anew in each round.

    Each graph that a task gets stays there, with its threads.
    """
    model = made(strategy)
    sizes = [None, *range(1, MAX_STEPS + 2)]
    rounds = []
    for _ in range(3):
        graphs = set()
        for size in sizes:
            step = fit(model, size)
            assert len(step.earlier) < MAX_STEPS
            graphs |= {id(graph) for graph in step._step_graphs.values()}
        kept = {id(kept.step_graph) for kept in KEPT_GRAPHS._kept.values()}
        assert graphs <= kept
        rounds.append(kept)
    assert rounds[1] == rounds[2]
