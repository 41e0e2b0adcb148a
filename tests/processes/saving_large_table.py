"""Saves and loads a table over 2 ps in every format; run as a process of its own by
test_saving_large.py.

Prints one JSON line: by how many bytes the memory of the coordinator and of a ps grew at most in
each, the seconds, and what came back wrong. With a number of rows (of 256 bytes) as argument it
measures another size: `saving_large_table.py 4000000` is 1 GB.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps

NUM_ROWS, WIDTH = int(sys.argv[1]), 64


def status(pid, field):
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(f"{field}:")
    )
    return int(line.split()[1]) * 1024


def make_model(num_rows):
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(num_rows, WIDTH),
            keras.layers.Flatten(),
        ]
    )
    model.compile(keras.optimizers.SGD(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


class Measured:
    """What each step took of the coordinator and of a ps, and how long."""

    def __init__(self, cluster):
        self._pids = {
            "coordinator": [os.getpid()],
            "ps": [cluster.processes["ps", index].pid for index in range(2)],
        }
        self.grew_by = {job: {} for job in self._pids}
        self.seconds = {}

    def __call__(self, name, function):
        before = {}
        for pid in (pid for pids in self._pids.values() for pid in pids):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak starts here
            before[pid] = status(pid, "RssAnon")
        started = time.monotonic()
        function()
        self.seconds[name] = time.monotonic() - started
        for job, pids in self._pids.items():
            # Without the pages of files, which a system with little memory drops and reads again.
            self.grew_by[job][name] = max(
                status(pid, "VmHWM") - status(pid, "RssFile") - before[pid] for pid in pids
            )


def save_and_load(model, directory, measured):
    checkpoint = tf.train.Checkpoint(model=model)
    through_coordinator = tf.train.CheckpointOptions(experimental_io_device="/job:localhost")
    table = model.layers[0].embeddings
    some = np.linspace(0, table.shape[0] - 1, 1000).astype("int64")
    expected = table.take(some).numpy()
    wrong = []

    def clear():
        for shard in table.shards:
            with tf.device(shard.device):
                shard.assign(tf.zeros(shard.shape))

    for name, save, load in (
        ("weights.h5", model.save_weights, model.load_weights),
        ("keras", model.save, model.load_weights),
        ("checkpoint", checkpoint.write, checkpoint.read),
        (
            "checkpoint through the coordinator",
            lambda path: checkpoint.write(path, options=through_coordinator),
            lambda path: checkpoint.read(path, options=through_coordinator),
        ),
    ):
        suffix = {"weights.h5": ".weights.h5", "keras": ".keras"}.get(name, "")
        path = f"{directory}/saved{suffix}"
        measured(f"save {name}", lambda save=save, path=path: save(path))
        clear()
        measured(f"load {name}", lambda load=load, path=path: load(path))
        if not np.array_equal(table.take(some), expected):
            wrong.append(name)
    measured("export", lambda: model.export(f"{directory}/exported", verbose=False))
    return wrong


with (
    kerasps.LocalCluster(num_workers=1, num_ps=2) as cluster,
    tempfile.TemporaryDirectory() as directory,
):
    strategy = kerasps.ParameterServerStrategy(
        cluster.cluster_resolver, kerasps.FixedShardsPartitioner(2, min_bytes=0)
    )
    with strategy.scope():
        small = make_model(1000)
        model = make_model(NUM_ROWS)
    # What Keras, TensorFlow and h5py load with the first file is not the table's.
    save_and_load(small, directory, Measured(cluster))
    large = f"{directory}/large"
    Path(large).mkdir()
    measured = Measured(cluster)
    wrong = save_and_load(model, large, measured)
    report = {
        "table_bytes": NUM_ROWS * WIDTH * 4,
        "grew_by": measured.grew_by,
        "seconds": measured.seconds,
        "wrong": wrong,
    }
print_report(report)
