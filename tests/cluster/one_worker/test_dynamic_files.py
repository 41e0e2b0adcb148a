"""Tables without a vocabulary in files, in `get_weights` and in SavedModels.

Pieces are of some rows here, so that each table has several.
"""

from __future__ import annotations

import os
import subprocess
import sys

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.dynamic.ids.keys import part_of
from kerasps.dynamic.tables import row_access, row_files
from kerasps.dynamic.tables.row_files import RowsById
from kerasps.layers import DynamicEmbedding, load_rows, rows_in_file
from support.any_ids import differences, make_data, make_model, nearly, state_of, train


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(row_access, "CHUNK_BYTES", 512)
    monkeypatch.setattr(row_access, "PIECE", 17)


@pytest.fixture(scope="module")
def model(strategy):
    """A model whose tables have the rows that the test before has left."""
    with strategy.scope():
        return make_model()


def tables_of(model):
    return [layer.embeddings for layer in model.layers if isinstance(layer, DynamicEmbedding)]


def clear(model):
    """Removes all rows, and all counts of ids without rows."""
    for table in (weight for weight in model.weights if not weight.has_whole_value):
        empty = np.zeros((0, table.shape[1]), table.dtype)
        table.assign(RowsById(np.zeros(0, np.int64), empty))


def checkpoint_of(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def save(model, form, folder):
    if form == "weights.h5":
        model.save_weights(folder / "a.weights.h5")
    elif form == "weights.json":
        model.save_weights(folder / "a.weights.json", max_shard_size=2e-6)
    elif form == "keras":
        model.save(folder / "a.keras")
    else:
        checkpoint_of(model).write(folder / "checkpoint")


def load(model, form, folder):
    if form == "checkpoint":
        checkpoint_of(model).read(folder / "checkpoint").assert_consumed()
    else:
        model.load_weights(folder / f"a.{form}")


FORMS = ["weights.h5", "weights.json", "keras", "checkpoint"]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_loaded_is_what_was_saved_and_training_goes_on_alike(model, form, tmp_path):
    clear(model)
    train(model, 1)
    saved = state_of(model)
    save(model, form, tmp_path)
    train(model, 2)
    through = state_of(model)
    assert len(through["0/ids"]) > len(saved["0/ids"])
    load(model, form, tmp_path)
    assert differences(state_of(model), saved) == []
    train(model, 2)
    assert differences(state_of(model), through) == []


def test_a_model_is_loaded_from_its_file_alone(strategy, model, tmp_path):
    train(model, 1)
    model.save(tmp_path / "a.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "a.keras")
    assert differences(state_of(loaded), state_of(model)) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_table_without_rows_is_saved_and_loaded(model, form, tmp_path):
    clear(model)
    save(model, form, tmp_path)
    train(model, 1)
    load(model, form, tmp_path)
    assert [table.num_rows for table in tables_of(model)] == [0, 0, 0]


def test_a_weights_file_has_ids_and_rows_and_the_ids_of_slots_once(model, tmp_path):
    clear(model)
    train(model, 1)
    model.save_weights(tmp_path / "a.weights.h5")
    table = model.get_layer("users").embeddings
    with h5py.File(tmp_path / "a.weights.h5") as file:
        (layer,) = (
            group["vars"]
            for group in file["layers"].values()
            if group["vars"].attrs["name"] == "users"
        )
        ids, rows = layer["ids"][:], layer["rows"][:]
        optimizer = file["optimizer/vars"]
        numbers = [
            str(index)
            for index, slot in enumerate(model.optimizer.variables)
            if "users" in slot.path
        ]
        assert len(numbers) == 2
        for number in numbers:
            np.testing.assert_array_equal(optimizer[f"{number}_ids"], ids)
        assert len({h5py.h5o.get_info(optimizer[f"{n}_ids"].id).addr for n in numbers}) == 1
    assert ids.dtype == np.int64
    assert (np.diff(ids) > 0).all()
    np.testing.assert_array_equal(rows, table.find_rows(ids))
    np.testing.assert_array_equal(ids, np.unique(make_data(1)[0][0]))


def test_a_checkpoint_has_ids_and_rows(model, tmp_path):
    train(model, 1)
    save(model, "checkpoint", tmp_path)
    reader = tf.train.load_checkpoint(tmp_path / "checkpoint")
    prefix = "optimizer/_trainable_variables/0/.ATTRIBUTES"
    value = model.get_weights()[0]
    np.testing.assert_array_equal(reader.get_tensor(f"{prefix}/IDS"), value.ids)
    np.testing.assert_array_equal(reader.get_tensor(f"{prefix}/ROWS"), value.rows)


def test_a_checkpoint_that_no_ps_sees_is_written_and_read_by_the_coordinator(model, tmp_path):
    train(model, 1)
    saved = state_of(model)
    (tmp_path / "seen").mkdir()
    before = os.getcwd()
    os.chdir(tmp_path / "seen")
    try:  # this path is another directory for each process
        checkpoint_of(model).write("/proc/self/cwd/checkpoint")
        train(model, 2)
        checkpoint_of(model).read("/proc/self/cwd/checkpoint").assert_consumed()
    finally:
        os.chdir(before)
    assert (tmp_path / "seen" / "checkpoint.index").exists()
    assert differences(state_of(model), saved) == []


def test_a_checkpoint_that_is_written_later_is_refused(model, tmp_path):
    options = tf.train.CheckpointOptions(enable_async=True)
    checkpoint = checkpoint_of(model)
    with pytest.raises(
        kerasps.UnsupportedError,
        match=r"would need a copy of '.*embeddings.*', a table.* Received: `enable_async=True`\.",
    ):
        checkpoint.write(tmp_path / "checkpoint", options=options)


def test_weights_that_are_set_are_those_that_were_got(model):
    train(model, 1)
    saved, weights = state_of(model), model.get_weights()
    slots = [variable.numpy() for variable in model.optimizer.variables]
    assert isinstance(weights[0], RowsById)
    assert repr(weights[0]) == f"<RowsById rows={len(weights[0])} width=4 dtype=float32>"
    train(model, 2)
    model.set_weights(weights)
    model.optimizer.set_weights(slots)
    assert differences(state_of(model), saved) == []


def test_slots_may_be_loaded_before_their_table(model):
    train(model, 1)
    saved, weights = state_of(model), model.get_weights()
    slots = [variable.numpy() for variable in model.optimizer.variables]
    train(model, 2)
    model.optimizer.set_weights(slots)
    model.set_weights(weights)
    assert differences(state_of(model), saved) == []


def test_a_slot_that_a_row_has_not_begun_is_what_it_begins_as(strategy):
    with strategy.scope():
        layer = DynamicEmbedding(4)
        layer.build()
        ids = np.arange(-3, 4)
        layer.load_rows(ids, np.ones((7, 4), "float32"))
        optimizer = keras.optimizers.Adagrad(initial_accumulator_value=0.25)
        optimizer.build(layer.trainable_variables)
    (slot,) = (variable for variable in optimizer.variables if "embeddings" in variable.path)
    np.testing.assert_array_equal(slot.sorted_ids(), ids)
    assert (slot.numpy().rows == 0.25).all()
    slot.write_rows(ids[:2], np.ones((2, 4), "float32"))
    np.testing.assert_array_equal(slot.numpy().rows[:, 0], [1, 1] + 5 * [0.25])
    slot.assign(RowsById(ids[1:2], np.full((1, 4), 7, "float32")))
    np.testing.assert_array_equal(slot.numpy().rows[:, 0], [0.25, 7] + 5 * [0.25])
    assert (layer.rows(ids) == 1).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_training_goes_on_in_one_process_and_back_on_ps(strategy, optimizer, form, tmp_path):
    def made():
        # A small table in this process makes steps fast.
        return make_model(optimizer, names=("users", "items"), max_rows=200)

    def train_all(model):
        # Each step has each id once. So plain Keras moves the rows that a lazy optimizer moves, and
        # has one gradient for each.
        ids = np.random.default_rng(5).integers(-(2**62), 2**62, 36)
        targets = np.random.default_rng(6).normal(size=(12, 1))
        inputs = [ids.reshape(12, 3), ids[:24].reshape(12, 2)]
        return model.fit(inputs, targets, batch_size=12, epochs=2, verbose=0)

    with strategy.scope():
        model = made()
    here = made()
    train(here, 2)  # other rows, at the places of those that are loaded
    train_all(model)
    for source, target in ((model, here), (here, model)):
        folder = tmp_path / source.name
        folder.mkdir()
        save(source, form, folder)
        train_all(source)
        if target is model:
            clear(target)
        load(target, form, folder)
        train_all(target)
        assert nearly(state_of(target), state_of(source)) == []


def test_early_stopping_restores_the_rows_of_the_best_epoch(model):
    inputs, targets = make_data(1)
    best = {}

    class Best(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                best.update(state_of(self.model))

    stopping = keras.callbacks.EarlyStopping(
        "loss", mode="max", restore_best_weights=True, patience=5
    )
    model.fit(
        inputs,
        targets,
        batch_size=8,
        epochs=3,
        verbose=0,
        shuffle=False,
        callbacks=[Best(), stopping],
    )
    restored = state_of(model)
    of_weights = [key for key in best if int(key.partition("/")[0]) < len(model.weights)]
    assert differences({k: restored[k] for k in of_weights}, {k: best[k] for k in of_weights}) == []


def test_weights_of_more_than_a_gibibyte_are_refused(model, monkeypatch):
    train(model, 1)
    monkeypatch.setattr(row_files, "_MOST_BYTES", 100)
    with pytest.raises(
        kerasps.UnsupportedError,
        match=r"The value of 'users/embeddings'.* is too large for this process\..* Save the model",
    ):
        model.get_weights()


def test_a_table_has_no_array(model):
    table = model.get_layer("users").embeddings
    with pytest.raises(kerasps.UnsupportedError, match="as a whole is asked for"):
        np.asarray(table)
    with pytest.raises(kerasps.UnsupportedError, match="as a whole is asked for"):
        table.assign(np.zeros((3, 4)))


def test_values_that_are_no_value_of_a_table_are_refused(model):
    table = model.get_layer("users").embeddings
    with pytest.raises(kerasps.InputError, match=r"Expected: \(2, 4\)\. Received: \(2, 3\)\."):
        table.assign(RowsById(np.arange(2), np.zeros((2, 3), "float32")))
    with pytest.raises(kerasps.InputError, match=r"Received: 2 ids, 1 of them different\."):
        table.assign(RowsById(np.zeros(2, np.int64), np.zeros((2, 4), "float32")))


def test_a_full_table_is_loaded_however_its_rows_are_spread(strategy, monkeypatch):
    with strategy.scope():
        layer = DynamicEmbedding(3, max_rows=10)
        layer.build()
    table = layer.embeddings
    ids = np.arange(1000)
    part = np.asarray(part_of(table.storage.table.keys(tf.constant(ids)), 2))
    ids = ids[part == 0][:10]  # all on one ps
    table.assign(RowsById(ids, np.ones((10, 3), "float32")))
    assert table.num_rows == 10
    for refused in (
        lambda: table.assign(RowsById(np.arange(11), np.ones((11, 3), "float32"))),
        lambda: table.write_rows(np.array([-1]), np.ones((1, 3), "float32")),
    ):
        with pytest.raises(kerasps.InputError, match=r"max_rows=10 rows\. Received: 11\."):
            refused()
    np.testing.assert_array_equal(table.sorted_ids(), ids)
    # A few rows are written in the time of a few, however many there are.
    with monkeypatch.context() as patch:
        patch.setattr(row_access.TableAccess, "sorted_ids", None)
        table.write_rows(ids[:2], np.full((2, 3), 2, "float32"))
    np.testing.assert_array_equal(layer.rows(ids)[:, 0], [2, 2] + 8 * [1])


@pytest.mark.parametrize("num_shards", [1, 3])
def test_rows_go_into_a_fixed_table_and_back(strategy, sharded, num_shards, tmp_path):
    sharded(num_shards)
    vocabulary, rows = np.arange(30) * 10**9 - 5, np.arange(120, dtype="float32").reshape(30, 4)
    with strategy.scope():
        table = DynamicEmbedding(4, name="any")
        model = keras.Sequential([keras.Input((1,), dtype="int64"), table])
        fixed = keras.layers.Embedding(40, 4, "zeros", name="fixed")
        fixed.build()
    table.load_rows(vocabulary[::2], rows[::2])
    model.save_weights(tmp_path / "any.weights.h5")
    pieces = rows_in_file(tmp_path / "any.weights.h5", "any")
    assert load_rows(fixed, pieces, vocabulary[3:]) == 13
    expected = np.where(np.arange(30)[:, None] % 2, 0, rows)[3:]
    np.testing.assert_array_equal(tf.gather(fixed.embeddings, np.arange(27)), expected)
    keras.Sequential([keras.Input((1,)), fixed]).save_weights(tmp_path / "fixed.weights.h5")
    words = [f"word {i}" for i in range(40)]
    pieces = rows_in_file(tmp_path / "fixed.weights.h5", "fixed", vocabulary=words)
    assert load_rows(table, pieces) == 40
    np.testing.assert_array_equal(table.rows(words[:27]), expected)
    assert table.num_rows == 55


class Stop(Exception):
    """Ends a training."""


def test_a_backup_within_an_epoch_has_tables_and_slots(strategy, tmp_path):
    def fit(model, *callbacks):
        inputs, targets = make_data(1)
        stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True, patience=9)
        model.fit(
            inputs,
            targets,
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[stopping, *callbacks],
        )
        return state_of(model)

    def made():
        with strategy.scope():
            return make_model(names=("users", "items"))

    expected = fit(made())

    class StopInSecondEpoch(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 1 and batch == 9:
                raise Stop

    def backups():
        return keras.callbacks.BackupAndRestore(
            tmp_path / "backups", save_freq=4, delete_checkpoint=False
        )

    with pytest.raises(Stop):
        fit(made(), backups(), StopInSecondEpoch())
    resumed = []
    first = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: resumed.append(batch)
    )
    model = made()
    model.get_layer("users").embeddings.write_rows(np.array([5]), np.ones((1, 4), "float32"))
    assert differences(fit(model, backups(), first), expected) == []
    assert resumed[0] > 0


def test_a_damaged_file_of_a_table_in_a_backup_is_named(model, tmp_path):
    def fit():
        backups = keras.callbacks.BackupAndRestore(tmp_path / "backups", delete_checkpoint=False)
        train(model, 1, callbacks=[backups])

    fit()
    (data, *_) = sorted((tmp_path / "backups").glob("backup-*/1*.data-*"))
    content = bytearray(data.read_bytes())
    content[0] ^= 1
    data.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged and is not used"):
        fit()


SERVE = """
import sys
import numpy as np
import tensorflow as tf

folder = sys.argv[1]
asked = [tf.constant(ids) for ids in np.load(f"{folder}/asked.npz").values()]
loaded, again = (tf.saved_model.load(f"{folder}/exported") for _ in range(2))
answers = [loaded.serve(asked).numpy()]
del loaded
answers.append(again.serve(asked).numpy())
with tf.compat.v1.Session(graph=tf.Graph()) as session:
    exported = tf.compat.v1.saved_model.load(session, ["serve"], f"{folder}/exported")
    signature = exported.signature_def["serving_default"]
    inputs = [signature.inputs[name].name for name in sorted(signature.inputs)]
    (output,) = signature.outputs.values()
    fed = dict(zip(inputs, [np.asarray(ids) for ids in asked]))
    answers += [session.run(output.name, fed) for _ in range(2)]
module = tf.saved_model.load(f"{folder}/module")
answers.append(module.rows(asked[0]).numpy())
assert not any(name.startswith("kerasps") for name in sys.modules)
np.savez(f"{folder}/answers.npz", *answers)
"""


def test_an_exported_model_needs_tensorflow_alone(model, tmp_path):
    train(model, 1)
    model.export(tmp_path / "exported", verbose=False)
    # It is exported anew, with more rows.
    train(model, 2)
    model.export(tmp_path / "exported", verbose=False)

    class Module(tf.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            # As `model.export` of Keras 3.16 lists them.
            self.variables_of_model = [layer.embeddings._value]

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
        def rows(self, ids):
            return self.layer(ids)

    users = model.get_layer("users")
    tf.saved_model.save(Module(users), os.fspath(tmp_path / "module"))
    asked = make_data(3)[0]  # half of these ids have no row
    np.savez(tmp_path / "asked.npz", *asked)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", SERVE, os.fspath(tmp_path)],
        check=True,
        cwd=tmp_path,
        env=environment,
        timeout=600,
    )
    *answers, rows = np.load(tmp_path / "answers.npz").values()
    expected = model.predict(asked, verbose=0)
    assert len(answers) == 4
    for answer in answers:
        np.testing.assert_allclose(answer, expected, rtol=1e-6)
    np.testing.assert_array_equal(
        rows, users.embeddings.find_rows(asked[0].ravel()).reshape(rows.shape)
    )
    assert (tmp_path / "exported" / "saved_model.pb").stat().st_size < 300_000
