"""Layers that look words up, in the model and in its data: each worker asks copies of its own, of
what the tables hold now.
"""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.matrix import with_matrix
from support.models import Batches, Examples

WORDS = [f"word{i}" for i in range(40)]


def lookup_model(strategy, lookup, **compile_arguments):
    """Predicts the number in a word: row i of the embedding is i."""
    with strategy.scope():
        inputs = keras.Input((), dtype="string")
        ids = lookup(inputs)
        embedding = keras.layers.Embedding(64, 1, name="table")
        rows = keras.layers.Flatten()(embedding(ids))
        model = keras.Model(inputs, rows)
        embedding.embeddings.assign(np.arange(64.0)[:, None])
        model.compile(
            keras.optimizers.SGD(0.0), "mae", metrics=[Batches(), Examples()], **compile_arguments
        )
    return model


def words(count=203):
    ids = np.arange(count) % 40
    return tf.constant([f"word{i}" for i in ids]), ids[:, None].astype("float32")


def lookup_layer(vocabulary=WORDS):
    return keras.layers.StringLookup(vocabulary=vocabulary, num_oov_indices=0)


@pytest.mark.parametrize("steps_per_execution", with_matrix([1, 7, 50], at_length=[1, 7]))
def test_data_of_unknown_length_with_a_lookup_are_counted_to_their_end(
    strategy, steps_per_execution
):
    model = lookup_model(strategy, lookup_layer(), steps_per_execution=steps_per_execution)
    x, y = words()
    unknown = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .filter(lambda word, number: number[0] != 3.0)
        .batch(4)
    )
    kept = y[y[:, 0] != 3.0]
    history = model.fit(unknown, epochs=2, verbose=0).history
    assert history["batches"] == [-(-len(kept) // 4)] * 2
    assert history["examples"] == [len(kept)] * 2
    assert history["ids"] == [kept.sum()] * 2
    assert history["loss"] == [0.0, 0.0]
    logs = model.evaluate(unknown, verbose=0, return_dict=True)
    assert (logs["examples"], logs["loss"]) == (len(kept), 0.0)
    np.testing.assert_array_equal(model.predict(unknown, verbose=0), kept)


def test_a_vocabulary_that_was_adapted_again_is_what_the_next_call_asks(strategy):
    lookup = keras.layers.StringLookup(num_oov_indices=1)
    lookup.set_vocabulary(WORDS)
    model = lookup_model(strategy, lookup)
    x, y = words()
    np.testing.assert_array_equal(model.predict(x, verbose=0), y + 1)
    model.fit(x, y, verbose=0)
    lookup.set_vocabulary(WORDS[::-1])
    assert model.fit(x, 40 - y, verbose=0).history["loss"] == [0.0]
    np.testing.assert_array_equal(model.predict(x, verbose=0), 40 - y)
    np.testing.assert_array_equal(model.predict_on_batch(x[:4]), 40 - y[:4])


def test_what_was_put_into_a_table_between_epochs_is_what_the_next_epoch_asks(strategy):
    class Ids(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = tf.lookup.experimental.MutableHashTable(
                "string", "int64", default_value=50
            )

        def call(self, words):
            return tf.ensure_shape(self.table.lookup(words), words.shape)

        def compute_output_spec(self, words):
            return keras.KerasTensor(words.shape, "int64")

    layer = Ids()
    layer.table.insert(WORDS, np.arange(40))
    model = lookup_model(strategy, layer)
    x, y = words()
    shift = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: layer.table.insert(WORDS, np.arange(40) + 5)
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat()
    assert model.fit(data, steps_per_epoch=20, epochs=3, verbose=0, callbacks=[shift]).history[
        "loss"
    ] == [0.0, 5.0, 5.0]


def in_dataset(lookup):
    x, y = words()
    return tf.data.Dataset.from_tensor_slices((x, y)).map(
        lambda word, number: (tf.cast(lookup(word), tf.float32), number)
    )


@pytest.mark.parametrize(
    ("given", "made_in_scope"),
    with_matrix(
        [("dataset", False), ("dataset", True), ("creator", False), ("creator", True)],
        at_length=[("dataset", True), ("creator", False)],
    ),
)
def test_a_lookup_in_the_data_asks_a_copy(strategy, given, made_in_scope):
    with strategy.scope() if made_in_scope else tf.name_scope(""):
        lookup = lookup_layer()
    with strategy.scope():
        model = keras.Sequential([keras.Input(()), keras.layers.Lambda(lambda x: x[:, None])])
        model.compile("sgd", "mae", metrics=[Examples()])

    def dataset_fn(context):
        return (
            in_dataset(lookup)
            .batch(4)
            .shard(context.num_input_pipelines, context.input_pipeline_id)
        )

    data = in_dataset(lookup).batch(4) if given == "dataset" else kerasps.DatasetCreator(dataset_fn)
    logs = model.evaluate(data, verbose=0, return_dict=True)
    assert (logs["examples"], logs["loss"]) == (203, 0.0)


def test_a_table_that_nobody_has_but_the_data_is_no_other_table_on_the_workers(strategy):
    def dataset_fn(context):
        # It is made while TensorFlow traces this, and collected in a while.
        return in_dataset(lookup_layer()).batch(4).repeat()

    with strategy.scope():
        layers = [
            keras.layers.Reshape((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
        model = keras.Sequential([keras.Input(()), *layers])
        model.compile(keras.optimizers.SGD(0.0), "mae")
    x, y = words()
    lookup = lookup_layer(WORDS[::-1])  # of the same size
    other = lookup_model(strategy, lookup)

    class ReadOther(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            gc.collect()
            np.testing.assert_array_equal(other.predict(x, verbose=0), 39 - y)

    data = kerasps.DatasetCreator(dataset_fn)
    losses = model.fit(
        data, steps_per_epoch=20, epochs=3, verbose=0, callbacks=[ReadOther()]
    ).history["loss"]
    assert losses == [0.0] * 3


def test_a_table_without_contents_is_an_error_in_words(strategy):
    model = lookup_model(strategy, keras.layers.StringLookup())
    with pytest.raises(
        kerasps.InputError, match=r"lookup table .* no contents\. Expected: a vocabulary.*`adapt`"
    ):
        model.predict(words()[0], verbose=0)
