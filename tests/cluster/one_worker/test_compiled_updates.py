"""Updates that XLA compiles equal Keras's, whatever the optimizer; and what must not be, is not."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.step.updates import compiled, fused
from support.compare import assert_equal, regression_data, train_both
from support.matrix import with_matrix
from support.optimizers import NOT_ELEMENTWISE, OPTIMIZERS
from support.spread import keep_spread

# XLA rounds the last bits in another way, and fifty steps of a small model make more of that.
ROUNDED = 1e-3
KERNELS = ["sgd", "momentum", "nesterov"]


@pytest.fixture
def traced(monkeypatch):
    """Has all values count as large; returns a list that takes what becomes of each update."""
    monkeypatch.setattr(compiled, "COMPILED_BYTES", 0)
    functions = []
    trace = compiled._traced

    def noted(*arguments):
        functions.append(trace(*arguments))
        return functions[-1]

    monkeypatch.setattr(compiled, "_traced", noted)
    return functions


def model_with(optimizer, num_equal=1, dtype=None, **arguments):
    layers = [keras.layers.Dense(12, activation="tanh", dtype=dtype) for _ in range(num_equal)]
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(12, activation="tanh", dtype=dtype),
            *layers,
            keras.layers.Dense(1, dtype=dtype),
        ]
    )
    model.compile(optimizer, "mse", steps_per_execution=7, **arguments)
    return model


ELEMENTWISE = [name for name in OPTIMIZERS if name not in (*KERNELS, *NOT_ELEMENTWISE)]


@pytest.mark.parametrize(
    "name",
    with_matrix(
        ELEMENTWISE,
        at_length=[n for n in ELEMENTWISE if n not in ("adam", "nadam", "ftrl")],
    ),
)
def test_a_compiled_update_equals_plain_keras(strategy, traced, name):
    plain, ours = train_both(strategy, lambda: model_with(OPTIMIZERS[name]()), regression_data())
    assert traced
    assert None not in traced
    assert_equal(plain, ours, relative=ROUNDED)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"weight_decay": 0.01, "global_clipnorm": 0.05}, marks=pytest.mark.matrix),
        pytest.param(
            {"gradient_accumulation_steps": 3, "weight_decay": 0.01}, marks=pytest.mark.matrix
        ),
        {"use_ema": True, "ema_momentum": 0.9},
    ],
    ids=["decay", "accumulation", "ema"],
)
def test_a_compiled_update_with_options_equals_plain_keras(strategy, sharded, traced, options):
    sharded(2, min_bytes=64)
    plain, ours = train_both(
        strategy,
        lambda: model_with(keras.optimizers.AdamW(0.02, **options)),
        regression_data(),
    )
    assert traced
    assert None not in traced
    assert_equal(plain, ours, relative=ROUNDED)


@pytest.mark.parametrize(
    "name",
    with_matrix([*KERNELS, "lamb", "adafactor"], at_length=["sgd", "nesterov", "adafactor"]),
)
def test_updates_with_a_kernel_or_other_operations_are_not_compiled(strategy, traced, name):
    plain, ours = train_both(
        strategy, lambda: model_with(OPTIMIZERS[name]()), regression_data(), steps=10
    )
    assert {*traced} <= {None}
    assert_equal(plain, ours, relative=ROUNDED)


def test_large_variables_of_one_shape_share_a_function(strategy, traced, monkeypatch):
    keep_spread(monkeypatch)
    monkeypatch.setattr(fused, "SMALL_BYTES", -1)  # each variable is updated by itself
    plain, ours = train_both(strategy, lambda: model_with("adam", num_equal=8), regression_data())
    # On two ps, of 20 variables in 5 shapes: 8 x 12, 12 x 12, 12 x 1, 12 and 1.
    assert len(ours.trainable_variables) == 20
    assert len(traced) <= 2 * 5
    assert None not in traced
    assert_equal(plain, ours, relative=ROUNDED)


def test_with_the_argument_false_all_bits_are_keras_own(strategy, traced, monkeypatch):
    host = strategy.extended.host
    options = dataclasses.replace(host.options, jit_compile_updates=False)
    monkeypatch.setattr(host, "options", options)
    plain, ours = train_both(strategy, lambda: model_with("adam"), regression_data(), steps=20)
    assert traced == []
    for a, b in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_float64_is_compiled(strategy, traced):
    plain, ours = train_both(
        strategy, lambda: model_with("adam", dtype="float64"), regression_data(), steps=10
    )
    assert traced
    assert_equal(plain, ours, relative=ROUNDED)


def test_half_precision_is_not_compiled(strategy, traced):
    """XLA would keep more bits between two operations than Keras's operations do."""
    train_both(
        strategy,
        lambda: model_with(keras.optimizers.Adagrad(0.05), dtype="bfloat16"),
        regression_data(),
        steps=10,
    )
    assert traced == []


class Checked(keras.optimizers.Adam):
    """Has an operation that is not elementwise."""

    def update_step(self, gradient, variable, learning_rate):
        gradient = tf.debugging.check_numerics(gradient, "A gradient is not finite.")
        super().update_step(gradient, variable, learning_rate)


def test_an_update_with_another_operation_is_done_operation_by_operation(strategy, traced):
    plain, ours = train_both(
        strategy, lambda: model_with(Checked(0.01)), regression_data(), steps=20
    )
    assert {*traced} == {None}
    assert_equal(plain, ours, relative=ROUNDED)
