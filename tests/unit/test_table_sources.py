"""Rows of a table from files, and of other programs, into tables with other ids, in one process."""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.dynamic import row_access
from kerasps.layers import DynamicEmbedding, load_rows, rows_in_file

WORDS = ["[UNK]", "tea", "salt", "coffee", "pepper"]
IDS = [7, -3, 2**40, 0]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(row_access, "CHUNK_BYTES", 32)


def rows_of(count, width=4):
    return np.random.default_rng(0).normal(size=(count, width)).astype("float32")


def dynamic(ids=(), rows=None, name="items"):
    layer = DynamicEmbedding(4, "zeros", max_rows=20, name=name)
    layer.build()
    if len(ids):
        layer.load_rows(ids, rows)
    return layer


def fixed(num_rows, rows=None, name="items"):
    layer = keras.layers.Embedding(num_rows, 4, "zeros", name=name)
    layer.build()
    if rows is not None:
        layer.set_weights([rows])
    return layer


def saved(layer, form, folder):
    """The path of a file with a layer, and the name of the table in it."""
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    if form == "checkpoint":
        return tf.train.Checkpoint(layer=layer).write(folder / "ckpt"), (
            "layer/embeddings" if isinstance(layer, DynamicEmbedding) else "layer/_embeddings"
        )
    path = folder / f"model.{form}"
    model.save(path) if form == "keras" else model.save_weights(path)
    return path, layer.name


FORMS = ["weights.h5", "keras", "checkpoint"]


@pytest.mark.parametrize("form", FORMS)
def test_a_fixed_table_takes_the_rows_of_its_vocabulary(form, tmp_path):
    rows = rows_of(3)
    path, name = saved(dynamic(["tea", "pepper", "sugar"], rows), form, tmp_path)
    layer = fixed(6)  # a row more than there are words
    assert load_rows(layer, rows_in_file(path, name), vocabulary=WORDS) == 2
    expected = np.zeros((6, 4))
    expected[[1, 4]] = rows[:2]
    np.testing.assert_array_equal(layer.get_weights()[0], expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_dynamic_table_takes_the_rows_of_a_fixed_one(form, tmp_path):
    rows = rows_of(4)
    path, name = saved(fixed(4, rows), form, tmp_path)
    layer = dynamic([7, 8], rows_of(2))
    assert load_rows(layer, rows_in_file(path, name, vocabulary=IDS)) == 4
    np.testing.assert_array_equal(layer.rows(IDS), rows)
    assert layer.num_rows == 5


def test_a_slot_takes_rows():
    layer = dynamic(IDS, rows_of(4))
    optimizer = keras.optimizers.Adagrad(initial_accumulator_value=0.5)
    optimizer.build(layer.trainable_variables)
    (slot,) = (v for v in optimizer.variables if "embeddings" in v.path)
    assert load_rows(slot, [(IDS[:2], rows_of(2)), ([5], np.ones((1, 4)))]) == 3
    np.testing.assert_array_equal(
        slot.find_rows(np.array([*IDS, 5])), [*rows_of(2), [0.5] * 4, [0.5] * 4, [1] * 4]
    )
    assert layer.num_rows == 5


def test_names_in_a_file_that_cannot_be_used(tmp_path):
    path, _ = saved(dynamic(IDS, rows_of(4)), "weights.h5", tmp_path)
    checkpoint, _ = saved(dynamic(), "checkpoint", tmp_path)
    for refused, message in (
        (lambda: rows_in_file(path, "users"), r"Received: 'users'\. Give one of: .*\(items\)\."),
        (lambda: rows_in_file(path, "items", IDS), r"which has 4 rows with ids\. Expected: no voc"),
        (lambda: rows_in_file(checkpoint, "items"), "Give one of: layer/embeddings/.ATTR"),
    ):
        with pytest.raises(kerasps.InputError, match=message):
            next(refused())
    path, _ = saved(fixed(4, rows_of(4), "users"), "weights.h5", tmp_path)
    for vocabulary in (None, IDS[:3]):
        with pytest.raises(kerasps.InputError, match=r"Expected: a vocabulary of 4 ids\. Received"):
            next(rows_in_file(path, "users", vocabulary))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((dynamic, [], WORDS), "has any rows. Expected: no vocabulary"),
        ((lambda: fixed(3), [], None), "Expected: a vocabulary. Received: none"),
        ((lambda: fixed(3), [], WORDS), "at most 3 ids, one for each row. Received: 5"),
        ((lambda: fixed(3), [], ["a", "a"]), "Received: 2 ids, 1 of them different"),
        ((lambda: keras.layers.Dense(3), [], None), "Received: <Dense"),
        ((dynamic, [([1, 2], np.ones((2, 3)))], None), r"shape \(2, 4\)\. Received: rows of shape"),
        ((dynamic, [([1, 1], np.ones((2, 4)))], None), "2 ids, 1 of them different"),
        ((dynamic, [([[1]], np.ones((1, 4)))], None), r"Received: an array of shape \(1, 1\)"),
    ],
)
def test_what_cannot_be_loaded(arguments, message):
    layer, rows, vocabulary = arguments
    with pytest.raises(kerasps.InputError, match=message):
        load_rows(layer(), rows, vocabulary)
