"""Kinds of layers, models and training steps, each against plain Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.compare import assert_equal, dataset, regression_data, train_both
from support.matrix import with_matrix
from support.versions import warned_since

LAYERS = {
    "dense": lambda: [keras.Input((8,)), keras.layers.Dense(16, activation="relu")],
    "conv": lambda: [
        keras.Input((8,)),
        keras.layers.Reshape((8, 1)),
        keras.layers.Conv1D(6, 3, activation="relu"),
        keras.layers.Flatten(),
    ],
    "conv2d": lambda: [
        keras.Input((8,)),
        keras.layers.Reshape((4, 2, 1)),
        keras.layers.Conv2D(4, 2, activation="relu"),
        keras.layers.SeparableConv2D(4, 1),
        keras.layers.Conv2D(4, 1, groups=2),  # a CPU can do it only when XLA compiles it
        keras.layers.Flatten(),
    ],
    "batch_norm": lambda: [
        keras.Input((8,)),
        keras.layers.Dense(16, use_bias=False),
        keras.layers.BatchNormalization(),
    ],
    "layer_norm": lambda: [
        keras.Input((8,)),
        keras.layers.Dense(16),
        keras.layers.LayerNormalization(),
    ],
    "lstm": lambda: [keras.Input((8,)), keras.layers.Reshape((4, 2)), keras.layers.LSTM(6)],
    "gru": lambda: [keras.Input((8,)), keras.layers.Reshape((4, 2)), keras.layers.GRU(6)],
    "bidirectional": lambda: [
        keras.Input((8,)),
        keras.layers.Reshape((4, 2)),
        keras.layers.Bidirectional(keras.layers.SimpleRNN(5, unroll=True)),
    ],
    "attention": lambda: [
        keras.Input((8,)),
        keras.layers.Reshape((4, 2)),
        _SelfAttention(),
        keras.layers.Flatten(),
    ],
    "spectral": lambda: [
        keras.Input((8,)),
        keras.layers.SpectralNormalization(keras.layers.Dense(8)),
    ],
    "dropout": lambda: [
        keras.Input((8,)),
        keras.layers.Dense(16),
        keras.layers.Dropout(0.5, seed=3),
    ],
    "noise": lambda: [
        keras.Input((8,)),
        keras.layers.GaussianNoise(0.1, seed=3),
        keras.layers.AlphaDropout(0.2, seed=4),
    ],
    "regularized": lambda: [
        keras.Input((8,)),
        keras.layers.Dense(
            16, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L1(0.001)
        ),
    ],
    "constrained": lambda: [
        keras.Input((8,)),
        keras.layers.Dense(
            16, kernel_constraint=keras.constraints.MaxNorm(0.5), bias_constraint="non_neg"
        ),
    ],
    "frozen": lambda: [
        keras.Input((8,)),
        keras.layers.Dense(16, trainable=False),
        keras.layers.Dense(8),
    ],
}


class _SelfAttention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 3)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


def sequential(layers, steps_per_execution=5, **compile_arguments):
    model = keras.Sequential([*layers(), keras.layers.Dense(1)])
    model.compile(
        compile_arguments.pop("optimizer", keras.optimizers.Adam(0.01)),
        "mse",
        metrics=["mae"],
        steps_per_execution=steps_per_execution,
        **compile_arguments,
    )
    return model


@pytest.mark.parametrize(
    "name",
    with_matrix(
        LAYERS,
        at_length=[
            *("dense", "conv", "layer_norm", "gru", "lstm", "noise", "frozen", "constrained"),
        ],
    ),
)
def test_layer_equals_plain_keras(strategy, name):
    plain, ours = train_both(strategy, lambda: sequential(LAYERS[name]), regression_data())
    assert_equal(plain, ours)


# 50 steps in executions of 7 end with one of a single step; 23 are a loop of unrolled blocks.
@pytest.mark.parametrize("steps_per_execution", with_matrix([7, 23], at_length=[7]))
def test_steps_per_execution_equals_plain_keras(strategy, steps_per_execution):
    plain, ours = train_both(
        strategy, lambda: sequential(LAYERS["batch_norm"], steps_per_execution), regression_data()
    )
    assert_equal(plain, ours)


@warned_since((3, 16), "Layer '.*was passed an input with a mask")
def test_masked_sequence_equals_plain_keras(strategy):
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 9, size=(320, 6)).astype("int32")
    data = (ids, (ids[:, :1] > 4).astype("float32"))

    def make():
        layers = [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(9, 4, mask_zero=True),
            keras.layers.LSTM(5),
        ]
        return sequential(lambda: layers)

    assert_equal(*train_both(strategy, make, data, sum_repeated_ids=True))


def test_multiple_inputs_and_outputs_equal_plain_keras(strategy):
    x, y = regression_data()
    data = (
        {"a": x[:, :3], "b": x[:, 3:]},
        {"p": y, "q": y > 0},
        {"p": np.abs(y[:, 0]), "q": np.ones(len(y), "float32")},
    )

    def make():
        a, b = keras.Input((3,), name="a"), keras.Input((5,), name="b")
        hidden = keras.layers.Concatenate()([keras.layers.Dense(6)(a), keras.layers.Dense(6)(b)])
        outputs = {
            "p": keras.layers.Dense(1, name="p")(hidden),
            "q": keras.layers.Dense(1, "sigmoid", name="q")(hidden),
        }
        model = keras.Model({"a": a, "b": b}, outputs)
        model.compile(
            keras.optimizers.Adam(0.01),
            {"p": "mse", "q": "binary_crossentropy"},
            loss_weights={"p": 1.0, "q": 0.3},
            metrics={"p": ["mae"], "q": ["accuracy", keras.metrics.AUC(name="auc")]},
            weighted_metrics={"p": ["mse"]},
            steps_per_execution=5,
        )
        return model

    plain, ours = train_both(strategy, make, data, epochs=2, steps=20)
    assert_equal(plain, ours)
    assert list(plain.history.history) == list(ours.history.history)
    for name, values in plain.history.history.items():
        np.testing.assert_allclose(ours.history.history[name], values, rtol=1e-4, err_msg=name)


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """Not built before fit; with a loss of its own and a metric of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.out = keras.layers.Dense(1)
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x):
        hidden = self.hidden(x)
        self.add_loss(0.01 * keras.ops.mean(hidden**2))
        return self.out(hidden)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return (
            super().compute_loss(x, y, y_pred, sample_weight, training)
            + keras.ops.mean(keras.ops.abs(y_pred)) * 0.01
        )

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.norm.update_state(keras.ops.norm(y_pred))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def test_subclassed_model_equals_plain_keras(strategy):
    def make():
        model = Subclassed()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=5)
        return model

    plain, ours = train_both(strategy, make, regression_data())
    assert_equal(plain, ours)
    assert set(ours.history.history) == {"loss", "mae", "norm"}
    np.testing.assert_allclose(
        ours.history.history["norm"], plain.history.history["norm"], rtol=1e-5
    )


