"""`predict` in many executions: each row once, in the order of the input, for callbacks too."""

from __future__ import annotations

import contextlib

import keras
import pytest

from support.matrix import with_matrix
from support.predicted_rows import (
    BATCH_SIZE,
    INPUTS,
    Outputs,
    X,
    check_predict,
    numbering_model,
    numbers_of,
)


@pytest.fixture
def model(strategy):
    with strategy.scope():
        return numbering_model()


def warns_where_fed(name):
    fed = pytest.warns(UserWarning, match="lives in this process")
    return fed if name == "generator" else contextlib.nullcontext()


@pytest.mark.parametrize(
    ("name", "steps_per_execution"),
    with_matrix(
        [*((name, 3) for name in INPUTS), ("arrays", 1), ("DatasetCreator", 1)],
        at_length=[("arrays", 3), ("DatasetCreator", 1)],
    ),
)
def test_each_row_is_predicted_once_and_in_order(model, name, steps_per_execution):
    model.steps_per_execution = steps_per_execution
    with warns_where_fed(name):
        check_predict(model, name, counts_whole=False)
        check_predict(model, name, steps=11, counts_whole=False)


@pytest.mark.parametrize("steps_per_execution", with_matrix([1, 3], at_length=[1]))
def test_who_stops_predict_gets_what_callbacks_have_seen(model, steps_per_execution):
    model.steps_per_execution = steps_per_execution
    check_predict(model, "dataset", stop_after=7, counts_whole=False)


def test_who_stops_predict_before_it_begins_gets_the_first_execution(model):
    class Stop(Outputs):
        def on_predict_begin(self, logs=None):
            self.model.stop_predicting = True

    callback = Stop()
    predicted = model.predict(X, batch_size=BATCH_SIZE, verbose=0, callbacks=[callback])
    assert numbers_of(predicted) == callback.numbers == list(range(BATCH_SIZE))


def test_a_model_predicts_after_it_was_trained_in_longer_executions(strategy):
    with strategy.scope():
        model = numbering_model(4)
        model.compile(keras.optimizers.SGD(0.0), "mse", steps_per_execution=4)
    targets = {"number": X[:, :1], "others": (X[:, :1], [X])}
    for _ in range(2):
        model.fit(X, targets, batch_size=BATCH_SIZE, verbose=0)
        check_predict(model, "arrays", steps=11, counts_whole=False)
