"""Input that cannot be used: one sentence that says what came and what to do, before a model of
zeros is called trained.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.step.running.traced_step import TracedStep
from support.models import ids_data

X, Y = ids_data(64)


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def nothing():
    """A dataset that does not know that it is empty."""
    return dataset().filter(lambda x, y: tf.constant(False))


def batches(number):
    for _ in range(number):
        yield X[:8], Y[:8]


@pytest.fixture(scope="module")
def model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mae")
    return model


COUNTS = {
    "steps_per_epoch": [0, -3, 2.5, -2],
    "batch_size": [0, -1, "8"],
    "epochs": [-1],
    "validation_steps": [0],
    "validation_batch_size": [0],
}


@pytest.mark.parametrize("name", list(COUNTS))
def test_a_count_that_is_none_is_refused_by_name(model, name):
    for value in COUNTS[name]:
        with pytest.raises(
            kerasps.InputError,
            match=rf"Argument `{name}` must be a whole number.*Received: {name}={value!r}",
        ):
            model.fit(X, Y, **{name: value}, validation_data=(X, Y), verbose=0)
    for method in (model.evaluate, model.predict):
        for argument in {"steps_per_epoch": ("steps",), "batch_size": ("batch_size",)}.get(
            name, ()
        ):
            with pytest.raises(
                kerasps.InputError, match=f"Argument `{argument}` must be.*Received: {argument}=0"
            ):
                method(X, **{argument: 0}, verbose=0)


EMPTY = {
    "arrays": lambda: {"x": X[:0], "y": Y[:0]},
    "a dataset": lambda: {"x": dataset().take(0)},
    "a dataset that does not know": lambda: {"x": nothing()},
    "a creator": lambda: {"x": kerasps.DatasetCreator(lambda context: nothing())},
    "a generator": lambda: {"x": batches(0)},
}


@pytest.mark.filterwarnings("ignore:.*lives in this process")
@pytest.mark.parametrize("name", list(EMPTY))
def test_nothing_is_trained_on_evaluated_or_predicted(model, name):
    says = "is empty|at least one example|found no data|empty generator"
    for method in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=says):
            method(**EMPTY[name](), verbose=0)
    if name != "a generator":
        with pytest.raises(kerasps.InputError, match=says):
            model.predict(EMPTY[name]()["x"], verbose=0)
        validation_data = tuple(EMPTY[name]().values()) if name == "arrays" else EMPTY[name]()["x"]
        with pytest.raises(kerasps.InputError, match=says):
            model.fit(X, Y, validation_data=validation_data, verbose=0)


@pytest.mark.filterwarnings("ignore:.*lives in this process")
def test_a_generator_that_has_ended_is_warned_of(model):
    """Keras keeps its first batch, which is then all that an epoch has."""
    with pytest.warns(UserWarning, match="ran out of data"):
        history = model.fit(batches(4), epochs=2, verbose=0)
    assert all(loss > 0 for loss in history.history["loss"])


WRONG = {
    "a string": (lambda: {"x": "data.csv"}, r"Received: x='data.csv' of type str.*tf\.data"),
    "None": (lambda: {"x": None}, r"There is no input.*Received: x=None"),
    "numbers": (
        lambda: {"x": [1.0, 2.0], "y": [1.0, 2.0]},
        r"Received: 1.0 of type float in x.*np\.array",
    ),
    "an object": (lambda: {"x": object()}, r"Received: x=<object.*of type object"),
    "a wrong y": (lambda: {"x": X, "y": "labels"}, r"`y` is no input.*Received: y='labels'"),
    "no y": (lambda: {"x": X}, r"compiled with a loss.*Received: x alone"),
    "no y in a dataset": (
        lambda: {"x": dataset().map(lambda x, y: x)},
        r"compiled with a loss.*Received: x alone",
    ),
    "lengths": (lambda: {"x": X, "y": Y[:10]}, r"same length.*\[64, 10\]"),
    "distributed": (
        lambda: {
            "x": tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(
                dataset()
            )
        },
        "distributed already",
    ),
    "a function": (lambda: {"x": batches}, r"A function is not an input.*DatasetCreator"),
    "batch_size beside a creator": (
        lambda: {
            "x": kerasps.DatasetCreator(lambda context: dataset().repeat()),
            "batch_size": 4,
            "steps_per_epoch": 2,
        },
        "`batch_size`",
    ),
    "y beside a dataset": (lambda: {"x": dataset(), "y": Y}, r"`y` does not go with"),
    "no y for weights": (lambda: {"x": X, "class_weight": {0: 1.0}}, r"class_weight.*Expected: y"),
    "validation data": (
        lambda: {"x": X, "y": Y, "validation_data": 5},
        r"`validation_data`: `x` is no input.*Received: x=5",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_no_input_is_refused_in_a_sentence(model, name):
    arguments, says = WRONG[name]
    with pytest.raises(kerasps.InputError, match=says):
        model.fit(**arguments(), verbose=0)


def test_data_that_never_end_are_known_before_anything_is_traced(strategy, monkeypatch):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mae")
    monkeypatch.setattr(
        TracedStep, "__init__", lambda *args, **kwargs: pytest.fail("the step was traced")
    )
    endless = dataset().repeat()
    creator = kerasps.DatasetCreator(
        lambda context: dataset().repeat().shuffle(4).map(lambda x, y: (x, y)).prefetch(2)
    )
    for data in (endless, creator):
        for method in (model.fit, model.evaluate, model.predict):
            with pytest.raises(kerasps.InputError, match=r"never ends.*steps_per_epoch"):
                method(data, verbose=0)
    monkeypatch.undo()
    with pytest.raises(
        kerasps.InputError, match=r"`validation_data`: The input never ends.*validation_steps"
    ):
        model.fit(X, Y, validation_data=endless, verbose=0)


def test_what_plain_keras_takes_is_taken(model):
    """Steps of any integer type; steps without a batch size, which divide the examples; a batch
    size beside a dataset.
    """
    steps = dataset().cardinality()
    history = model.fit(
        dataset(),
        steps_per_epoch=steps,
        batch_size=4,
        verbose=0,
        validation_data=dataset(),
        validation_steps=np.int64(2),
    )
    assert {"loss", "val_loss"} <= set(history.history)
    before = int(model.optimizer.iterations.numpy())
    model.fit(X, Y, steps_per_epoch=4, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == before + 8
    assert model.predict(X, steps=4, verbose=0).shape == (64, 1)  # four batches of 16


class Broken(Exception):
    """What the user's code raises, with an argument that no message has."""


