"""A worker with a GPU gives the weights that plain Keras gives on the same GPU."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from support.compare import assert_equal, regression_data, train_both
from support.optimizers import OPTIMIZERS

# Of float32, where the order of additions may differ.
RELATIVE = 1e-3
STEPS = 50
WORDS = [f"word{i}" for i in range(60)]


def images():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(320, 8, 8, 3)).astype("float32")
    return x, x.mean((1, 2))[:, :1]


def sequences():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(320, 6, 4)).astype("float32")
    return x, np.tanh(x.sum((1, 2)))[:, None]


def ids():
    x = np.random.default_rng(0).integers(0, 64, (320, 4))
    return x, np.sin(x.sum(1, keepdims=True)).astype("float32")


def words():
    x, y = ids()
    return np.array(WORDS)[x % len(WORDS)], y


def bags():
    x, y = ids()
    lengths = np.arange(len(x)) % 5
    return tf.RaggedTensor.from_tensor(x, lengths=lengths), y


def compiled(layers, optimizer=None, **options):
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.05), "mse", metrics=["mae"], **options)
    return model


def dense(**options):
    layers = [keras.Input((8,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(16, "relu")]
    return compiled(layers, **options)


def convolutions():
    layers = [keras.Input((8, 8, 3))]
    for _ in range(2):
        layers += [keras.layers.Conv2D(8, 3, padding="same"), keras.layers.BatchNormalization()]
        layers += [keras.layers.ReLU(), keras.layers.Dropout(0.2)]
    return compiled([*layers, keras.layers.GlobalAveragePooling2D()])


def recurrent(layer):
    return lambda: compiled([keras.Input((6, 4)), layer(8)])


def attention():
    x = keras.Input((6, 4))
    hidden = keras.layers.MultiHeadAttention(2, 8)(x, x)
    hidden = keras.layers.LayerNormalization()(keras.layers.Add()([x, hidden]))
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(hidden))
    model = keras.Model(x, outputs)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def table(optimizer=None):
    layers = [keras.Input((4,), dtype="int64"), keras.layers.Embedding(64, 16)]
    return compiled([*layers, keras.layers.Flatten(), keras.layers.Dense(16, "tanh")], optimizer)


def lookup():
    layers = [keras.Input((4,), dtype="string"), keras.layers.StringLookup(vocabulary=WORDS)]
    layers += [keras.layers.Embedding(61, 16), keras.layers.Flatten()]
    return compiled(layers)


class Bag(keras.Model):
    """The mean of the rows of each example."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(64, 16)
        self.embedding.build()
        self.out = keras.layers.Dense(1)

    def call(self, inputs):
        rows = tf.nn.safe_embedding_lookup_sparse(
            self.embedding.embeddings.value, inputs.to_sparse(), combiner="mean"
        )
        return self.out(rows)


def bag():
    model = Bag()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


MODELS = {
    "dense": (dense, regression_data),
    "convolutions": (convolutions, images),
    "lstm": (recurrent(keras.layers.LSTM), sequences),
    "gru": (recurrent(keras.layers.GRU), sequences),
    "attention": (attention, sequences),
    "table": (table, ids),
    "lookup": (lookup, words),
    "bag": (bag, bags),
}


@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_models(strategy, name):
    make_model, data = MODELS[name]
    plain, ours = train_both(strategy, make_model, data(), steps=STEPS, sum_repeated_ids=True)
    assert_equal(plain, ours, relative=RELATIVE)


@pytest.mark.parametrize("name", ["dense", "table"])
def test_shards(strategy, sharded, name):
    sharded(2)
    make_model, data = MODELS[name]
    plain, ours = train_both(strategy, make_model, data(), steps=STEPS, sum_repeated_ids=True)
    assert_equal(plain, ours, relative=RELATIVE)


@pytest.mark.parametrize("name", ["adam", "adagrad", "momentum", "nadam", "lamb"])
def test_optimizers(strategy, name):
    def make_model():
        return dense(optimizer=OPTIMIZERS[name]())

    plain, ours = train_both(strategy, make_model, regression_data(), steps=STEPS)
    assert_equal(plain, ours, relative=RELATIVE)


@pytest.mark.parametrize("steps_per_execution", [10, 50])
def test_steps_per_execution(strategy, steps_per_execution):
    def make_model():
        return dense(steps_per_execution=steps_per_execution)

    plain, ours = train_both(strategy, make_model, regression_data(), steps=STEPS)
    assert_equal(plain, ours, relative=RELATIVE)


def test_mixed_precision(strategy):
    def make_model():
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return dense(optimizer=keras.optimizers.SGD(0.05))
        finally:
            keras.config.set_dtype_policy(before)

    plain, ours = train_both(strategy, make_model, regression_data(), steps=STEPS)
    assert isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer)
    assert_equal(plain, ours, relative=1e-2, optimizer=False)


def test_predict_keeps_the_order_of_the_input(strategy):
    with strategy.scope():
        model = dense(steps_per_execution=3)
    x, _ = regression_data(num_examples=1000)
    expected = np.tanh(x @ model.layers[0].kernel.numpy() + model.layers[0].bias.numpy())
    for layer, activation in zip(
        model.layers[1:], (lambda v: np.maximum(v, 0), np.asarray), strict=True
    ):
        expected = activation(expected @ layer.kernel.numpy() + layer.bias.numpy())
    np.testing.assert_allclose(model.predict(x, batch_size=32, verbose=0), expected, atol=1e-4)


def test_evaluate_counts_each_example_once(strategy):
    with strategy.scope():
        model = dense(steps_per_execution=3)
    x, y = regression_data(num_examples=1000)
    logs = model.evaluate(x, y, batch_size=32, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=1000, verbose=0)
    assert logs["mae"] == pytest.approx(np.abs(predicted - y).mean(), rel=1e-4)
