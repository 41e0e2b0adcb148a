"""Models under the strategy as the global default, and models that are built by another method than
`fit`.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.variables.keras.variable import ParameterServerVariable
from support.compare import regression_data
from support.matrix import with_matrix


def make_model():
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


@pytest.fixture
def default_strategy(strategy):
    """The session's strategy as the global default, for the length of a test."""
    tf.distribute.experimental_set_strategy(strategy)
    yield strategy
    tf.distribute.experimental_set_strategy(None)


def test_fit_with_validation_under_a_default_strategy(default_strategy):
    x, y = regression_data()
    model = make_model()
    history = model.fit(
        x, y, batch_size=16, epochs=2, validation_data=(x, y), shuffle=False, verbose=0
    ).history
    assert history["val_loss"][-1] == pytest.approx(
        model.evaluate(x, y, batch_size=32, verbose=0)[0]
    )
    assert all(
        isinstance(v, ParameterServerVariable)
        for v in [*model.variables, *model.optimizer.variables]
    )


def test_a_cleared_session_leaves_the_scope_as_it_was(strategy):
    # As a tuner does before each trial, while its caller is in the scope.
    with strategy.scope():
        keras.utils.clear_session()
        assert tf.distribute.get_strategy() is strategy
        model = make_model()
        assert "/job:ps" in tf.Variable(1.0).device
    assert not tf.distribute.has_strategy()
    assert "/job:ps" not in tf.Variable(1.0).device
    assert all(isinstance(v, ParameterServerVariable) for v in model.variables)


def test_a_cleared_session_leaves_the_default_strategy_as_it_was(default_strategy):
    keras.utils.clear_session()
    assert tf.distribute.get_strategy() is default_strategy


def test_a_loss_scale_optimizer_is_applied_in_the_scope_as_outside_it(strategy):
    def apply_thrice():
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.5), initial_scale=4.0, dynamic_growth_steps=2
        )
        variable = keras.Variable([1.0, 2.0])
        for gradient in ([4.0, 8.0], [float("inf"), 1.0], [2.0, 4.0]):
            optimizer.apply([tf.constant(gradient)], [variable])
        return [variable, *optimizer.variables]

    expected = apply_thrice()
    with strategy.scope():
        actual = apply_thrice()
    assert all(isinstance(v, ParameterServerVariable) for v in actual)
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy())


CALLS = {
    "evaluate": lambda model, x, y: model.evaluate(x, y, verbose=0),
    "predict": lambda model, x, y: model.predict(x, verbose=0),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x, y),
    "predict_on_batch": lambda model, x, y: model.predict_on_batch(x),
}


@pytest.mark.parametrize(
    ("name", "in_scope"),
    with_matrix(
        itertools.product(CALLS, [False, True]),
        at_length=[
            *(("evaluate", False), ("evaluate", True), ("predict", True)),
            *(("test_on_batch", True), ("test_on_batch", False)),
            *(("predict_on_batch", True), ("predict_on_batch", False)),
        ],
    ),
)
def test_a_model_that_another_method_builds_is_trained_like_one_that_fit_builds(
    strategy, name, in_scope
):
    x, y = regression_data()
    keras.utils.set_random_seed(7)
    plain = make_model()
    expected = CALLS[name](plain, x[:16], y[:16])
    keras.utils.set_random_seed(7)
    with strategy.scope():
        ours = make_model()
        if in_scope:
            actual = CALLS[name](ours, x[:16], y[:16])
    if not in_scope:
        actual = CALLS[name](ours, x[:16], y[:16])
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert all(isinstance(v, ParameterServerVariable) for v in ours.variables)
    assert all("/job:ps" in v.device for v in ours.trainable_variables)
    for model in (plain, ours):
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_not_compiled_predicts(strategy):
    x, _ = regression_data()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")])
    np.testing.assert_allclose(
        model.predict(x[:3], verbose=0), np.repeat(x[:3].sum(1, keepdims=True), 2, 1), rtol=1e-5
    )
