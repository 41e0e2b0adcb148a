"""A model that predicts the numbers of its rows, and data that end unevenly to predict."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import kerasps

NUM_ROWS, BATCH_SIZE, FIRST = 103, 5, 3
X = np.stack([np.arange(NUM_ROWS), np.ones(NUM_ROWS)], 1).astype("float32")


def numbering_model(steps_per_execution=1):
    """A model with several outputs in a structure; each says which rows it is of."""
    inputs = keras.Input((2,))
    numbers = keras.layers.Dense(
        1, use_bias=False, kernel_initializer=lambda shape, dtype=None: tf.constant([[1.0], [0.0]])
    )(inputs)
    model = keras.Model(inputs, {"number": numbers, "others": (numbers * 2, [inputs + 1])})
    model.compile(steps_per_execution=steps_per_execution)
    return model


def last_is_short(x=X):
    return tf.data.Dataset.from_tensor_slices(x).batch(BATCH_SIZE)


def first_is_short():
    return last_is_short(X[:FIRST]).concatenate(last_is_short(X[FIRST:]))


def generated():
    for start in range(0, NUM_ROWS, BATCH_SIZE):
        yield (X[start : start + BATCH_SIZE],)


# The arguments of `predict`, and the number of rows in the first batch.
INPUTS = {
    "arrays": lambda: ({"x": X, "batch_size": BATCH_SIZE}, BATCH_SIZE),
    "dataset": lambda: ({"x": first_is_short()}, FIRST),
    "unknown length": lambda: ({"x": first_is_short().filter(lambda x: True)}, FIRST),
    "generator": lambda: ({"x": generated()}, BATCH_SIZE),
    "DatasetCreator": lambda: (
        {"x": kerasps.DatasetCreator(lambda context: first_is_short())},
        FIRST,
    ),
}
# Those of which nobody knows beforehand how many batches they have.
UNKNOWN_LENGTH = {"unknown length", "generator", "DatasetCreator"}


class Outputs(keras.callbacks.Callback):
    """Keeps what it sees, and writes to it; may stop after a batch."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after = stop_after
        self.batches, self.numbers, self.shown = [], [], []

    def on_predict_batch_begin(self, batch, logs=None):
        self.batches.append(batch)

    def on_predict_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        # Keras flattens what is in a dictionary.
        self.numbers += logs["number"].ravel().tolist()
        logs["number"][:] = -1
        if self.stop_after is not None and batch >= self.stop_after:
            self.model.stop_predicting = True


def numbers_of(predicted):
    """The numbers of the rows that were predicted, if all outputs are of the same ones."""
    double, [third] = predicted["others"]
    np.testing.assert_array_equal(double, predicted["number"] * 2)
    np.testing.assert_array_equal(third[:, :1], predicted["number"] + 1)
    return predicted["number"].ravel().tolist()


def check_predict(model, name, *, steps=None, stop_after=None, counts_whole=True):
    """Check that `predict` returns each row once and in order, and that callbacks see the same.

    With one worker the last execution `counts_whole` to callbacks, as in plain Keras.
    """
    arguments, first = INPUTS[name]()
    expected = NUM_ROWS if steps is None else first + (steps - 1) * BATCH_SIZE
    callback = Outputs(stop_after)
    predicted = model.predict(**arguments, steps=steps, verbose=0, callbacks=[callback])
    numbers = numbers_of(predicted)
    assert numbers == callback.numbers
    size = model.steps_per_execution
    if stop_after is not None:
        expected = first + (stop_after // size * size + size - 1) * BATCH_SIZE
    assert numbers == list(range(expected))
    num_batches = -(-(expected - first) // BATCH_SIZE) + 1
    begins = range(0, num_batches, size)
    last = begins[-1] + size - 1 if counts_whole else num_batches - 1
    told = [batch for begin in begins for batch in (begin, min(begin + size - 1, last))]
    if steps is None and stop_after is None and name in UNKNOWN_LENGTH:
        # As in plain Keras, the end of the data may be found behind the begin of a batch.
        assert callback.batches in (told, [*told, begins[-1] + size])
    else:
        assert callback.batches == told
    if stop_after is None:
        arguments, _ = INPUTS[name]()
        assert numbers_of(model.predict(**arguments, steps=steps, verbose=0)) == numbers
    for leaf in keras.tree.flatten([predicted, model.predict_on_batch(X[:2])]):
        assert leaf.flags.writeable
