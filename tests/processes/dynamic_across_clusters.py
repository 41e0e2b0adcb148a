"""Loads tables without a vocabulary that a process with another number of ps saved, trains on, and
saves them; run by test_dynamic_across_clusters.py. Without ps, it loads and saves in one process.

    dynamic_across_clusters.py NUM_PS DIRECTORY [DIRECTORY OF ANOTHER PROCESS]

Prints one JSON line.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from kerasps.dynamic.tables import row_access
from support.any_ids import differences, make_data, make_model, nearly, state_of, train

# Tables of some rows then have several pieces.
row_access.CHUNK_BYTES = 512

NUM_PS, DIRECTORY = int(sys.argv[1]), Path(sys.argv[2])
EARLIER = Path(sys.argv[3]) if len(sys.argv) > 3 else None
FORMS = ["a.weights.h5", "a.keras", "checkpoint"]


def checkpoint_of(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def save(model, directory):
    directory.mkdir(exist_ok=True)
    model.save_weights(directory / "a.weights.h5")
    model.save(directory / "a.keras")
    checkpoint_of(model).write(directory / "checkpoint")


def load(model, directory, form):
    if form == "checkpoint":
        checkpoint_of(model).read(directory / form).assert_consumed()
    else:
        model.load_weights(directory / form)


def content_of(directory):
    """Returns all arrays in the files of a directory, by the file and the place in it."""
    found = {}
    with h5py.File(directory / "a.weights.h5") as file:
        file.visititems(
            lambda name, entry: (
                found.update({f"h5/{name}": entry[()]}) if isinstance(entry, h5py.Dataset) else None
            )
        )
    reader = tf.train.load_checkpoint(directory / "checkpoint")
    for name, _ in tf.train.list_variables(directory / "checkpoint"):
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH":
            found[f"checkpoint/{name}"] = reader.get_tensor(name)
    return found


class Stop(Exception):
    """Ends a training."""


class EndAfter(keras.callbacks.Callback):
    """Ends a training after some executions: a ps dies if there are several, else it is stopped."""

    def __init__(self, cluster, num_executions):
        super().__init__()
        self.cluster, self.left = cluster, num_executions

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            if NUM_PS > 1:
                self.cluster.kill("ps", 1)
            else:
                raise Stop


def fit(model, directory, *callbacks):
    backups = keras.callbacks.BackupAndRestore(
        directory / "backups", save_freq=2, delete_checkpoint=False
    )
    inputs, targets = make_data(3)
    model.fit(
        inputs,
        targets,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[backups, *callbacks],
    )


def load_and_save(model):
    """Loads what the earlier process saved, and saves it again; says what differs."""
    expected = dict(np.load(EARLIER / "expected.npz"))
    for form in [*FORMS, "backups"]:
        train(model, 2)
        taken = kerasps.warm_start(model, EARLIER / form)
        report["taken"] += [each.rows for each in taken.tables.values()]
        if form != "backups":  # of a training that went on
            report["taken_wrong"] += [
                f"{form}: {name}"
                for index, name in enumerate(("users", "items"))
                if not np.array_equal(
                    model.get_layer(name).rows(expected[f"{index}/ids"]), expected[f"{index}"]
                )
            ]
    for form in FORMS:
        train(model, 2)
        load(model, EARLIER, form)
        report["different"] += [f"{form}: {k}" for k in differences(state_of(model), expected)]
    save(model, DIRECTORY / "again")
    first, again = content_of(EARLIER), content_of(DIRECTORY / "again")
    report["content"] = sorted(first.keys() ^ again.keys()) + [
        key for key in first if not np.array_equal(first[key], again[key])
    ]


report = {"different": [], "trained_apart": [], "content": [], "resumed_apart": []}
report |= {"taken": [], "taken_wrong": []}
if not NUM_PS:
    load_and_save(make_model(names=("users", "items"), max_rows=200))
    print_report(report)
    sys.exit()
with local_strategy(num_workers=1, num_ps=NUM_PS) as (cluster, strategy):
    with strategy.scope():
        model = make_model(names=("users", "items"))
    if EARLIER is None:
        train(model, 1)
    else:
        load_and_save(model)
        train(model, 2)
        report["trained_apart"] = nearly(state_of(model), dict(np.load(EARLIER / "trained.npz")))
        fit(model, EARLIER)
        report["resumed_apart"] = nearly(state_of(model), dict(np.load(EARLIER / "through.npz")))
    save(model, DIRECTORY)
    np.savez(DIRECTORY / "expected.npz", **state_of(model))
    train(model, 2)
    np.savez(DIRECTORY / "trained.npz", **state_of(model))
    load(model, DIRECTORY, "checkpoint")
    fit(model, DIRECTORY / "other")
    np.savez(DIRECTORY / "through.npz", **state_of(model))
    load(model, DIRECTORY, "checkpoint")
    report["num_rows"] = [layer.num_rows for layer in model.layers if hasattr(layer, "num_rows")]
    with contextlib.suppress(Stop, kerasps.PSLostError):
        fit(model, DIRECTORY, EndAfter(cluster, 4))  # of six executions
        raise AssertionError("the training did not end")
    if NUM_PS > 1:
        before = (DIRECTORY / "a.weights.h5").read_bytes()
        try:
            model.save_weights(DIRECTORY / "a.weights.h5")
        except kerasps.PSLostError as error:
            report["lost"] = str(error)
        report["unchanged"] = (DIRECTORY / "a.weights.h5").read_bytes() == before
    print_report(report)
