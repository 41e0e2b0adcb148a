"""Measures the cost of backups: a training with a table of 1 GB on two ps.

    python benchmarks/backups.py --seconds 240

One training, with a backup every 30 seconds. It compares the first half of each 30 seconds, which
has the backup, with the second, which has none. So other load on the machine affects both alike.
The cost of a backup is the time of the steps that the first half has fewer than the second. Prints
a line per backup, and the share of the throughput that one backup a minute costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
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
    """Return the megabytes of memory that a process uses, and its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return [int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")]


class Clock(keras.callbacks.ProgbarLogger):
    """Notes when how many steps were counted. A progress bar costs nothing: it is told of less."""

    def __init__(self):
        super().__init__()
        self.times, self.steps = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.monotonic())
        self.steps.append(batch + 1)

    def steps_at(self, moment):
        return float(np.interp(moment, self.times, self.steps))


class Watch(threading.Thread):
    """Notes when a backup begins to be written, which is when it was copied, and when it ends."""

    def __init__(self, directory):
        super().__init__(daemon=True)
        self.directory, self.is_over = directory, threading.Event()
        self.began, self.ended, self.size = {}, {}, 0

    def run(self):
        while not self.is_over.wait(0.02):
            for path in self.directory.glob("backup-*"):
                seen = self.ended if path.suffix == ".json" else self.began
                if path.suffix in ("", ".json") and path.stem not in seen:
                    seen[path.stem] = time.monotonic()
                    files = [f for f in path.with_suffix("").glob("*") if path.suffix]
                    self.size = max(self.size, sum(f.stat().st_size for f in files))


def fit(model, steps, callbacks):
    creator = kerasps.DatasetCreator(dataset_fn)
    model.fit(creator, steps_per_epoch=steps, verbose=0, callbacks=callbacks)


parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=2**22, help="of 256 bytes; the default is 1 GB")
parser.add_argument("--seconds", type=float, default=240.0, help="of the training, about")
parser.add_argument("--interval", type=float, default=30.0, help="seconds between backups")
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--directory", help="where backups go; default: that of temporary files")
options = parser.parse_args()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with (
    tempfile.TemporaryDirectory(dir=options.directory) as directory,
    kerasps.LocalCluster(num_workers=options.workers, num_ps=2) as cluster,
):
    strategy = kerasps.ParameterServerStrategy(
        cluster.cluster_resolver, kerasps.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        model = make_model()
    fit(model, 100, [])  # what is built is built
    began = time.monotonic()
    fit(model, 500, [])
    steps = int(500 * options.seconds / (time.monotonic() - began))
    clock, watch = Clock(), Watch(Path(directory))
    watch.start()
    backup = kerasps.BackupAndRestore(
        directory, save_freq=False, interval_s=options.interval, delete_checkpoint=False
    )
    fit(model, steps, [clock, backup])
    watch.is_over.set()
    watch.join()
    half, costs = options.interval / 2, []
    for name, moment in watch.began.items():
        # With what is waited for, and copied, before.
        middle, end = moment - 2 + half, moment - 2 + 2 * half
        if name not in watch.ended or end > clock.times[-1]:
            continue
        with_backup = clock.steps_at(middle) - clock.steps_at(middle - half)
        without = clock.steps_at(end) - clock.steps_at(middle)
        costs.append(half * (1 - with_backup / without))
        gaps = [b - a for a, b in itertools.pairwise(clock.times) if moment - 2 < b < moment + 2]
        print(
            f"{name}: written in {watch.ended[name] - moment:.1f} s, longest time without a step "
            f"{max(gaps):.2f} s, {with_backup / half:.0f} steps a second, {without / half:.0f} "
            f"without: costs {costs[-1]:.2f} s",
            flush=True,
        )
    report = {
        "megabytes": round(watch.size / 2**20),
        "seconds of each backup": [round(cost, 2) for cost in costs],
        "share of a minute": round(statistics.median(costs) / 60, 4),
        "ps, MB now and at most": [
            [round(mb) for mb in memory_of(cluster.processes["ps", index].pid)] for index in (0, 1)
        ],
    }
    print("REPORT " + json.dumps(report), flush=True)
