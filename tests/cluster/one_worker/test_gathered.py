"""Small variables that lie on one ps while steps are in flight: they equal plain Keras there, and
are where they were, and what they became, afterwards.
"""

from __future__ import annotations

import dataclasses
import threading

import keras
import numpy as np
import pytest

import kerasps
from support.compare import assert_equal, dataset, regression_data, train_both
from support.matrix import with_matrix


@pytest.fixture(autouse=True)
def small_variables():
    """Are gathered in each test."""


LAYERS = keras.layers
OPTIMIZERS = {
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=7),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
}
MODELS = {
    "dense": [],
    "moving statistics": [LAYERS.BatchNormalization],
    "constraint": [lambda: LAYERS.Dense(8, kernel_constraint="max_norm")],
    "frozen": [lambda: LAYERS.Dense(8, trainable=False)],
    "own scalar": [lambda: LAYERS.PReLU(shared_axes=[1])],
}


def model_of(layers, optimizer="adam"):
    hidden = [make() for make in layers]
    model = keras.Sequential([keras.Input((8,)), LAYERS.Dense(16), *hidden, LAYERS.Dense(1)])
    model.compile(OPTIMIZERS.get(optimizer, lambda: optimizer)(), "mse", steps_per_execution=5)
    return model


@pytest.mark.parametrize(
    ("layers", "optimizer", "num_shards"),
    with_matrix(
        [
            *((name, "adam", 1) for name in MODELS),
            ("dense", "ema", 2),
            ("dense", "accumulation", 2),
            ("dense", "lamb", 2),
            ("dense", "nadam", 1),
        ],
        at_length=[("dense", "adam", 1)],
    ),
)
def test_small_model_on_one_ps_in_flight_equals_plain_keras(
    strategy, sharded, layers, optimizer, num_shards
):
    sharded(num_shards, min_bytes=32)
    plain, ours = train_both(
        strategy, lambda: model_of(MODELS[layers], optimizer), regression_data()
    )
    assert_equal(plain, ours)
    assert len(ours.train_function.devices) == 1


def test_evaluate_and_predict_of_what_is_gathered_equal_plain_keras(strategy):
    plain, ours = train_both(
        strategy, lambda: model_of(MODELS["moving statistics"]), regression_data()
    )
    x, y = regression_data()
    before = [np.array(w) for w in ours.weights]
    np.testing.assert_allclose(
        ours.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        ours.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6
    )
    for was, now in zip(before, ours.weights, strict=True):
        np.testing.assert_array_equal(np.array(now), was)


def embedded(num_rows=32):
    return [
        keras.Input((2,), dtype="int32"),
        LAYERS.Embedding(num_rows, 4, name="table"),
        LAYERS.Flatten(),
        LAYERS.Dense(4),
        LAYERS.Dense(1),
    ]


@pytest.mark.parametrize(
    ("num_shards", "min_bytes", "is_gathered"),
    [(1, 256, True), (2, 256, True), (2, 16, False), (2, 0, False)],
)
def test_a_table_is_gathered_where_it_is_hardly_one(
    strategy, sharded, monkeypatch, num_shards, min_bytes, is_gathered
):
    """Of 512 bytes: up to 16 times what is no table."""
    sharded(num_shards, min_bytes=256)
    host = strategy.extended.host
    options = dataclasses.replace(host.options, table_min_bytes=min_bytes)
    monkeypatch.setattr(host, "options", options)
    ids = np.random.default_rng(0).integers(0, 32, (320, 2)).astype("int32")

    def make():
        model = keras.Sequential(embedded())
        model.compile("adagrad", "mse", steps_per_execution=5)
        return model

    plain, ours = train_both(
        strategy, make, (ids, ids.sum(1, keepdims=True).astype("float32")), sum_repeated_ids=True
    )
    assert_equal(plain, ours)
    num_ps = len({entry.ps for entry in ours.train_function.traffic.tables})
    assert num_ps == (1 if is_gathered else min(num_shards, strategy.num_ps))


class Watch(keras.callbacks.Callback):
    """Looks, from another thread, how many steps there were while the first epoch runs."""

    seen = ()

    def on_epoch_begin(self, epoch, logs=None):
        self.seen = []
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self):
        while not self.seen or self.seen[-1] < self.params["steps"]:
            self.seen.append(int(self.model.optimizer.iterations.storage.read_value()))

    def on_epoch_end(self, epoch, logs=None):
        self.thread.join()


def test_other_threads_see_the_iterations_of_steps_in_flight(strategy):
    with strategy.scope():
        model = model_of(MODELS["dense"])
    watch = Watch()
    data = kerasps.DatasetCreator(lambda context: dataset(regression_data()).repeat())
    model.fit(data, steps_per_epoch=400, verbose=0, callbacks=[watch])
    assert len(set(watch.seen)) > 3
