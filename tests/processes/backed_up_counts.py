"""Trains with two workers and `BackupAndRestore`, and is ended, from outside, while it does; run as
a process of its own by test_backups.py.

With a gradient of 1 and a learning rate of 1, a weight is minus the number of its updates, and a
row of the table minus the number of times that its example was trained on. With `--dynamic` the
table has no vocabulary, and with a momentum of 1 these are the velocities, and weights add them up.
With `--delta` backups are deltas.
Whoever starts this script again with the same directory goes on. Prints one JSON line in the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from support.spread import spread
from support.unit_gradients import compiled_unit_model, logs_of

NUM_EXAMPLES, BATCH_SIZE, EPOCHS = 4000, 4, 2
STEPS = NUM_EXAMPLES // BATCH_SIZE
IDS = np.arange(NUM_EXAMPLES, dtype="int32")[:, None]


def values_of(variable):
    value = variable.numpy()
    return np.asarray(getattr(value, "rows", value)).ravel()


def problems(model, history):
    """What is wrong in the end."""
    found = []
    iterations = int(model.optimizer.iterations.numpy())
    if options.dynamic:
        slots = model.optimizer.variables[2:]
        table, *weights = [values_of(v) for v in slots]
        rows, *sums = [values_of(v) for v in model.trainable_variables]
        if len(rows) != NUM_EXAMPLES or np.any(rows != -EPOCHS * (EPOCHS + 1) / 2):
            found.append(f"{len(rows)} rows, of which some are not the sum of {EPOCHS} velocities")
        found += [f"{w}" for w in sums if np.any(w != -iterations * (iterations + 1) / 2)]
    else:
        table, *weights = [values_of(v) for v in model.trainable_variables]
    if iterations != EPOCHS * STEPS:
        found.append(f"{iterations} iterations, not {EPOCHS * STEPS}")
    found += [f"weights {w} after {iterations}" for w in weights if np.any(w != -iterations)]
    wrong = np.flatnonzero(table != -EPOCHS)
    if len(wrong):
        found.append(f"rows {wrong[:9].tolist()} were trained {-table[wrong][:9]} times")
    for name, value in logs_of(IDS, BATCH_SIZE).items():
        if history[name][-1] != value:
            found.append(f"{name}: {history[name]}, not {value}")
    return found


parser = argparse.ArgumentParser()
parser.add_argument("--directory", type=Path, required=True)
parser.add_argument("--interval", type=float, default=0.05)
parser.add_argument("--dynamic", action="store_true")
parser.add_argument("--delta", action="store_true")
options = parser.parse_args()
table = {}
if options.dynamic:

    def make_table(num_rows, width, **options):
        return kerasps.layers.DynamicEmbedding(width, **options)

    table["make_table"] = make_table
spread()
with local_strategy(partitioner=kerasps.FixedShardsPartitioner(2), table_min_bytes=0) as (
    cluster,
    strategy,
):
    model = compiled_unit_model(
        strategy,
        NUM_EXAMPLES,
        lambda: keras.optimizers.SGD(1.0, momentum=float(options.dynamic)),
        7,
        **table,
    )
    data = tf.data.Dataset.from_tensor_slices((IDS, IDS)).shuffle(NUM_EXAMPLES).batch(BATCH_SIZE)
    began = []
    begin = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: began.append(int(model.optimizer.iterations.numpy()))
    )
    backup = kerasps.BackupAndRestore(
        options.directory / "counts", interval_s=options.interval, delta=options.delta
    )
    print(f"PS {cluster.processes['ps', 1].pid}", flush=True)
    print("TRAINING counts", flush=True)
    try:
        history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[backup, begin]).history
    finally:
        print(f"began after {began[:1]} updates", flush=True)
    print("DONE counts", flush=True)
    print_report({"problems": problems(model, history)})
