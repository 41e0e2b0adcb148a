"""`run_eagerly=True`: steps in this process, on the variables of the ps, against plain Keras's
eager run.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.compare import assert_equal, dataset, regression_data
from support.matrix import with_matrix

pytestmark = pytest.mark.filterwarnings(
    "ignore:Steps of model", "ignore:Even though the `tf.config"
)

IDS = np.random.default_rng(1).integers(0, 40, (320, 3))


def table_model(optimizer, **compile_arguments):
    x, ids = keras.Input((8,)), keras.Input((3,), dtype="int64")
    rows = keras.layers.Flatten()(keras.layers.Embedding(40, 8, name="table")(ids))
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()([x, rows]))
    hidden = keras.layers.Dropout(0.3, seed=3)(keras.layers.BatchNormalization()(hidden))
    model = keras.Model([x, ids], keras.layers.Dense(1)(hidden))
    model.compile(optimizer(), "mse", metrics=["mae"], run_eagerly=True, **compile_arguments)
    return model


class _Trainer(keras.Model):
    """Builds itself in its first step, prints, and notes where steps ran."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        assert tf.executing_eagerly()
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        self.seen.append(float(loss))  # a value, as at a breakpoint
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"loss": loss}


OPTIMIZERS = {
    "ema": lambda: keras.optimizers.AdamW(use_ema=True, ema_overwrite_frequency=3),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "accumulating": lambda: keras.optimizers.Adam(
        gradient_accumulation_steps=2, global_clipnorm=1.0
    ),
    "muon": keras.optimizers.Muon,
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad(0.1)),
}


@pytest.mark.parametrize(
    "name", with_matrix(OPTIMIZERS, at_length=["sgd", "accumulating", "muon", "loss_scale"])
)
def test_eager_steps_equal_plain_keras_on_shards(strategy, sharded, name):
    x, y = regression_data()
    x, y, ids = x[:72], y[:72], IDS[:72]
    sharded(2, min_bytes=256)
    models, results = [], []
    for scope in (None, strategy.scope):
        keras.utils.set_random_seed(5)
        if scope is None:
            model = table_model(OPTIMIZERS[name])
        else:
            with scope():
                model = table_model(OPTIMIZERS[name])
        history = model.fit(
            [x, ids], y, batch_size=16, epochs=2, shuffle=False, validation_split=0.2, verbose=0
        ).history
        predicted = model.predict([x, ids], batch_size=30, verbose=0)
        batch = [x[:8], ids[:8]], y[:8]
        results.append(
            [
                *[history[key] for key in sorted(history)],
                model.evaluate([x, ids], y, verbose=0),
                predicted,
                model.train_on_batch(*batch),
                model.test_on_batch(*batch),
                model.predict_on_batch(batch[0]),
            ]
        )
        models.append(model)
    assert_equal(*models)
    assert len(models[1].get_layer("table").embeddings.shards) == 2
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_a_step_runs_as_python_here_and_its_variables_are_on_ps(strategy):
    x, y = regression_data()
    losses = []
    for scope in (None, strategy.scope):
        keras.utils.set_random_seed(5)
        if scope is None:
            model = _Trainer()
            model.compile("adam", run_eagerly=True)
            model.fit(dataset((x, y)), steps_per_epoch=3, epochs=2, verbose=0, shuffle=False)
        else:
            with scope():  # fit, too: no strategy is current in the step itself
                model = _Trainer()
                model.compile("adam", run_eagerly=True)
                model.fit(
                    kerasps.DatasetCreator(lambda context: dataset((x, y))),
                    steps_per_epoch=3,
                    epochs=2,
                    verbose=0,
                )
        losses.append(model.seen)
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for variable in [*model.weights, *model.optimizer.variables]:
        assert "/job:ps" in variable.device, variable.path


@pytest.mark.filterwarnings(
    "ignore:Your input ran out of data"
)  # as Keras says of data whose length nobody knows
def test_epochs_end_with_the_data_or_when_a_callback_says(strategy):
    x, y = regression_data(num_examples=50)
    y = np.float32(y > 0)
    data = tf.data.Dataset.from_generator(
        lambda: iter(zip(x, y, strict=True)),
        output_signature=(tf.TensorSpec([8]), tf.TensorSpec([1])),
    ).batch(16)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    batches = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append((batch, self.model.optimizer.iterations.numpy()))
            self.model.stop_training = len(batches) == 6

    model.fit(data, epochs=3, class_weight={0: 1.0, 1: 2.0}, verbose=0, callbacks=[Stop()])
    assert batches == [(i % 4, i + 1) for i in range(6)]


def test_one_line_says_that_steps_run_here(strategy):
    x, y = regression_data(num_examples=32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.fit(x, y, epochs=2, validation_data=(x, y), verbose=0)
        model.evaluate(x, y, verbose=0)
    assert [str(warning.message).split(":")[0] for warning in told] == [
        f"Steps of model '{model.name}' run eagerly"
    ]
    assert told[0].filename == __file__


def test_a_model_goes_from_workers_to_here_and_back(strategy):
    x, y = regression_data()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=4)
    eagerly = []
    model.compute_loss = lambda *args, _own=model.compute_loss, **kwargs: (
        eagerly.append(tf.executing_eagerly()),
        _own(*args, **kwargs),
    )[1]
    model.fit(x, y, batch_size=32, verbose=0)
    tf.config.run_functions_eagerly(True)
    try:
        model.fit(x, y, batch_size=32, verbose=0)
    finally:
        tf.config.run_functions_eagerly(False)
    model.fit(x, y, batch_size=32, verbose=0)
    assert model.optimizer.iterations.numpy() == 30
    assert eagerly.count(True) == 10