class BrokenSequence(keras.utils.PyDataset):
    """Raises at its third batch."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return next(broken_batches(index != 2))


def broken_batches(num_whole=5):
    for _ in range(num_whole):  # more than Keras looks at beforehand
        yield X[:8], Y[:8]
    raise Broken("row 17 has no label", 17)


def broken_row(x, y):
    raise Broken("row 17 has no label", 17)


def as_sets():
    spec = (
        tf.TensorSpec((None, *X.shape[1:]), X.dtype),
        tf.TensorSpec((None, *Y.shape[1:]), Y.dtype),
    )
    return tf.data.Dataset.from_generator(broken_batches, output_signature=spec)


def as_function():
    def broken(x, y):
        x, y = tf.numpy_function(broken_row, [x, y], [X.dtype, Y.dtype])
        return tf.ensure_shape(x, (None, *X.shape[1:])), tf.ensure_shape(y, (None, *Y.shape[1:]))

    return dataset().map(broken, num_parallel_calls=2).prefetch(2)


@pytest.mark.filterwarnings("ignore:.*this process reads every batch")
@pytest.mark.parametrize("make", [broken_batches, BrokenSequence, as_sets, as_function])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_an_exception_of_the_data_is_the_users(model, make, method):
    with pytest.raises(Broken) as caught:
        getattr(model, method)(make(), verbose=0)
    assert caught.value.args == ("row 17 has no label", 17)
    assert caught.traceback[-1].name in ("broken_batches", "broken_row")
    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    assert np.isfinite(model.evaluate(X, Y, verbose=0))
