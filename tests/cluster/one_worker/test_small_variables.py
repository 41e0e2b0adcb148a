"""Small variables are on one ps, so that steps go to few: they equal plain Keras there."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest

import kerasps
from kerasps.variables.placing.placement import PlacementLedger
from support.compare import assert_equal, dataset, regression_data, train_both
from support.matrix import with_matrix


@pytest.fixture(autouse=True)
def small_variables():
    """Are placed as users have it in each test."""


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
    ("layers", "optimizer"),
    with_matrix(
        [*((name, "adam") for name in MODELS), *(("dense", name) for name in OPTIMIZERS)],
        at_length=[
            *(("dense", "adam"), ("dense", "ema"), ("dense", "nadam"), ("constraint", "adam")),
            ("dense", "accumulation"),
        ],
    ),
)
def test_small_model_on_one_ps_equals_plain_keras(strategy, layers, optimizer):
    plain, ours = train_both(
        strategy, lambda: model_of(MODELS[layers], optimizer), regression_data()
    )
    assert_equal(plain, ours)
    assert len(ours.train_function.devices) == 1


def test_evaluate_and_predict_on_one_ps_equal_plain_keras(strategy):
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


def test_small_variables_are_on_the_ps_of_the_table_before_them(strategy, monkeypatch):
    """Also those of a second model, whose table goes to the other ps."""
    monkeypatch.setattr(strategy.extended, "ledger", PlacementLedger(strategy.num_ps))

    def make():
        layers = [LAYERS.Embedding(20_000, 4), LAYERS.Flatten(), LAYERS.Dense(4), LAYERS.Dense(1)]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        model.compile("adagrad", "mse", steps_per_execution=5)
        return model

    ids = np.random.default_rng(0).integers(0, 20_000, (320, 2)).astype("int32")
    y = (ids.sum(1, keepdims=True) / 20_000).astype("float32")
    first = train_both(strategy, make, (ids, y), sum_repeated_ids=True)
    second = train_both(strategy, make, (ids, y), sum_repeated_ids=True)
    for plain, ours in (first, second):
        assert_equal(plain, ours)
        assert len({shard.device for v in ours.variables for shard in v.shards}) == 1
        assert len(ours.train_function.devices) == 1
    assert first[1].train_function.devices != second[1].train_function.devices


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
