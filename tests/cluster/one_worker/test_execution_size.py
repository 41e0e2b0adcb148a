"""Fast steps are sent several at a time, and nothing but the time that they take changes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.training.sessions.session import Session
from support.compare import assert_equal, regression_data, train_both
from support.executions import sent_sizes
from support.matrix import with_matrix


@pytest.fixture
def sent(monkeypatch):
    return sent_sizes(monkeypatch)


class Bar(keras.callbacks.ProgbarLogger):
    """A progress bar that notes what it is told, and draws nothing."""

    def __init__(self):
        super().__init__()
        self.told = []

    def set_params(self, params):
        super().set_params({**params, "verbose": 0})

    # `on_train_batch_end` stays Keras's: a bar that has its own hears of each execution.
    def _update_progbar(self, batch, logs=None):
        self.told.append(batch)


def make_model(steps_per_execution=1):
    layers = keras.layers
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="tanh")])
    model.add(layers.BatchNormalization())
    model.add(layers.Dropout(0.3))
    model.add(layers.Dense(1))
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    return model


def test_longer_executions_train_as_plain_keras_does(strategy, sent):
    plain, ours = train_both(strategy, make_model, regression_data(), steps=107, epochs=4)
    assert_equal(plain, ours)
    assert plain.history.history["mae"] == pytest.approx(ours.history.history["mae"], rel=1e-4)
    assert sum(sent) == 4 * 107
    # Of two sizes, so that there are two graphs, and not one for each number that is left over.
    assert set(sent) == {1, 10}
    assert sent[:100] == [1] * 100
    assert sent[-17:] == [10] * 10 + [1] * 7


@pytest.mark.parametrize(
    ("steps_per_execution", "sizes"),
    with_matrix(
        [(1, {1, 10}), (10, {1, 10}), (4, {1, 4, 8})], at_length=[(1, {1, 10}), (10, {1, 10})]
    ),
)
def test_what_is_left_of_the_data_is_done_as_plain_keras_does_it(
    strategy, sent, monkeypatch, steps_per_execution, sizes
):
    data = tf.data.Dataset.from_tensor_slices(regression_data(num_examples=16 * 59)).batch(16)
    keras.utils.set_random_seed(7)
    plain = make_model()
    plain.fit(data, epochs=4, shuffle=False, verbose=0)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        ours = make_model(steps_per_execution)
    ran, call_of = [], Session._call_of

    def noted(self, execution):
        ran.append(execution.num_steps)
        return call_of(self, execution)

    monkeypatch.setattr(Session, "_call_of", noted)
    ours.fit(data, epochs=4, shuffle=False, verbose=0)
    assert_equal(plain, ours)
    assert plain.history.history["mae"] == pytest.approx(ours.history.history["mae"], rel=1e-4)
    assert sum(ran) == 4 * 59
    # No graph for what is left over.
    assert set(ran) == sizes


def test_the_next_fit_sends_longer_executions_at_once(strategy, sent):
    with strategy.scope():
        model = make_model()
    x, y = regression_data(num_examples=16 * 120)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    sent.clear()
    model.fit(x, y, batch_size=16, verbose=0)
    assert sent[:12] == [10] * 12
    assert int(model.optimizer.iterations.numpy()) == 360
    sent.clear()
    for _ in range(3):
        model.evaluate(x, y, batch_size=16, verbose=0)
    assert sent[0] == 1
    assert 10 in sent


def test_a_callback_that_is_told_of_each_batch_is(strategy, sent):
    with strategy.scope():
        model = make_model()
    batches = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: batches.append(b))
    x, y = regression_data(num_examples=16 * 120)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[callback])
    assert batches == [*range(120)] * 2
    assert set(sent) == {1}


@pytest.mark.parametrize(
    ("steps_per_execution", "part"), with_matrix([(20, 10), (23, 8)], at_length=[(20, 10)])
)
def test_executions_in_parts_train_as_plain_keras_does(strategy, sent, steps_per_execution, part):
    def make():
        return make_model(steps_per_execution)

    plain, ours = train_both(strategy, make, regression_data(), steps=107, epochs=2)
    assert_equal(plain, ours)
    assert plain.history.history["mae"] == pytest.approx(ours.history.history["mae"], rel=1e-4)
    assert sent[0] == part
    assert sum(sent) == 2 * 107
    assert max(sent) <= 10


def read_whole(table):
    return 1e-3 * keras.ops.mean(keras.ops.square(table))


def make_recurrent(regularizer):
    layers = keras.layers
    model = keras.Sequential([keras.Input((6,), dtype="int32")])
    model.add(layers.Embedding(1000, 4, embeddings_regularizer=regularizer))
    model.add(layers.LSTM(3))
    model.add(layers.Dense(1))
    model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=100)
    return model


@pytest.mark.parametrize(
    "regularizer",
    [pytest.param(None, marks=pytest.mark.matrix), read_whole],
    ids=["by rows", "whole"],
)
def test_a_step_with_loops_is_done_in_a_loop(strategy, sent, regularizer):
    def make():
        return make_recurrent(regularizer)

    random = np.random.default_rng(0)
    ids, y = random.integers(0, 1000, (512, 6), "int32"), random.random((512, 1), "float32")
    plain, ours = train_both(strategy, make, (ids, y), steps=210, epochs=2)
    assert_equal(plain, ours)
    assert max(sent) == 100
    np.testing.assert_allclose(ours.evaluate(ids, y), plain.evaluate(ids, y), rtol=1e-4)
    np.testing.assert_allclose(ours.predict(ids), plain.predict(ids), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says so at each short end
@pytest.mark.parametrize(
    "is_known",
    with_matrix([True, False], at_length=[True]),
    ids=["known length", "unknown length"],
)
def test_a_progress_bar_counts_as_in_keras_where_executions_are_sent_in_parts(
    strategy, sent, is_known
):
    data = tf.data.Dataset.from_tensor_slices(regression_data(num_examples=16 * 47)).batch(16)
    data = data if is_known else data.filter(lambda x, y: True)
    plain, ours = Bar(), Bar()
    make_model(20).fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[plain])
    with strategy.scope():
        model = make_model(20)
    model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[ours])
    assert max(sent) == 10
    assert ours.told[-1] == plain.told[-1]
    assert max(ours.told) == max(plain.told)


def test_a_callback_is_told_of_whole_executions(strategy, sent):
    with strategy.scope():
        model = make_model(20)
    batches = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: batches.append(b))
    x, y = regression_data(num_examples=16 * 60)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[callback])
    assert batches == [19, 39, 59] * 2
    assert set(sent) == {20}
