"""Updatable SavedModels: answers of one version, the last good state, and TensorFlow's loader."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.saving.model_deltas import ModelDeltas
from support.versioned import IDS, question, set_version, versioned_model, versions_of


@pytest.fixture(scope="module")
def model():
    model = versioned_model()
    model({name: tf.constant(value) for name, value in question().items()})
    return model


@pytest.fixture
def paths(model, tmp_path):
    set_version(model, 1)
    model.export(tmp_path / "exported", updatable=True, verbose=False)
    return tmp_path / "exported", tmp_path / "deltas"


def deltas_of(model, directory, dtype=None):
    return ModelDeltas(model, directory, 2, dtype)


def write(deltas, version, first=0):
    set_version(deltas.model, version, first)
    deltas.write(deltas.read())


def test_it_serves_what_was_exported_and_then_each_version(model, paths):
    with kerasps.serving.Follower(*paths) as follower:
        assert (follower.version, follower.age_s, follower.problem) == (None, None, None)
        assert versions_of(follower.predict(question())) == [1]
        deltas = deltas_of(model, paths[1])
        for version in (2, 3, 4):
            write(deltas, version, first=version * 10)
            follower.update()
            assert versions_of(follower(question(40))) == [version]
            # A removed id has its first row again.
            gone = {**question(), "ids": np.full((1, 200), version * 10 - 1)}
            assert versions_of(follower(gone)) == [0, version]
        assert follower.version == 3
        assert 0 <= follower.age_s < 3600
        # Places that were given up are used again.
        table = tf.saved_model.load(paths[0]).tables[0]
        assert int(table.rows.shape[0] or IDS) == IDS


def test_no_answer_is_of_mixed_versions(model, paths):
    deltas, asked = deltas_of(model, paths[1]), question(100)
    write(deltas, 1)
    is_over, found, errors = threading.Event(), [], []
    with kerasps.serving.Follower(*paths, every_seconds=3600) as follower:

        def ask():
            while not is_over.is_set():
                try:
                    found.append(versions_of(follower(asked)))
                except Exception as exc:
                    errors.append(exc)
                    return

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for version in range(2, 40):
            write(deltas, version, first=version % 3 * 50)
            follower.update()
            assert versions_of(follower(asked)) == [version]
        is_over.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert [versions for versions in found if len(versions) != 1] == []
    assert len({versions[0] for versions in found}) > 10
    assert follower.problem is None


def test_tensorflow_serves_it_without_kerasps(model, paths):
    script = textwrap.dedent(
        f"""
        import numpy as np, sys, tensorflow as tf
        loaded = tf.saved_model.load({str(paths[0])!r})
        serve, apply = loaded.signatures["serve"], loaded.signatures["apply_delta"]
        asked = dict(ids=tf.constant([[1, 2, 9999]], tf.int64),
                     places=tf.constant([[0, 1]], tf.int64), one=tf.ones([1, 1]))
        print(np.unique(serve(**asked)["output_0"]))
        def rows(n): return tf.fill([n, 4], 5.0)
        def ids(*n): return tf.constant(n, tf.int64)
        delta = dict(version=tf.constant(8, tf.int64), is_base=tf.constant(True),
            items_embeddings_ids=ids(1, 2, 9999), items_embeddings_rows=rows(3),
            items_embeddings_removed=ids(), items_embeddings_is_whole=tf.constant(True),
            fixed_embeddings_ids=ids(0, 1), fixed_embeddings_rows=rows(2),
            weight_kernel=tf.fill([1, 4], 5.0), weight_kernel_is_given=tf.constant(True))
        apply(**delta)
        print(np.unique(serve(**asked)["output_0"]), int(loaded.signatures["state"]()["version"]))
        try:
            apply(**{{**delta, "is_base": tf.constant(False)}})
        except tf.errors.InvalidArgumentError as exc:
            print("does not follow" in str(exc))
        try:
            apply(**{{**delta, "fixed_embeddings_ids": ids(0, 300)}})
        except tf.errors.InvalidArgumentError as exc:
            print("no rows of these numbers" in str(exc))
        apply(**{{**delta, "is_base": tf.constant(False), "version": tf.constant(9, tf.int64),
                 "items_embeddings_is_whole": tf.constant(False),
                 "items_embeddings_ids": ids(1), "items_embeddings_rows": rows(1),
                 "items_embeddings_removed": ids(2, 77)}})
        print(np.unique(serve(**asked)["output_0"]), "kerasps" in sys.modules)
        """
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    expected = ["[0. 1.]", "[5.] 8", "True", "True", "[0. 5.] False"]
    assert run.stdout.splitlines() == expected, run.stderr


def test_rows_of_half_their_bytes(model, paths):
    deltas = deltas_of(model, paths[1], "bfloat16")
    write(deltas, 257)  # an odd number that 8 bits do not hold
    with kerasps.serving.Follower(*paths) as follower:
        assert versions_of(follower(question())) == [256, 257]  # fixed ones of this size are whole


def test_after_a_wrong_file_it_keeps_the_last_good_state(model, paths):
    deltas = deltas_of(model, paths[1])
    write(deltas, 1)
    write(deltas, 2)
    file = paths[1] / "000001-000001-000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    with pytest.warns(UserWarning, match="A follower keeps version 1") as warned:
        follower = kerasps.serving.Follower(*paths, every_seconds=3600)
    with follower:
        assert len(warned) == 1
        for _ in range(3):  # without another warning
            assert follower.update() == 0
            assert str(file) in follower.problem
            assert versions_of(follower(question())) == [1]
        file.write_bytes(content)
        assert follower.update() == 1
        assert (follower.version, follower.problem) == (2, None)
        assert versions_of(follower(question())) == [2]


def test_deltas_of_another_model_are_refused(paths, tmp_path):
    other = versioned_model("others")
    other({name: tf.constant(value) for name, value in question().items()})
    deltas = deltas_of(other, paths[1])
    deltas.write(deltas.read())
    with pytest.warns(UserWarning, match=r"of another model.*items/embeddings, others/embeddings"):
        follower = kerasps.serving.Follower(*paths)
    with follower:
        assert versions_of(follower(question())) == [1]


def test_a_saved_model_that_is_not_updatable_is_refused(model, tmp_path):
    model.export(tmp_path / "plain", verbose=False)
    with pytest.raises(kerasps.InputError, match=r"Expected: one of `model\.export"):
        kerasps.serving.Follower(tmp_path / "plain", tmp_path)


def test_only_saved_models_are_updatable(model, tmp_path):
    with pytest.raises(kerasps.InputError, match="Received: format='onnx'"):
        model.export(tmp_path / "model", format="onnx", updatable=True)


def test_fit_writes_deltas_and_a_second_one_goes_on(tmp_path):
    ids = keras.Input((2,), dtype="int64")
    table = kerasps.layers.DynamicEmbedding(4, max_rows=1_000, name="table")
    flat = keras.layers.Flatten()(table(ids))
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(flat))
    model.compile("adagrad", "mse")
    export = kerasps.DeltaExport(tmp_path, every_steps=2, keep=1)
    for first in (0, 50):
        x = np.arange(first, first + 100).reshape(-1, 2)
        model.fit(x, np.ones(50), batch_size=5, verbose=0, callbacks=[export])
    table.evict([3])
    model.fit(x, np.ones(50), batch_size=50, verbose=0, callbacks=[export])
    state = kerasps.serving.State()
    deltas = list(kerasps.serving.DeltaReader(tmp_path).new())
    for delta in deltas:
        state.apply(delta)
    assert [delta.is_base for delta in deltas] == [True, *[False] * (len(deltas) - 1)]
    assert len(deltas) > 12
    assert deltas[-1].step == 21
    ids, rows = state.tables[table.embeddings.path]
    assert ids.tolist() == [*range(3), *range(4, 150)]
    np.testing.assert_array_equal(rows, table.rows(ids))
    for name, value in zip(("kernel", "bias"), model.get_layer("out").get_weights(), strict=True):
        np.testing.assert_array_equal(state.weights[f"out/{name}"], value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, kerasps.InputError, "every_seconds=None and every_steps=None"),
        ({"every_seconds": 1, "every_steps": 1}, kerasps.InputError, "Give one like"),
        ({"every_seconds": 0}, ValueError, "`every_seconds` is not a time"),
        ({"every_steps": 0.5}, TypeError, "`every_steps` is not a number of steps"),
        ({"every_steps": 1, "dtype": "float16"}, ValueError, "Expected: 'bfloat16'"),
        ({"every_steps": 1, "keep": 0}, ValueError, "`keep` is not a number of chains"),
    ],
)
def test_wrong_arguments_of_an_export_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        kerasps.DeltaExport("deltas", **arguments)


def test_a_delta_that_cannot_be_written_does_not_end_fit(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="out")])
    model.compile("sgd", "mse")
    export = kerasps.DeltaExport(tmp_path / "deltas", every_steps=1)
    model.fit(np.ones((4, 1)), np.ones(4), verbose=0, callbacks=[export])
    before = list(kerasps.serving.DeltaReader(tmp_path / "deltas").new())
    (tmp_path / "deltas").rename(tmp_path / "moved")
    (tmp_path / "deltas").write_text("a file")
    with pytest.warns(UserWarning, match="A delta was not written"):
        model.fit(np.ones((4, 1)), np.ones(4), verbose=0, callbacks=[export])
    (tmp_path / "deltas").unlink()
    (tmp_path / "moved").rename(tmp_path / "deltas")
    model.fit(np.ones((4, 1)), np.ones(4), verbose=0, callbacks=[export])
    after = list(kerasps.serving.DeltaReader(tmp_path / "deltas").new())
    assert len(after) > len(before)
    state = kerasps.serving.State()
    for delta in after:
        state.apply(delta)
    np.testing.assert_array_equal(state.weights[model.weights[1].path], model.get_weights()[1])
