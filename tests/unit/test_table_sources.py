"""Rows of a table from files, and of other programs, into tables with other ids, in one process."""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.dynamic.tables import row_access
from kerasps.layers import DynamicEmbedding, load_rows, rows_in_file, rows_of_recommenders_addons

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
        (lambda: rows_in_file(path, "items", IDS), r"which has rows with ids\. Expected: no voc"),
        (
            lambda: rows_in_file(checkpoint, "users"),
            r"one of: layer/embeddings, .* \(items\)",
        ),
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


# Recommenders-Addons


def write_table(path, keys, rows):
    """Writes a table byte for byte: keys, and rows in their order, without a header."""
    code = {"int64": "<i8", "int32": "<i4", "float32": "<f4", "float16": "<f2", "float64": "<f8"}
    for end, values in (("-keys", keys), ("-values", rows)):
        with open(f"{path}{end}", "wb") as file:
            file.write(values.astype(code[values.dtype.name]).tobytes())


@pytest.mark.parametrize(
    ("key_dtype", "dtype", "of_processes"),
    [
        ("int64", "float32", False),
        ("int64", "float32", True),
        ("int32", "float16", True),
        ("int64", "float64", False),
    ],
)
def test_files_of_recommenders_addons(key_dtype, dtype, of_processes, tmp_path):
    keys = np.array([7, -3, 2**31 - 1, 0, 11, -8, 5, 1, 2], key_dtype)
    rows = rows_of(9).astype(dtype)
    ranks = ["_rank0_size2", "_rank1_size2"] if of_processes else [""]
    tables = [f"deep_items-parameter_mht_{i}of2{rank}" for i in (1, 2) for rank in ranks]
    parts = np.arange(9) % len(tables)
    for number, table in enumerate(tables):
        write_table(tmp_path / table, keys[parts == number], rows[parts == number])
    # Tables of other variables, of which one is a slot.
    write_table(tmp_path / "items-parameter_mht_1of1", keys[:1], rows[:1])
    slot = "deep_items-parameter_Adam_m"
    for i in (1, 2):
        write_table(tmp_path / f"{slot}_mht_{i}of2", keys[i : i + 1], rows[i : i + 1])

    def pieces(name):
        return rows_of_recommenders_addons(tmp_path, name, 4, key_dtype=key_dtype, dtype=dtype)

    layer = dynamic()
    assert load_rows(layer, pieces("deep/items-parameter")) == 9
    np.testing.assert_array_equal(layer.rows(keys), rows.astype("float32"))
    assert sorted(int(i) for ids, _ in pieces(slot) for i in ids) == sorted(map(int, keys[1:3]))


def test_the_last_row_of_an_id_that_was_appended_again_counts(tmp_path):
    rows = rows_of(3)
    write_table(tmp_path / "t_mht_1of1", np.array([1, 2, 1]), rows)
    layer = dynamic()
    load_rows(layer, rows_of_recommenders_addons(tmp_path, "t", 4))
    np.testing.assert_array_equal(layer.rows([1, 2]), rows[[2, 1]])


@pytest.mark.parametrize(
    ("tables", "changes", "message"),
    [
        (["t_mht_1of2"], {}, "has not all files of one save.* Received: t_mht_1of2-keys"),
        (["t_mht_1of1", "t_mht_1of2", "t_mht_2of2"], {}, "has not all files of one save"),
        (["t_mht_1of1_rank0_size2"], {}, "Received: t_mht_1of1_rank0_size2-keys"),
        (["u_mht_1of1"], {}, "Expected: t_mht_1of1-keys, .* Received: tables of u"),
        ([], {}, "Received: tables of none"),
        (["t_mht_1of1"], {"width": 5}, "of 8 bytes and as many rows of 20. Received: 16 and 32"),
        (["t_mht_1of1"], {"dtype": "float16"}, "rows of 8. Received: 16 and 32 bytes. Give the"),
        (["t_mht_1of1"], {"key_dtype": "int32"}, "keys of 4 bytes and as many rows of 16"),
    ],
)
def test_files_that_are_not_of_one_save(tables, changes, message, tmp_path):
    for table in tables:
        write_table(tmp_path / table, np.array([1, 2]), rows_of(2))
    arguments = {"width": 4, **changes}
    with pytest.raises(kerasps.InputError, match=message):
        next(rows_of_recommenders_addons(tmp_path, "t", **arguments))


def test_rows_without_their_file_are_missed(tmp_path):
    write_table(tmp_path / "t_mht_1of1", np.array([1, 2]), rows_of(2))
    os.remove(tmp_path / "t_mht_1of1-values")
    with pytest.raises(kerasps.InputError, match="Received: 16 and -1 bytes"):
        next(rows_of_recommenders_addons(tmp_path, "t", 4))


@pytest.mark.parametrize(
    "tables",
    [
        ["deep_items_mht_1of2", "deep_items_mht_2of2"],
        [f"model/params/tables_of_deep.Sitems/{i}/.ATTRIBUTES/table" for i in (0, 1)],
    ],
)
def test_a_table_of_recommenders_addons_in_a_checkpoint(tables, tmp_path):
    rows = rows_of(4)
    values = {"tables_of_items/0/.ATTRIBUTES/table-keys": [9]}
    for i, table in enumerate(tables):
        values |= {f"{table}-keys": IDS[i::2], f"{table}-values": rows[i::2]}
    tf.raw_ops.SaveV2(
        prefix=os.fspath(tmp_path / "ckpt"),
        tensor_names=list(values),
        shape_and_slices=[""] * len(values),
        tensors=[
            tf.constant(value, tf.int64 if name.endswith("-keys") else tf.float32)
            for name, value in values.items()
        ],
    )
    layer = dynamic()
    assert load_rows(layer, rows_in_file(tmp_path / "ckpt", "deep/items")) == 4
    np.testing.assert_array_equal(layer.rows(IDS), rows)
