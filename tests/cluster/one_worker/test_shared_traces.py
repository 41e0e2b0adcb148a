"""What one method of a model was traced for spares the others traces, and decides nothing."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from support.matrix import with_matrix
from support.tables import WIDTH

NUM_ROWS = 70
DATA = np.random.default_rng(0).integers(0, NUM_ROWS, (64, 2)).astype("int32")
TARGETS = np.sin(DATA.sum(1, keepdims=True)).astype("float32")


class Reading(keras.Model):
    """Reads its tables in `evaluate` and `predict` as it is told to.

    Attributes:
        traced: the methods, in the order in which they were called from Python.
    """

    def __init__(self, reads="as in training") -> None:
        super().__init__()
        self.reads = reads
        self.traced: list[str] = []
        self.first = layers.Embedding(NUM_ROWS, WIDTH, name="first")
        self.second = layers.Embedding(NUM_ROWS, WIDTH, name="second")
        self.spare = layers.Embedding(NUM_ROWS, WIDTH, name="spare", trainable=False)
        self.dropout, self.out = layers.Dropout(0.5, seed=3), layers.Dense(1)

    def build(self, shape) -> None:
        for table in (self.first, self.second, self.spare):
            table.build()
        self.out.build((None, WIDTH))
        self.built = True

    def call(self, ids, training=False):
        a, b = ids[:, 0], ids[:, 1]
        if training or self.reads == "as in training":
            rows = self.first(a) + self.first(b) + self.second(b)
        elif self.reads == "less":
            rows = self.first(a)
        elif self.reads == "more":
            rows = self.first(a) + self.first(b) + self.first(a + b - b) + self.spare(b)
        else:
            rows = self.first(a) + keras.ops.sum(self.second.embeddings, axis=0)
        if not training and self.reads == "whole and by rows":
            rows += self.second(b)
        return self.out(self.dropout(rows, training=training))

    def train_step(self, data):
        self.traced.append("train")
        return super().train_step(data)

    def test_step(self, data):
        self.traced.append("test")
        return super().test_step(data)

    def predict_step(self, data):
        self.traced.append("predict")
        return super().predict_step(data)


def made(reads="as in training"):
    keras.utils.set_random_seed(7)
    model = Reading(reads)
    model.build(None)
    # SGD: rows that are not looked up stay as they are, and what has no gradient is left alone.
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def results_of(model, *, fitted):
    if fitted:
        model.fit(DATA, TARGETS, batch_size=16, shuffle=False, verbose=0)
    return (
        model.evaluate(DATA, TARGETS, batch_size=16, verbose=0),
        model.predict(DATA, batch_size=16, verbose=0),
    )


def test_what_fit_has_found_out_is_traced_once_elsewhere(strategy, sharded):
    sharded(2)
    with strategy.scope():
        model = made()
    results_of(model, fitted=True)
    assert model.traced.count("train") == 2  # the first of which did not know the tables
    assert model.traced.count("test") == model.traced.count("predict") == 1
    # Of batches of another dtype, it is the step's own trace from before that is gone by.
    model.evaluate(DATA.astype("int64"), TARGETS, batch_size=16, verbose=0)
    assert model.traced.count("test") == 2


@pytest.mark.parametrize(
    "reads",
    with_matrix(
        ["less", "more", "whole", "whole and by rows"],
        at_length=["less", "whole", "whole and by rows"],
    ),
)
def test_a_method_may_read_otherwise_than_training(strategy, sharded, reads):
    sharded(2)
    # The dropout draws, so training is left out.
    plain = results_of(made(reads), fitted=False)
    with strategy.scope():
        ours = made(reads)
    ours.train_on_batch(DATA[:16], 0 * TARGETS[:16], sample_weight=np.zeros(16))
    actual = results_of(ours, fitted=False)
    for expected, received in zip(plain, actual, strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


def test_training_may_read_otherwise_than_what_came_before(strategy, sharded):
    sharded(2)
    with strategy.scope():
        early, late = made("less"), made("less")
    results_of(early, fitted=False)
    expected = results_of(late, fitted=True)
    actual = results_of(early, fitted=True)
    for of_late, of_early in zip(expected, actual, strict=True):
        np.testing.assert_allclose(of_early, of_late, rtol=1e-6)
