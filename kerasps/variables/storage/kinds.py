"""Recognises kinds of variables by the names and marks that Keras gives them."""

from __future__ import annotations

import keras

# The name that `keras.layers.Embedding` gives its weight; steps read other weights whole.
TABLE_NAME = "embeddings"
# The number of rows in the shape of a table without a vocabulary, which has no number that stays.
MOST_ROWS = 2**31 - 1


def is_metric_state(variable: keras.Variable) -> bool:
    """Return whether `variable` is the state of a metric.

    Keras marks only these as synchronized on read.
    """
    return bool(variable.synchronization == "on_read")


def is_seed_state(variable: keras.Variable) -> bool:
    """Return whether `variable` is the state of a `keras.random.SeedGenerator`.

    It is two integers, the seed and a counter.
    """
    return bool(variable.name == "seed_generator_state" and tuple(variable.shape) == (2,))


def is_recurrent_state(variable: keras.Variable) -> bool:
    """Return whether `variable` is a state of a recurrent layer with `stateful=True`."""
    return bool(variable.name == "rnn_state" and not variable.trainable)