class TwoOptimizers(keras.Model):
    """A training step of its own: two optimizers, a state of its own, logs that are no metrics."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = keras.layers.Dense(8, activation="tanh")
        self.second = keras.layers.Dense(1)
        self.first_optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self.second_optimizer = keras.optimizers.Adam(0.01)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        for layer, optimizer in (
            (self.first, self.first_optimizer),
            (self.second, self.second_optimizer),
        ):
            optimizer.apply_gradients(
                zip(
                    tape.gradient(loss, layer.trainable_weights),
                    layer.trainable_weights,
                    strict=True,
                )
            )
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return {"my_loss": loss, "twice": 2 * loss}


def test_custom_train_step_equals_plain_keras(strategy):
    def make():
        model = TwoOptimizers()
        model.compile(steps_per_execution=5)
        return model

    plain, ours = train_both(strategy, make, regression_data())
    assert_equal(plain, ours, optimizer=False)
    assert float(ours.seen.numpy()) == 50 * 16
    assert (
        int(ours.first_optimizer.iterations.numpy())
        == int(ours.second_optimizer.iterations.numpy())
        == 50
    )
    assert list(ours.history.history) == ["my_loss", "twice"]
    np.testing.assert_allclose(
        ours.history.history["twice"], plain.history.history["twice"], rtol=1e-4
    )


class Conditional(keras.Model):
    """Applies gradients, and moves a state, in every second step only: inside a `cond`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1)
        self.skipped = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="int32", name="skipped"
        )
        self.steps = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="int32", name="steps"
        )

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)

        def apply():
            self.optimizer.apply(gradients, self.trainable_weights)

        def skip():
            self.skipped.assign_add(1)

        keras.ops.cond(self.steps % 2 == 0, apply, skip)
        self.steps.assign_add(1)
        return {"loss": loss}


