"""Loads what other processes saved, trains on, and saves in every format; run as a process of its
own by test_saving.py.

    saving_across_clusters.py plain_first DIRECTORY     plain Keras; writes
    saving_across_clusters.py two_ps DIRECTORY          2 ps, 2 shards dealt out in turn; reads,
    writes, is killed while saving saving_across_clusters.py three_ps DIRECTORY        3 ps, 5
    contiguous shards; reads, also what was left by the killed one saving_across_clusters.py
    plain_last DIRECTORY      plain Keras; reads

Prints one JSON line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps
from kerasps.saving import checkpoints, keras_files, stored_values
from kerasps.variables.placing import creation
from kerasps.variables.rows import chunks

# A table of 50 kB then goes to files in several chunks.
for module in (chunks, creation, checkpoints, keras_files):
    module.CHUNK_BYTES = 8 << 10

ROLE, DIRECTORY = sys.argv[1], Path(sys.argv[2])
CLUSTERS = {"two_ps": (2, 2, "mod"), "three_ps": (3, 5, "div")}
READS = {
    "plain_first": [],
    "two_ps": ["plain_first"],
    "three_ps": ["two_ps"],
    "plain_last": ["two_ps", "three_ps"],
}
FORMATS = ["weights.h5", "weights.json", "keras", "directory", "manager"]
KILLED = ["weights.h5", "keras", "manager"]
NUM_ROWS = 801  # not a multiple of anything
INPUTS = {
    "id": np.arange(32).reshape(16, 2) * 25,
    "x": np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4),
}


def make_model():
    ids, x = keras.Input((2,), dtype="int32", name="id"), keras.Input((4,), name="x")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(NUM_ROWS, 16)(ids))
    normalized = keras.layers.Normalization(mean=[0.1] * 4, variance=[2.0] * 4)(x)
    y = keras.layers.Concatenate()([embedded, normalized])
    y = keras.layers.BatchNormalization()(keras.layers.Dense(24, activation="tanh")(y))
    model = keras.Model([ids, x], keras.layers.Dense(1)(keras.layers.Dropout(0.2)(y)))
    model.compile(
        keras.optimizers.Adam(0.01, use_ema=True), "mse", metrics=["mae"], steps_per_execution=2
    )
    model.optimizer.build(model.trainable_variables)
    return model


def dataset(context=None):
    y = INPUTS["x"][:, :1] * 2
    return tf.data.Dataset.from_tensor_slices(((INPUTS["id"], INPUTS["x"]), y)).repeat().batch(8)


def train(model):
    if ROLE in CLUSTERS:
        model.fit(kerasps.DatasetCreator(dataset), steps_per_epoch=6, verbose=0)
    else:
        model.fit(dataset(), steps_per_epoch=6, verbose=0)


def state(model):
    """Everything that is saved; Keras saves neither seeds nor what metrics have added up."""
    return [*model.weights, *model.optimizer.variables]


def values(model):
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in state(model)]


def save(model, directory, formats):
    directory.mkdir(exist_ok=True)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    savers = {
        "weights.h5": lambda: model.save_weights(directory / "saved.weights.h5"),
        "weights.json": lambda: model.save_weights(
            directory / "split.weights.json", max_shard_size=1e-4
        ),
        "keras": lambda: model.save(directory / "saved.keras"),
        "directory": lambda: model.save(directory / "unzipped", zipped=False),
        "manager": lambda: tf.train.CheckpointManager(
            checkpoint, os.path.relpath(directory / "managed"), max_to_keep=2
        ).save(),
    }
    for name in formats:
        savers[name]()


def load(directory, name, scope):
    """A model as one of the formats has it."""
    if name in ("keras", "directory"):
        with scope():
            return keras.models.load_model(
                directory / {"keras": "saved.keras", "directory": "unzipped"}[name]
            )
    with scope():
        model = make_model()
    for variable in state(model):
        variable.assign(keras.ops.ones_like(variable) * 7)
    if name in ("weights.h5", "weights.json"):
        model.load_weights(
            directory
            / {"weights.h5": "saved.weights.h5", "weights.json": "split.weights.json"}[name]
        )
        return model
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.restore(
        tf.train.latest_checkpoint(directory / "managed")
    ).expect_partial().assert_existing_objects_matched()
    return model


def differences(model, expected):
    return [v.path for v, e in zip(state(model), expected, strict=True) if not np.array_equal(v, e)]


def read_all(directory, scope, report):
    """Loads every format from `directory`, compares it bit for bit, and returns the last model."""
    expected = list(np.load(directory / "expected.npz").values())
    for name in FORMATS:
        model = load(directory, name, scope)
        report["different"] += [
            f"{directory.name}/{name}: {path}" for path in differences(model, expected)
        ]
    return model


def serve(directory):
    """What an exported model answers."""
    loaded = tf.saved_model.load(os.fspath(directory / "exported"))
    arguments = [tf.constant(INPUTS["id"], tf.int32), tf.constant(INPUTS["x"])]
    return loaded.serve(arguments).numpy()


class Halfway:
    """Brings several saves to their middle, each in a thread of its own, and then kills this
    process.
    """

    def __init__(self, count):
        self._barrier = threading.Barrier(
            count, action=lambda: os.kill(os.getpid(), signal.SIGKILL)
        )
        self._state = threading.local()

    def wait(self):
        self._barrier.wait(600)

    def stops(self, function):
        """A function whose third call in a thread goes no further, but for threads that called
        `pass_by`.
        """

        def stopped(*args):
            self._state.calls = getattr(self._state, "calls", 0) + 1
            if self._state.calls == 3:
                self.wait()
            return function(*args)

        return stopped

    def pass_by(self):
        self._state.calls = 3


def be_killed_while_saving(model, directory, report):
    """Saves, trains, and is killed half-way through saving again."""
    backup = keras.callbacks.BackupAndRestore(directory / "backup")
    backup.set_model(model)
    save(model, directory, KILLED)
    backup.on_epoch_end(0)
    np.savez(directory / "expected.npz", *values(model))
    train(model)
    np.savez(directory / "expected_of_backup.npz", *values(model))
    print_report(report)
    halfway = Halfway(
        len(KILLED) + num_ps
    )  # each ps writes its part of a checkpoint, and the backup is one more
    for module in (keras_files, stored_values):
        module.read_rows = halfway.stops(module.read_rows)
    save_weights = model.save_weights

    def stop_behind_the_weights(*args, **kwargs):
        save_weights(*args, **kwargs)
        halfway.wait()  # the file that says which epoch they are of is not written

    def back_up():
        halfway.pass_by()
        backup.set_model(types.SimpleNamespace(save_weights=stop_behind_the_weights))
        backup.on_epoch_end(1)

    with ThreadPoolExecutor() as pool:
        saves = [pool.submit(save, model, directory, [name]) for name in KILLED]
        for future in [*saves, pool.submit(back_up)]:
            future.result()


def look_at_what_is_left(directory, scope, report):
    """What the process left that was killed while saving, and what the next save makes of it."""
    expected = list(np.load(directory / "expected.npz").values())
    report["unfinished"] = sorted(
        path.name for path in [*directory.glob(".partial.*"), *directory.glob("managed/*_temp")]
    )
    for name in KILLED:
        report["different"] += [
            f"killed/{name}: {path}" for path in differences(load(directory, name, scope), expected)
        ]
    with scope():
        model = make_model()
    backup = keras.callbacks.BackupAndRestore(directory / "backup")
    backup.set_model(model)
    report["epoch_in_json"] = json.loads(
        (directory / "backup" / "training_metadata.json").read_text()
    )["epoch"]
    backup.on_train_begin()
    report["epoch_restored"] = model._initial_epoch
    expected = list(np.load(directory / "expected_of_backup.npz").values())
    report["different"] += [f"killed/backup: {path}" for path in differences(model, expected)]
    save(model, directory, KILLED)
    report["unfinished_after_saving"] = sorted(path.name for path in directory.glob(".partial.*"))


def write_checkpoints(model, report):
    """Writes and reads a checkpoint later, while training could go on, and one where no ps sees the
    directory.
    """
    os.chdir(DIRECTORY)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    expected = values(model)
    later = tf.train.CheckpointOptions(enable_async=True)
    # The second path is another directory for each process, and absolute.
    for path, options in (
        (DIRECTORY / "later/written", later),
        ("/proc/self/cwd/not_shared/written", None),
    ):
        checkpoint.write(path, options=options)
        checkpoint.sync()
        for variable in state(model):
            variable.assign(keras.ops.ones_like(variable) * 7)
        checkpoint.read(path).expect_partial()
        report["different"] += [f"{path}: {variable}" for variable in differences(model, expected)]
    report["not_shared"] = sorted(path.suffix for path in (DIRECTORY / "not_shared").iterdir())


def refuse_another_size(model, directory, scope, report):
    """What is said when a file has a larger table than the model."""
    global NUM_ROWS
    NUM_ROWS += 1
    with scope():
        larger = make_model()
    NUM_ROWS -= 1
    checkpoint = tf.train.Checkpoint(model=larger, optimizer=larger.optimizer)
    report["refused"] = {}
    for name, read in (
        ("weights", lambda: larger.load_weights(directory / "saved.weights.h5")),
        (
            "checkpoint",
            lambda: checkpoint.restore(
                tf.train.latest_checkpoint(directory / "managed")
            ).expect_partial(),
        ),
    ):
        try:
            read()
        except ValueError as error:
            report["refused"][name] = str(error)


def lose_a_ps(cluster, model, report):
    """Saves when a ps is gone."""
    path = DIRECTORY / "three_ps" / "saved.weights.h5"
    before = path.read_bytes()
    cluster.kill("ps", 1)
    try:
        model.save_weights(path)
    except kerasps.PSLostError as error:
        report["lost"] = str(error)
    report["unchanged"] = path.read_bytes() == before and not list(path.parent.glob(".partial.*"))


def run(scope):
    report = {"different": []}
    if ROLE == "three_ps":
        look_at_what_is_left(DIRECTORY / "killed", scope, report)
    for role in READS[ROLE]:
        model = read_all(DIRECTORY / role, scope, report)
    if not READS[ROLE]:
        model = make_model()
    report["iterations"] = [int(model.optimizer.iterations)]
    if ROLE == "plain_last":
        report["answers"] = {
            role: float(
                np.abs(serve(DIRECTORY / role) - np.load(DIRECTORY / role / "answer.npy")).max()
            )
            for role in ("two_ps", "three_ps")
        }
        return model, report
    train(model)
    report["iterations"].append(int(model.optimizer.iterations))
    directory = DIRECTORY / ROLE
    save(model, directory, FORMATS)
    model.export(directory / "exported", verbose=False)
    np.savez(directory / "expected.npz", *values(model))
    np.save(directory / "answer.npy", model.predict([INPUTS["id"], INPUTS["x"]], verbose=0))
    if ROLE in CLUSTERS:
        report["num_shards"] = len(model.layers[1].embeddings.shards)
    if ROLE == "two_ps":
        refuse_another_size(model, directory, scope, report)
        write_checkpoints(model, report)
    return model, report


if ROLE in CLUSTERS:
    num_ps, num_shards, layout = CLUSTERS[ROLE]
    with kerasps.LocalCluster(num_workers=1, num_ps=num_ps) as cluster:
        partitioner = kerasps.FixedShardsPartitioner(num_shards, min_bytes=8 << 10)
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, partitioner, shard_layout=layout, table_min_bytes=0
        )
        trained, report = run(strategy.scope)
        if ROLE == "two_ps":
            (DIRECTORY / "killed").mkdir()
            be_killed_while_saving(trained, DIRECTORY / "killed", report)
        else:
            lose_a_ps(cluster, trained, report)
            print_report(report)
else:
    print_report(run(contextlib.nullcontext)[1])
