"""A model of which each weight and row is the number of a version, and answers tell it."""

from __future__ import annotations

import keras
import numpy as np

import kerasps

IDS, FIXED = 2_000, 300


def versioned_model(table_name="items"):
    """Return a model whose answer to `question` has one number, that of the version."""
    ids = keras.Input((None,), dtype="int64", name="ids")
    places = keras.Input((None,), dtype="int64", name="places")
    table = kerasps.layers.DynamicEmbedding(4, "zeros", max_rows=2 * IDS, name=table_name)
    fixed = keras.layers.Embedding(FIXED, 4, embeddings_initializer="zeros", name="fixed")
    flat = keras.layers.Flatten()
    one = keras.Input((1,), name="one")
    weight = keras.layers.Dense(4, use_bias=False, kernel_initializer="zeros", name="weight")(one)
    answer = keras.layers.Concatenate()([flat(table(ids)), flat(fixed(places)), weight])
    model = keras.Model({"ids": ids, "places": places, "one": one}, answer)
    model.compile("sgd", "mse")
    return model


def set_version(model, version, first=0):
    """Set all rows and weights to a version; the table has the ids from `first` on."""
    table = model.get_layer("items")
    gone = np.setdiff1d(
        np.concatenate([[0], *(ids for ids, _ in table.items())]), np.arange(first, first + IDS)
    )
    table.evict(gone.astype(np.int64))
    table.load_rows(np.arange(first, first + IDS), np.full((IDS, 4), version, np.float32))
    for name in ("fixed", "weight"):
        layer = model.get_layer(name)
        layer.set_weights([np.full_like(layer.get_weights()[0], version)])


def question(first=0, count=200):
    """Return ids that all versions have, and places of the fixed table."""
    random = np.random.default_rng(count)
    return {
        "ids": random.integers(first, IDS, (1, count)),
        "places": random.integers(0, FIXED, (1, count)),
        "one": np.ones((1, 1), np.float32),
    }


def versions_of(answer):
    """Return the different numbers of an answer."""
    return np.unique(np.asarray(answer)).tolist()
