"""`kerasps.warm_start` in one process: files, names, widths, both kinds of tables, and errors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.dynamic.tables import row_access
from kerasps.layers import DynamicEmbedding
from kerasps.saving.model_deltas import ModelDeltas

IDS = [7, -3, 2**40, 0]
WORDS = ["[UNK]", "tea", "salt", "coffee", "pepper"]
FORMS = ["weights.h5", "keras", "checkpoint", "manager", "backup", "deltas"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(row_access, "CHUNK_BYTES", 32)


def rows_of(count, width=4, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width)).astype("float32")


def dynamic(name="items", width=4, ids=(), rows=None, **kwargs):
    layer = DynamicEmbedding(width, name=name, **{"max_rows": 20, "seed": 1, **kwargs})
    layer.build()
    if len(ids):
        layer.load_rows(ids, rows)
    return layer


def fixed(name="items", num_rows=6, width=4, rows=None, **kwargs):
    layer = keras.layers.Embedding(num_rows, width, name=name, **kwargs)
    layer.build()
    if rows is not None:
        layer.set_weights([rows])
    return layer


def model_of(*layers):
    ids = keras.Input((2,), dtype="int64")
    parts = [keras.layers.Flatten()(layer(ids)) for layer in layers]
    joined = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    return keras.Model(ids, keras.layers.Dense(1)(joined))


def saved(model, form, folder):
    """The path under which a model was saved."""
    if form == "checkpoint":
        return tf.train.Checkpoint(model=model).write(folder / "ckpt")
    if form == "manager":
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(m=model), folder / "all", 2)
        manager.save()
        return folder / "all"
    if form == "backup":
        folder = folder / "backup"
        folder.mkdir()
        model.save_weights(folder / "latest.weights.h5")
        return folder
    if form == "deltas":
        deltas = ModelDeltas(model, folder / "deltas", 1, None)
        deltas.write(deltas.read())
        return folder / "deltas"
    path = folder / f"model.{form}"
    model.save(path) if form == "keras" else model.save_weights(path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_tables_of_equal_names_are_taken(form, tmp_path):
    rows = rows_of(4)
    old = model_of(dynamic(ids=IDS, rows=rows), fixed("words", rows=rows_of(6, seed=1)))
    path = saved(old, form, tmp_path)
    items, words, users = dynamic(ids=[7, 8], rows=rows_of(2, seed=2)), fixed("words"), fixed("u")
    new = model_of(users, words, items)
    taken = kerasps.warm_start(new, path)
    np.testing.assert_array_equal(items.rows(IDS), rows)
    np.testing.assert_array_equal(items.rows([8]), rows_of(2, seed=2)[1:])
    np.testing.assert_array_equal(words.get_weights()[0], rows_of(6, seed=1))
    assert taken.tables == {
        "words": kerasps.TakenTable("words", 6, 4, 0, 0, 0),
        "items": kerasps.TakenTable("items", 4, 4, 0, 0, 0),
    }
    assert taken.unchanged == ["u"]


@pytest.mark.parametrize("form", FORMS)
def test_both_kinds_of_tables_become_each_other(form, tmp_path):
    rows = rows_of(5)
    path = saved(
        model_of(dynamic("any", ids=WORDS, rows=rows), fixed("words", 5, rows=rows)), form, tmp_path
    )
    any_words, words = dynamic("any_2"), fixed("words_2", 6)
    new = model_of(any_words, words)
    before = words.get_weights()[0]
    taken = kerasps.warm_start(
        new,
        path,
        tables={"any": "words_2", "words": "any_2"},
        vocabulary={"words_2": ["tea", "milk", "pepper"], "any_2": WORDS[:4]},
    )
    np.testing.assert_array_equal(any_words.rows(WORDS[:4]), rows[:4])
    expected = [rows[1], before[1], rows[4], *before[3:]]
    np.testing.assert_array_equal(words.get_weights()[0], expected)
    assert taken.tables["words_2"] == kerasps.TakenTable("any", 2, 4, 3, 0, 0)
    assert taken.tables["any_2"] == kerasps.TakenTable("words", 4, 4, 1, 0, 0)
    assert any_words.num_rows == 4


def test_without_a_vocabulary_ids_are_numbers_of_rows(tmp_path):
    rows = rows_of(4)
    old = model_of(dynamic("any", ids=[-1, 0, 5, 6], rows=rows), fixed("words", rows=rows_of(6)))
    path = saved(old, "weights.h5", tmp_path)
    any_words, words = dynamic("any_2"), fixed("words_2")
    before = words.get_weights()[0]
    taken = kerasps.warm_start(
        model_of(any_words, words), path, tables={"any": "words_2", "words": "any_2"}
    )
    np.testing.assert_array_equal(words.get_weights()[0], [rows[1], *before[1:5], rows[2]])
    np.testing.assert_array_equal(any_words.rows(range(6)), rows_of(6))
    assert taken.tables["words_2"].left_rows == 2


@pytest.mark.parametrize("default_row", ["first", "zeros"])
@pytest.mark.parametrize("form", ["weights.h5", "checkpoint"])
def test_tables_of_another_width(form, default_row, tmp_path):
    old = model_of(dynamic(ids=IDS, rows=rows_of(4)), fixed("words", rows=rows_of(6, seed=1)))
    path = saved(old, form, tmp_path)
    items = dynamic(width=6, default_row=default_row)
    first = dynamic("other", width=6).rows(IDS)
    narrow, wide = fixed("narrow", width=3), fixed("wide", width=5)
    before = wide.get_weights()[0]
    new = model_of(items, narrow)
    taken = kerasps.warm_start(new, path, tables={"items": "items", "words/embeddings": "narrow"})
    np.testing.assert_array_equal(items.rows(IDS), np.hstack([rows_of(4), first[:, 4:]]))
    np.testing.assert_array_equal(narrow.get_weights()[0], rows_of(6, seed=1)[:, :3])
    kerasps.warm_start(model_of(wide), path, tables={"words/embeddings": "wide/embeddings"})
    np.testing.assert_array_equal(
        wide.get_weights()[0], np.hstack([rows_of(6, seed=1), before[:, 4:]])
    )
    assert str(taken) == (
        "items: 4 rows of 4 columns of 'items'; 2 more columns as before\n"
        "narrow: 6 rows of 3 columns of 'words'; no place for 1 column"
    )


def test_names_that_are_not_those_of_one_table(tmp_path):
    inner = keras.Sequential([keras.Input((2,), dtype="int64"), fixed("words")])
    old = model_of(inner, fixed("words"), dynamic(ids=IDS, rows=rows_of(4)))
    path, checkpoint = (saved(old, form, tmp_path) for form in ("weights.h5", "checkpoint"))
    words, items = fixed("words"), dynamic()
    new = model_of(words, items)
    before = words.get_weights()[0]
    for from_ in (path, checkpoint):
        for tables, message in (
            (["none"], r"'none', the name of no table of the file .*Give one of: .*\(items\)"),
            (
                {"items": "none"},
                r"no table of the model\. Give one of: words/embeddings \(",
            ),
            (["words"], r"'words', the name of 2 tables of the file .*\(words\), .*\(words\)"),
            (None, "'words', the name of 2 tables of the file"),
            ([], r"none that .* and the model both have\. The file has .*\(items\)"),
            ("items", r"Received: tables='items'\. Give \['items'\]"),
            ({"items": 3}, "Expected: names of tables. Received: tables=3"),
            ({"items": "items", "items/embeddings": "items/embeddings"}, "more than once"),
        ):
            with pytest.raises(kerasps.InputError, match=message):
                kerasps.warm_start(new, from_, tables=tables)
    assert items.num_rows == 0
    np.testing.assert_array_equal(words.get_weights()[0], before)
    # A place in the file is a name of one of them.
    kerasps.warm_start(new, path, tables={"layers/embedding": "words"})
    assert not np.array_equal(words.get_weights()[0], before)
    with pytest.raises(kerasps.InputError, match="Expected: a built model with tables"):
        kerasps.warm_start(keras.Sequential([keras.layers.Dense(1)]), path)
    with pytest.raises(kerasps.InputError, match="Received: model=a str"):
        kerasps.warm_start("model", path)


def test_vocabularies_that_do_not_fit(tmp_path):
    old = model_of(dynamic("any", ids=IDS, rows=rows_of(4)), fixed("words"))
    path = saved(old, "weights.h5", tmp_path)
    new = model_of(dynamic("any"), fixed("words"))
    across = {"any": "words", "words": "any"}
    for tables, vocabulary, message in (
        (None, {"any": IDS}, "where both tables have ids"),
        (None, {"words": WORDS}, r"both tables have a fixed number of rows.* Use `load_rows\("),
        (across, {"other": IDS}, "Expected: one of 'words', 'any'. Received: vocabulary='other'"),
        (across, {"any": range(7)}, "at most 6 ids, .* Received: vocabulary=7 ids for 'any'"),
        (across, {"words": range(7)}, "Received: vocabulary=7 ids for 'words'"),
        (across, {"words": ["a", "a"]}, "2 ids, 1 of them different"),
        (across, WORDS, "Received: vocabulary=a list"),
    ):
        with pytest.raises(kerasps.InputError, match=message):
            kerasps.warm_start(new, path, tables=tables, vocabulary=vocabulary)
    assert new.layers[1].num_rows == 0


def test_all_rows_must_have_room(tmp_path):
    old = model_of(dynamic(ids=IDS, rows=rows_of(4)), fixed("words", rows=rows_of(6)))
    path = saved(old, "weights.h5", tmp_path)
    items, words = dynamic(max_rows=5, ids=[7, 1], rows=rows_of(2)), fixed("words")
    before = words.get_weights()[0]
    new = model_of(words, items)
    kerasps.warm_start(new, path, tables=["items"])  # one of its ids is there
    items.evict(IDS)
    items.load_rows([1, 2], rows_of(2))
    with pytest.raises(kerasps.InputError, match=r"at most max_rows=5 .* would have 6 rows"):
        kerasps.warm_start(new, path)
    assert sorted(items.embeddings.sorted_ids()) == [1, 2]
    np.testing.assert_array_equal(words.get_weights()[0], before)


def test_damaged_files_change_nothing(tmp_path):
    old = model_of(dynamic(ids=IDS, rows=rows_of(4)), fixed("words", rows=rows_of(6)))
    items, words = dynamic(), fixed("words")
    new, before = model_of(words, items), words.get_weights()[0]

    def cut(path, by=100):
        path.write_bytes(path.read_bytes()[:-by])

    def spoil(path, what):
        content = path.read_bytes()
        assert content.count(what) == 1
        path.write_bytes(content.replace(what, what[::-1]))

    def of(path, end):
        return path.with_name(path.name + end)

    last_row, data_loss = rows_of(6)[-1].tobytes(), tf.errors.DataLossError
    for form, damage, error in (
        ("weights.h5", cut, OSError),
        ("keras", cut, Exception),
        ("keras", lambda path: spoil(path, last_row), Exception),
        ("checkpoint", lambda path: spoil(of(path, ".data-00000-of-00001"), last_row), data_loss),
        ("checkpoint", lambda path: cut(of(path, ".index")), data_loss),
        ("deltas", lambda path: cut(*path.glob("*.safetensors")), kerasps.DeltaError),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        path = tmp_path.joinpath(saved(old, form, folder))
        damage(path)
        with pytest.raises(error, match=path.name):
            kerasps.warm_start(new, path)
    for path in ("missing.weights.h5", "missing.keras"):
        with pytest.raises(OSError, match="missing"):
            kerasps.warm_start(new, tmp_path / path)
    for path in ("missing", ""):
        with pytest.raises(kerasps.InputError, match="There are no tables at this path"):
            kerasps.warm_start(new, tmp_path / path)
    for path in ("", None, 3):
        with pytest.raises((TypeError, ValueError), match="Argument `from_` names no path"):
            kerasps.warm_start(new, path)
    assert items.num_rows == 0
    np.testing.assert_array_equal(words.get_weights()[0], before)


def test_tables_of_integers_are_refused(tmp_path):
    words = fixed("words")
    old = model_of(words)
    words.quantize("int8")
    checkpoint = tf.train.Checkpoint(model=old).write(tmp_path / "ckpt")
    with pytest.raises(kerasps.InputError, match=r"'words', of int8, .* before it is quantized"):
        kerasps.warm_start(model_of(fixed("words")), checkpoint)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("form", ["weights.h5", "checkpoint"])
def test_rows_take_the_dtype_of_the_table(dtypes, form, tmp_path):
    old_dtype, new_dtype = dtypes
    rows = rows_of(4)
    old = dynamic(ids=IDS, rows=rows.astype(tf.as_dtype(old_dtype).as_numpy_dtype), dtype=old_dtype)
    path = saved(model_of(old), form, tmp_path)
    items, wide = dynamic(dtype=new_dtype), dynamic("wide", 5, dtype=new_dtype)
    kerasps.warm_start(model_of(items, wide), path)
    kerasps.warm_start(model_of(wide), path, tables={"items": "wide"})
    dtype = tf.as_dtype(new_dtype).as_numpy_dtype
    np.testing.assert_array_equal(items.rows(IDS), old.rows(IDS).astype(dtype))
    np.testing.assert_array_equal(wide.rows(IDS)[:, :4], old.rows(IDS).astype(dtype))


def test_another_optimizer_begins_anew(tmp_path):
    old = model_of(dynamic(), fixed("words"))
    old.compile("adam", "mse")
    old.fit(np.array([[1, 2], [3, 4]]), np.ones((2, 1)), verbose=0)
    path = saved(old, "keras", tmp_path)
    items, words = dynamic(), fixed("words")
    new = model_of(items, words)
    new.compile("adagrad", "mse")
    dense = new.layers[-1].get_weights()[0]
    kerasps.warm_start(new, path)
    np.testing.assert_array_equal(items.rows([1, 2, 3, 4]), old.layers[1].rows([1, 2, 3, 4]))
    np.testing.assert_array_equal(new.layers[-1].get_weights()[0], dense)
    new.fit(np.array([[1, 2], [3, 4]]), np.ones((2, 1)), verbose=0)
    assert items.num_rows == 4
