"""Layers that look words up, and embeddings behind them, inside the model: equal to plain Keras,
and read by rows.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from support.compare import assert_equal, train_both
from support.matrix import with_matrix
from support.tables import WIDTH, compiled, is_table

WORDS = [f"word{i}" for i in range(60)]


def word_data(num_words=4):
    generator = np.random.default_rng(0)
    ids = (generator.random((320, num_words)) ** 2 * 70).astype(
        "int64"
    )  # some beyond the vocabulary
    targets = np.sin(ids.sum(1, keepdims=True)).astype("float32")
    return ids, targets


def string_lookup():
    return keras.Input((4,), dtype="string"), keras.layers.StringLookup(
        vocabulary=WORDS, num_oov_indices=3
    )


def adapted_string_lookup():
    layer = keras.layers.StringLookup(max_tokens=50)
    layer.adapt(np.array(WORDS[:55] * 2))
    return keras.Input((4,), dtype="string"), layer


def integer_lookup():
    return keras.Input((4,), dtype="int64"), keras.layers.IntegerLookup(
        vocabulary=list(range(3, 60))
    )


def text_vectorization():
    layer = keras.layers.TextVectorization(max_tokens=64, output_sequence_length=6)
    layer.adapt([" ".join(WORDS)])
    return keras.Input((), dtype="string"), layer


LOOKUPS = [string_lookup, adapted_string_lookup, integer_lookup, text_vectorization]


def make_model(lookup):
    inputs, layer = lookup()
    rows = keras.layers.Embedding(70, WIDTH, name="table")(layer(inputs))
    return compiled(keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(rows))))


def data_for(lookup):
    ids, targets = word_data()
    if lookup is integer_lookup:
        return tf.constant(ids), targets
    words = np.array([[f"word{i}" for i in row] for row in ids])
    return tf.constant(
        [" ".join(row) for row in words] if lookup is text_vectorization else words
    ), targets


@pytest.mark.parametrize(
    ("lookup", "num_shards"),
    with_matrix(
        [*((lookup, 3) for lookup in LOOKUPS), (text_vectorization, 1)],
        at_length=[(string_lookup, 3), (integer_lookup, 3), (text_vectorization, 3)],
    ),
)
def test_embedding_behind_a_lookup_equals_plain_keras(strategy, sharded, lookup, num_shards):
    sharded(num_shards)
    plain, ours = train_both(
        strategy, lambda: make_model(lookup), data_for(lookup), steps=20, sum_repeated_ids=True
    )
    assert is_table(ours, ours.get_layer("table").embeddings)
    assert_equal(plain, ours)
    x, y = data_for(lookup)
    np.testing.assert_allclose(ours.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)
    np.testing.assert_allclose(
        ours.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-4
    )
    for method in ("predict_on_batch", "train_on_batch", "test_on_batch"):
        arguments = (x[:8],) if method == "predict_on_batch" else (x[:8], y[:8])
        np.testing.assert_allclose(
            getattr(ours, method)(*arguments),
            getattr(plain, method)(*arguments),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize(
    "lookup", with_matrix([string_lookup, text_vectorization], at_length=[string_lookup])
)
def test_model_with_a_lookup_is_saved_loaded_and_exported(strategy, sharded, lookup, tmp_path):
    sharded(2)
    with strategy.scope():
        model = make_model(lookup)
    x, y = data_for(lookup)
    model.fit(x, y, verbose=0)
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(served.serve(x), expected, atol=1e-6)
    plain = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(plain.predict(x, verbose=0), expected, atol=1e-6)
    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, atol=1e-6)
    loaded.fit(x, y, verbose=0)
