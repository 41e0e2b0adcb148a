"""Models that are made in turn: each of one shape, with names that Keras numbers on."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import tensorflow as tf

from support.process_checks import wait_for

WORDS = ["red", "green", "blue"]
NUM_ROWS = (300, 300, 200)
WIDTH = 16


class Noisy(keras.layers.Layer):
    """Captures a constant, and draws without a seed."""

    def __init__(self, **options):
        super().__init__(**options)
        self.factors = tf.constant([1.0, 2.0, 3.0])

    def call(self, inputs):
        noise = tf.random.normal(tf.shape(inputs), stddev=1e-6)
        return inputs * self.factors + noise


class Bag(keras.layers.Layer):
    """Looks up bags of ids, some of which are empty."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = keras.layers.Embedding(NUM_ROWS[0], WIDTH)
        self.embedding.build()

    def call(self, ids):
        # Keras's variable is none of TensorFlow's, so plain Keras has its value handed over.
        table = self.embedding.embeddings.value
        found = tf.nn.safe_embedding_lookup_sparse(table, tf.sparse.from_dense(ids), None)
        return tf.ensure_shape(found, [None, WIDTH])

    def compute_output_shape(self, shape):
        return shape[0], WIDTH


def varied_model():
    """Return a model, not compiled, of all that is numbered: tables, bags, lookups."""
    inputs = {
        "ids": keras.Input((3,), dtype="int32", name="ids"),
        "word": keras.Input((1,), dtype="string", name="word"),
        "numbers": keras.Input((3,), name="numbers"),
    }
    tables = [keras.layers.Embedding(number, WIDTH) for number in NUM_ROWS]
    found = [keras.layers.Flatten()(table(inputs["ids"])) for table in tables]
    word = keras.layers.StringLookup(vocabulary=WORDS)(inputs["word"])
    found.append(keras.layers.Flatten()(keras.layers.Embedding(4, 4)(word)))
    found.append(Bag()(inputs["ids"]))
    scaled = keras.layers.Normalization(mean=0.5, variance=2.0)(inputs["numbers"])
    found.append(Noisy()(scaled))
    hidden = keras.layers.Dropout(0.1)(keras.layers.Concatenate()(found))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def varied_data(num_rows=64):
    """Return what such a model is trained on."""
    generator = np.random.default_rng(0)
    x = {
        "ids": generator.integers(0, min(NUM_ROWS), (num_rows, 3)).astype("int32"),
        "word": generator.choice(WORDS, (num_rows, 1)),
        "numbers": generator.random((num_rows, 3)).astype("float32"),
    }
    return x, np.ones((num_rows, 1), "float32")


def watch(model):
    """Return weak references to a model and to all that holds a value of it."""
    variables = [*model.variables, *model.optimizer.variables]
    return [weakref.ref(model), *map(weakref.ref, variables)]


def wait_until_gone(watched):
    """Wait until Python has collected a model. A thread may hold it for a moment."""

    def is_gone():
        gc.collect()
        return all(held() is None for held in watched)

    wait_for(is_gone, what="the end of a model that nothing names")
