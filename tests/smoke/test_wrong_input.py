"""Input that a newcomer gives by mistake, on a cluster inside this process: the error says what."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.inputs import as_input

X, Y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def examples():
    return tf.data.Dataset.from_tensor_slices((X, Y))


@pytest.fixture(scope="module")
def dense(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def embedding(strategy):
    with strategy.scope():
        layers = [keras.layers.Embedding(10, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile("sgd", "mse")
    return model


def wrong(message, call):
    """Assert that a call ends in an error with all the parts that an error has."""
    with pytest.raises(kerasps.InputError, match=message) as caught:
        call()
    text = str(caught.value)
    assert "Received: " in text
    return text


METHODS = {
    "fit": lambda model, x: model.fit(x, Y[: len(x)], verbose=0),
    "predict": lambda model, x: model.predict(x, verbose=0),
    "train_on_batch": lambda model, x: model.train_on_batch(x, Y[: len(x)]),
}


@pytest.mark.parametrize("method", METHODS)
def test_strings_for_numbers_are_named(dense, method):
    text = wrong(
        "got strings where it computes with numbers",
        lambda: METHODS[method](dense, np.array([["a", "b"]] * 4)),
    )
    assert "`keras.layers.StringLookup`" in text


def test_strings_for_targets_are_named(dense):
    text = wrong("got strings", lambda: dense.fit(X, np.array([["a"]] * 4), verbose=0))
    assert "strings in x or y" in text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("value", "advice"),
    [(np.nan, "look for missing values"), (np.inf, "look for missing"), (10, "`input_dim`")],
)
def test_ids_that_are_none_are_named(embedding, method, value, advice):
    ids = np.array([[value, 1.0]] * 4, "float32")
    text = wrong("Ids out of range: .* has 10 rows", lambda: METHODS[method](embedding, ids))
    assert advice in text


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_none_for_an_input_that_a_model_needs_is_refused_as_in_plain_keras(strategy, method):
    needed = keras.Input((2,))
    with strategy.scope():
        model = keras.Model([needed], keras.layers.Dense(1)(needed))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="is not optional, but None was passed"):
        getattr(model, method)([None], Y)


@pytest.mark.parametrize(
    "given",
    [None, "abc", 3, examples(), kerasps.DatasetCreator(lambda context: examples()), iter([X])],
    ids=["None", "str", "int", "dataset", "creator", "iterator"],
)
@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch", "predict_on_batch"])
def test_what_is_no_batch_is_named(dense, method, given):
    wrong(r"There is no input|`x` is no input", lambda: getattr(dense, method)(given))


def test_a_batch_without_y_is_named(dense):
    wrong("compiled with a loss, which compares", lambda: dense.train_on_batch(X))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (examples(), r"not batched. Expected: x of shape \(None, 2\). Received: x of shape \(2,\)"),
        (examples().batch(2).batch(2), "batched twice"),
    ],
)
def test_a_dataset_that_is_not_batched_once_is_named(dense, dataset, message):
    wrong(message, lambda: dense.fit(dataset, verbose=0))
    creator = kerasps.DatasetCreator(lambda context: dataset)
    wrong(message, lambda: dense.fit(creator, steps_per_epoch=2, verbose=0))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([None, "a"], object), "of objects of type NoneType, str"),
        (np.array(["a", float("nan")], object), "of objects of type float, str"),
        (np.array([[1], [1, 2]], object), "of objects of type list"),
        (np.array(["2020-01-01"], "datetime64[D]"), r"of dtype datetime64\[D\]"),
    ],
)
def test_an_array_that_no_tensor_can_hold_is_named(array, message):
    wrong(f"An array holds objects.*{message}", lambda: as_input(array, 1))


@pytest.mark.parametrize("array", [np.array(["a", "b"], object), np.array([1, 2.5], object)])
def test_an_array_of_objects_of_one_type_is_an_array(array):
    assert as_input(array, 1).element_spec.shape.as_list() == [None]


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_creator_for_a_model_of_plain_keras_says_that_the_scope_is_missing(strategy, method):
    outside = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    outside.compile("sgd", "mse")
    creator = kerasps.DatasetCreator(lambda context: examples().batch(2).repeat())
    steps = {"steps_per_epoch" if method == "fit" else "steps": 2}
    text = wrong(
        r"made and compiled outside of a scope",
        lambda: getattr(outside, method)(x=creator, verbose=0, **steps),
    )
    assert "<DatasetCreator" in text
    assert "`with strategy.scope():`" in text
    if method == "fit":
        wrong(
            "outside of a scope",
            lambda: outside.fit(X, Y, validation_data=creator, validation_steps=1, verbose=0),
        )
        with strategy.scope():  # it is adopted there
            outside.fit(creator, verbose=0, **steps)