def test_conditional_update_equals_plain_keras(strategy):
    def make():
        model = Conditional()
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=5)
        return model

    plain, ours = train_both(strategy, make, regression_data())
    assert_equal(plain, ours)
    assert int(ours.optimizer.iterations.numpy()) == 25
    assert int(ours.skipped.numpy()) == 25


def test_update_in_a_loop_is_refused_by_name(strategy):
    class Looping(Conditional):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_weights)

            def body(i):
                self.optimizer.apply(gradients, self.trainable_weights)
                return i + 1

            tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])
            return {"loss": loss}

    with strategy.scope():
        model = Looping()
        model.compile("sgd", "mse")
    with pytest.raises(
        kerasps.UnsupportedError, match=r"inside a `tf.while_loop` of `train_step`.*Unroll the loop"
    ):
        model.fit(
            kerasps.DatasetCreator(lambda context: dataset(regression_data())),
            steps_per_epoch=2,
            verbose=0,
        )


@pytest.mark.parametrize(
    "policy",
    with_matrix(["mixed_bfloat16", "mixed_float16", "bfloat16"], at_length=["mixed_bfloat16"]),
)
def test_mixed_precision_equals_plain_keras(strategy, policy):
    def make():
        keras.config.set_dtype_policy(policy)
        try:
            # Adam's second moment needs more digits than bfloat16 has: no weight would move.
            optimizer = keras.optimizers.SGD if policy == "bfloat16" else keras.optimizers.Adam
            return sequential(LAYERS["dense"], optimizer=optimizer(0.01))
        finally:
            keras.config.set_dtype_policy("float32")

    plain, ours = train_both(strategy, make, regression_data())
    # The arithmetic is the same, in the same order, in the low precision.
    assert_equal(plain, ours, relative=1e-5 if policy != "bfloat16" else 1e-2)


@pytest.mark.parametrize(
    "name",
    with_matrix(
        ["dense", "conv", "batch_norm", "lstm", "dropout"],
        at_length=["dense", "conv", "batch_norm", "lstm"],
    ),
)
def test_jit_compile_equals_plain_keras(strategy, name):
    plain, ours = train_both(
        strategy, lambda: sequential(LAYERS[name], jit_compile=True), regression_data()
    )
    assert ours.jit_compile
    assert_equal(plain, ours, relative=1e-4)


def test_jit_compile_with_loss_scaling_equals_plain_keras(strategy):
    def make():
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), dynamic_growth_steps=5
        )
        return sequential(LAYERS["dense"], jit_compile=True, optimizer=optimizer)

    assert_equal(*train_both(strategy, make, regression_data()), relative=1e-4)


def test_recompiling_and_freezing_equals_plain_keras(strategy):
    def make_and_freeze(model):
        model.layers[0].trainable = False
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=5)
        return model

    plain, ours = train_both(
        strategy, lambda: sequential(LAYERS["dense"]), regression_data(), steps=10
    )
    frozen = ours.layers[0].kernel.numpy()
    make_and_freeze(plain)
    with strategy.scope():
        make_and_freeze(ours)
    plain.fit(dataset(regression_data()), steps_per_epoch=10, verbose=0, shuffle=False)
    ours.fit(
        kerasps.DatasetCreator(lambda context: dataset(regression_data())),
        steps_per_epoch=10,
        verbose=0,
    )
    assert_equal(plain, ours)
    np.testing.assert_array_equal(ours.layers[0].kernel.numpy(), frozen)
