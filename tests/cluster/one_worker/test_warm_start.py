"""`kerasps.warm_start` of models whose tables are on ps, and between these and one process.

Pieces are of some rows here, so that each table has several.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.dynamic.tables import row_access
from kerasps.layers import CountAdmission, DynamicEmbedding, Eviction
from kerasps.saving import backups as kept_backups
from kerasps.saving.backup_files import BackupDirectory

FORMS = ["weights.h5", "keras", "checkpoint", "backup"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(row_access, "CHUNK_BYTES", 128)
    monkeypatch.setattr(row_access, "PIECE", 17)


def model_of(*layers, optimizer="adam"):
    ids = keras.Input((3,), dtype="int64")
    flat = [keras.layers.Flatten()(layer(ids)) for layer in layers]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(flat)))
    model.compile(optimizer, "mse")
    return model


def train(model, **kwargs):
    ids = np.random.default_rng(0).integers(0, 50, (96, 3))
    model.fit(ids, ids.sum(1), 16, verbose=0, **kwargs)


@pytest.fixture(scope="module")
def old(strategy, tmp_path_factory):
    """The paths of a trained model, by form; the ids and rows of its dynamic table, and a fixed."""
    folder = tmp_path_factory.mktemp("old")
    with strategy.scope():
        items = DynamicEmbedding(
            4,
            name="items",
            max_rows=200,
            eviction=Eviction("lru"),
            admission=CountAdmission(2, max_candidates=50),
        )
        words = keras.layers.Embedding(60, 4, name="words")
        model = model_of(items, words)
    backups = keras.callbacks.BackupAndRestore(folder / "backups", delete_checkpoint=False)
    train(model, callbacks=[backups])
    model.save_weights(folder / "a.weights.h5")
    model.save(folder / "a.keras")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    paths = {
        "weights.h5": folder / "a.weights.h5",
        "keras": folder / "a.keras",
        "checkpoint": checkpoint.write(folder / "c"),
        "backup": folder / "backups",
    }
    ids = items.embeddings.sorted_ids()
    return paths, ids, items.rows(ids), model.get_layer("words").embeddings.numpy()


@pytest.mark.parametrize("is_on_ps", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_tables_come_from_every_kind_of_file(strategy, sharded, old, form, is_on_ps):
    paths, ids, rows, words = old
    sharded(3 if is_on_ps else 1)
    arguments = {"max_rows": 200, "seed": 1}
    first = DynamicEmbedding(6, name="first", **arguments)
    first.build()

    def new_model():
        return model_of(
            DynamicEmbedding(6, name="items", default_row="zeros", **arguments),
            keras.layers.Embedding(50, 3, name="words"),
            keras.layers.Embedding(50, 4, name="others"),
            optimizer="adagrad",
        )

    if is_on_ps:
        with strategy.scope():
            model = new_model()
    else:
        model = new_model()
    taken = kerasps.warm_start(model, paths[form])
    table = model.get_layer("items")
    assert table.num_rows == len(ids) > 40
    expected = np.hstack([rows, first.rows(ids)[:, 4:]])
    np.testing.assert_array_equal(table.rows(ids), expected)
    np.testing.assert_array_equal(model.get_layer("words").embeddings.numpy(), words[:50, :3])
    assert taken.tables == {
        "items": kerasps.TakenTable("items", len(ids), 4, 0, 0, 2),
        "words": kerasps.TakenTable("words", 50, 3, 10, 1, 0),
    }
    assert (taken.left, taken.unchanged) == ([], ["others"])
    if is_on_ps and form == "backup":
        train(model)


@pytest.mark.parametrize("form", FORMS)
def test_both_kinds_of_tables_become_each_other(strategy, sharded, old, form):
    paths, ids, rows, words = old
    sharded(2)
    names = [f"word {i}" for i in range(60)]
    with strategy.scope():
        items = keras.layers.Embedding(70, 5, name="new_items")
        model = model_of(items, DynamicEmbedding(4, name="new_words"))
    before = items.embeddings.numpy()
    taken = kerasps.warm_start(
        model,
        paths[form],
        tables={"items": "new_items", "words": "new_words"},
        vocabulary={"new_words": names},
    )
    expected = before.copy()
    expected[ids, :4] = rows
    np.testing.assert_array_equal(items.embeddings.numpy(), expected)
    np.testing.assert_array_equal(model.get_layer("new_words").rows(names), words)
    assert str(taken) == (
        f"new_items: {len(ids)} rows of 4 columns of 'items'; 1 more column as before\n"
        "new_words: 60 rows of 4 columns of 'words'"
    )


def test_what_does_not_fit_changes_nothing(strategy, old):
    paths, ids, _, words = old
    with strategy.scope():
        full = DynamicEmbedding(4, name="items", max_rows=len(ids) - 1)
        fixed = keras.layers.Embedding(60, 4, name="words")
        model = model_of(fixed, full)
    before = fixed.embeddings.numpy()
    with pytest.raises(kerasps.InputError, match=f"at most max_rows={len(ids) - 1} rows in "):
        kerasps.warm_start(model, paths["checkpoint"])
    with pytest.raises(kerasps.InputError, match=r"Give one of: items/embeddings \(items\), words"):
        kerasps.warm_start(model, paths["backup"], tables=["none"])
    assert full.num_rows == 0
    np.testing.assert_array_equal(fixed.embeddings.numpy(), before)
    # After a failure, and twice.
    for _ in range(2):
        kerasps.warm_start(model, paths["backup"], tables=["words"])
    np.testing.assert_array_equal(fixed.embeddings.numpy(), words)


def test_a_damaged_file_of_a_backup_changes_nothing(strategy, old, tmp_path):
    paths, *_ = old
    copied = tmp_path / "backups"
    tf.io.gfile.makedirs(str(copied))
    for path in paths["backup"].rglob("*"):
        if path.is_file():
            target = copied / path.relative_to(paths["backup"])
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    (damaged, *_) = sorted(copied.glob("*/100000.data*"))
    damaged.write_bytes(damaged.read_bytes()[::-1])
    with strategy.scope():
        model = model_of(
            keras.layers.Embedding(60, 4, name="words"), DynamicEmbedding(4, name="items")
        )
    before = model.get_layer("words").embeddings.numpy()
    with pytest.raises(tf.errors.OpError, match=r"The checkpoint .*/100000 is damaged"):
        kerasps.warm_start(model, copied)
    assert model.get_layer("items").num_rows == 0
    np.testing.assert_array_equal(model.get_layer("words").embeddings.numpy(), before)


def test_a_backup_that_is_a_delta_has_the_last_version_of_each_row(strategy, tmp_path, monkeypatch):
    # A small model: its other variables are most of a backup.
    monkeypatch.setattr(kept_backups, "_MOST_OF_BASE", 100)
    with strategy.scope():
        items = DynamicEmbedding(4, name="items", max_rows=30, eviction=Eviction("lru"))
        words = keras.layers.Embedding(60, 4, name="words")
        model = model_of(items, words)

    class RemovesRows(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            items.evict(items.embeddings.sorted_ids()[epoch::5])

    backups = kerasps.BackupAndRestore(
        tmp_path / "backups", delta=True, full_every=20, delete_checkpoint=False
    )
    train(model, epochs=5, callbacks=[RemovesRows(), backups])
    assert len(next(BackupDirectory(tmp_path / "backups").backups()).chain) == 5
    with strategy.scope():
        new = model_of(
            DynamicEmbedding(4, name="items"), keras.layers.Embedding(60, 4, name="words")
        )
    taken = kerasps.warm_start(new, tmp_path / "backups")
    table, ids = new.get_layer("items"), items.embeddings.sorted_ids()
    np.testing.assert_array_equal(table.embeddings.sorted_ids(), ids)
    np.testing.assert_array_equal(table.rows(ids), items.rows(ids))
    assert taken.tables["items"].rows == len(ids)
    np.testing.assert_array_equal(
        new.get_layer("words").embeddings.numpy(), words.embeddings.numpy()
    )
