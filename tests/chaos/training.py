"""A training of which every result is known, whatever dies; run by chaos.py under `kerasps launch`.

    python training.py FOLDER OPTIMIZER

It goes on until the file `enough` is in the folder, and then to the end of its pass. What it adds
up to is known in advance. With SGD, a learning rate of 1 and gradients of 1, minus the dense weight
is the number of its updates, and minus a row of the table how often its id was seen. With Adam and
gradients of 1, the slots follow from the number of updates alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import kerasps

NUM_IDS, BATCH, STEPS = 2400, 4, 600


class Counting(keras.Model):
    """A dense weight, a table with a row for each id, and how often each id was seen."""

    def __init__(self):
        super().__init__()
        self.dense = self.add_weight(shape=(), initializer="zeros", name="dense")
        self.table = keras.layers.Embedding(NUM_IDS, 1, embeddings_initializer="zeros")
        self.table.build(())
        self.seen = self.add_weight(
            shape=(NUM_IDS,), initializer="zeros", trainable=False, name="seen"
        )
        self.built = True

    def train_step(self, ids):
        with tf.GradientTape() as tape:
            loss = -self.dense - tf.reduce_sum(self.table(ids))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        ones = tf.ones_like(ids, tf.float32)
        self.seen.assign_add(tf.math.unsorted_segment_sum(ones, ids, NUM_IDS))
        # A step takes a millisecond or two.
        work = tf.reduce_sum(tf.random.normal((120, 120)) @ tf.random.normal((120, 120)))
        return {"batches": 1.0 + 0.0 * work}


class Batches(keras.callbacks.Callback):
    """Sees to the end, and keeps what is not as it should be at the end of a pass."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None):
        passes = epoch + 1
        model, steps = self.model, passes * STEPS
        found = {
            "iterations": int(model.optimizer.iterations) - steps,
            "seen": float(np.abs(model.seen.numpy() - passes).max()),
            "batches": float(logs["batches"]) - 1.0,
            **slots(model, steps, passes),
        }
        wrong = {name: value for name, value in found.items() if abs(value) > 1e-4}
        record = {"epoch": epoch, "pid": os.getpid(), "wrong": wrong}
        with (self.folder / "passes").open("a") as passes_file:
            passes_file.write(json.dumps(record) + "\n")
        model.stop_training = (self.folder / "enough").exists()


def slots(model, steps, passes):
    """How far each weight, and each slot of an optimizer, is from what it must be."""
    dense, table = float(model.dense.numpy()), model.table.embeddings.numpy()
    if isinstance(model.optimizer, keras.optimizers.SGD):
        return {"dense": dense - steps, "table": float(np.abs(table - passes).max())}
    optimizer = model.optimizer
    found = {}
    for variable in optimizer.variables:
        path = variable.path
        if "momentum" in path or "velocity" in path:
            beta = optimizer.beta_1 if "momentum" in path else optimizer.beta_2
            sign = -1.0 if "momentum" in path else 1.0
            times = passes if "embeddings" in path else steps
            expected = sign * (1.0 - beta**times)
            found[path] = float(np.abs(variable.numpy() - expected).max())
    assert len(found) == 4, found
    return found


def main():
    folder, name = Path(sys.argv[1]), sys.argv[2]
    shards = kerasps.FixedShardsPartitioner(2, min_bytes=1024)
    strategy = kerasps.ParameterServerStrategy(variable_partitioner=shards, table_min_bytes=0)
    with strategy.scope():
        model = Counting()
        optimizer = {"sgd": keras.optimizers.SGD(1.0), "adam": keras.optimizers.Adam(0.001)}[name]
        model.compile(optimizer, steps_per_execution=5)
    data = tf.data.Dataset.range(NUM_IDS).map(lambda i: tf.cast(i, tf.int32))
    data = data.shuffle(NUM_IDS, seed=1).batch(BATCH)
    model.fit(
        data,
        epochs=100_000,
        verbose=0,
        callbacks=[keras.callbacks.BackupAndRestore(str(folder / "backup")), Batches(folder)],
    )
    (folder / "done").write_text(str(os.getpid()))


if __name__ == "__main__":
    main()
