"""Deltas of tables and weights on ps, written while they are trained, and a SavedModel of them."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import kerasps

# Above the size from which a fixed table is written by rows.
FIXED = 70_000


@pytest.fixture
def model(strategy):
    with strategy.scope():
        ids = keras.Input((2,), dtype="int64", name="ids")
        places = keras.Input((1,), dtype="int64", name="places")
        # Its first rows are computed on the ps, and in the SavedModel.
        table = kerasps.layers.DynamicEmbedding(4, "glorot_normal", max_rows=5_000, name="items")
        fixed = keras.layers.Embedding(FIXED, 4, name="fixed")
        flat = keras.layers.Flatten()
        vectors = keras.layers.Concatenate()([flat(table(ids)), flat(fixed(places))])
        normal = keras.layers.BatchNormalization(name="normal")(vectors)
        answer = keras.layers.Dense(1, name="out")(normal)
        model = keras.Model({"ids": ids, "places": places}, answer)
        model.compile("adagrad", "mse")
    return model


def batch(first, count=600):
    random = np.random.default_rng(first)
    x = {
        "ids": first + random.integers(0, 500, (count, 2)),
        "places": random.integers(0, FIXED, (count, 1)),
    }
    return x, np.ones(count)


def check(state, model):
    table, fixed = model.get_layer("items"), model.get_layer("fixed")
    ids, rows = state.tables[table.embeddings.path]
    assert len(ids) == table.num_rows
    np.testing.assert_array_equal(rows, table.rows(ids))
    np.testing.assert_array_equal(state.tables[fixed.embeddings.path][1], fixed.get_weights()[0])
    for name in ("normal", "out"):
        for weight in model.get_layer(name).weights:
            np.testing.assert_array_equal(state.weights[weight.path], weight.numpy())


def test_deltas_leave_what_the_training_leaves(model, tmp_path):
    state, reader = kerasps.serving.State(), kerasps.serving.DeltaReader(tmp_path / "deltas")

    def read():
        deltas = list(reader.new())
        for delta in deltas:
            state.apply(delta)
        return deltas

    first = kerasps.DeltaExport(tmp_path / "deltas", every_seconds=0.01)
    other = kerasps.DeltaExport(tmp_path / "deltas", every_steps=3)
    for number, export in enumerate([first, first, other]):  # the last as another process has it
        x, y = batch(250 * number)
        model.fit(x, y, batch_size=10, verbose=0, callbacks=[export])
        deltas = read()
        assert [delta.is_base for delta in deltas[1:]] == [False] * (len(deltas) - 1)
        assert deltas[0].is_base == (number == 0)
        assert len(deltas) > 2
        assert deltas[-1].step == 60 * (number + 1)
        check(state, model)
        model.get_layer("items").evict(np.arange(250 * number, 250 * number + 20))


def test_a_follower_answers_as_the_model_predicts(strategy, model, tmp_path):
    export = kerasps.DeltaExport(tmp_path / "deltas", every_steps=20)
    asked = batch(400, 50)[0]
    x, y = batch(0)
    model.fit(x, y, batch_size=10, verbose=0)
    with strategy.scope():  # as scripts are written
        model.export(tmp_path / "exported", updatable=True, verbose=False)
    with kerasps.serving.Follower(tmp_path / "exported", tmp_path / "deltas") as follower:
        np.testing.assert_allclose(follower.predict(asked), model.predict(asked), rtol=1e-5)
    x, y = batch(250)
    model.fit(x, y, batch_size=10, verbose=0, callbacks=[export])
    with kerasps.serving.Follower(tmp_path / "exported", tmp_path / "deltas") as follower:
        assert follower.problem is None
        np.testing.assert_allclose(follower.predict(asked), model.predict(asked), rtol=1e-5)
