"""What backups cost a training: a table of 1 GB over two ps, one backup in each stretch.

    python benchmarks/backups.py --rounds 3 --seconds 60

Trains the same number of steps again and again, in one process, in turn with one backup and with
none, and compares the times. So what else the machine does falls on both alike. Prints a line per
stretch, and what share of the throughput is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import kerasps

WIDTH, BATCH_SIZE, NUM_IDS = 64, 128, 26


def dataset_fn(context):
    chance = np.random.default_rng(context.input_pipeline_id)
    ids = chance.integers(0, options.rows, (4096, NUM_IDS)).astype("int64")
    y = chance.normal(size=(4096, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((ids, y)).repeat().batch(BATCH_SIZE)


def make_model():
    model = keras.Sequential(
        [
            keras.Input((NUM_IDS,), dtype="int64"),
            keras.layers.Embedding(options.rows, WIDTH, embeddings_initializer="zeros"),
            keras.layers.Flatten(),
            keras.layers.Dense(8),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=10)
    return model


def memory_of(pid):
    """The megabytes that a process has, and the most that it has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return [int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")]


def stretch(model, steps, interval):
    """Trains; returns the seconds that it took, and the bytes and number of its backups."""
    directory = tempfile.mkdtemp(dir=options.directory)
    callbacks = []
    if interval is not None:
        callbacks = [
            kerasps.BackupAndRestore(
                directory, save_freq=False, interval_s=interval, delete_checkpoint=False
            )
        ]
    began = time.monotonic()
    model.fit(
        kerasps.DatasetCreator(dataset_fn), steps_per_epoch=steps, verbose=0, callbacks=callbacks
    )
    seconds = time.monotonic() - began
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    size, manifests = sum(path.stat().st_size for path in files), [*Path(directory).glob("*.json")]
    shutil.rmtree(directory)
    return seconds, size, max((int(p.stem.partition("-")[2]) for p in manifests), default=0)


parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=2**22, help="of 256 bytes; the default is 1 GB")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--seconds", type=float, default=60.0, help="of a stretch, about")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--directory", help="where backups go; default: that of temporary files")
options = parser.parse_args()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with kerasps.LocalCluster(num_workers=options.workers, num_ps=2) as cluster:
    strategy = kerasps.ParameterServerStrategy(
        cluster.cluster_resolver, kerasps.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        model = make_model()
    stretch(model, 100, None)  # what is built is built
    seconds, *_ = stretch(model, 500, None)
    steps = int(500 * options.seconds / seconds)
    ps = [cluster.processes["ps", index].pid for index in range(2)]
    ratios = []
    for number in range(options.rounds):
        # Once with the backup first, once last.
        times = {}
        for backed_up in [(False, True), (True, False)][number % 2]:
            # One in the middle; a second one would come at the very end.
            interval = options.seconds * 0.55 if backed_up else None
            times[backed_up], size, backups = stretch(model, steps, interval)
            print(
                f"{steps} steps in {times[backed_up]:.2f} s, {backups} backups of "
                f"{size / 2**20:.0f} MB; ps, MB now and at most: "
                f"{[[round(mb) for mb in memory_of(pid)] for pid in ps]}",
                flush=True,
            )
        ratios.append(1 - times[False] / times[True])
    print(
        "REPORT "
        + json.dumps(
            {
                "lost": [round(ratio, 4) for ratio in ratios],
                "median": round(statistics.median(ratios), 4),
                "steps": steps,
            }
        ),
        flush=True,
    )
