"""Trains with `BackupAndRestore` and is killed, from outside, while it does; a process of its own,
run by test_backups.py, and by hand:

    python tests/support/killed_and_restarted.py tests/processes/backed_up_training.py \
        /tmp/backups 3 1

Each training runs twice: without a loss, as it should end, and with backups, through any number of
kills. Whoever starts this script again with the same directory goes on. It prints a line when a
training with backups begins, and one JSON line in the end: what differs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps

NUM_EXAMPLES, BATCH_SIZE, NUM_IDS = 2400, 8, 50
STEPS = NUM_EXAMPLES // BATCH_SIZE
EPOCHS = 2
CHANCE = np.random.default_rng(7)
IDS = CHANCE.integers(0, NUM_IDS, (NUM_EXAMPLES, 3)).astype("int32")
X = CHANCE.normal(size=(NUM_EXAMPLES, 4)).astype("float32")
Y = CHANCE.normal(size=(NUM_EXAMPLES, 1)).astype("float32")


class Partitioner:
    """Splits as it is told to at the moment."""

    num_shards = 1

    def __call__(self, shape, dtype):
        if self.num_shards == 1 or len(shape) < 2 or shape[0] != NUM_IDS:
            return [1] * len(shape)
        return [self.num_shards, 1]


PARTITIONER = Partitioner()


def dataset():
    return tf.data.Dataset.from_tensor_slices((((IDS, X)), Y))


def known():
    return {"x": dataset().shuffle(500).batch(BATCH_SIZE)}


def kept_order():
    """With a buffer as long as the data, and an order that stays."""
    shuffled = dataset().shuffle(NUM_EXAMPLES, reshuffle_each_iteration=False)
    return {"x": shuffled.batch(BATCH_SIZE)}


def unknown():
    filtered = dataset().shuffle(500).filter(lambda *_: True)
    return {"x": filtered.batch(BATCH_SIZE)}


def endless():
    return {"x": dataset().shuffle(500).repeat().batch(BATCH_SIZE), "steps_per_epoch": STEPS}


def creator():
    def dataset_fn(context):
        shared = dataset().shard(context.num_input_pipelines, context.input_pipeline_id)
        return shared.shuffle(500, seed=3).repeat().batch(BATCH_SIZE)

    return {"x": kerasps.DatasetCreator(dataset_fn), "steps_per_epoch": STEPS}


def arrays():
    return {"x": [IDS, X], "y": Y, "batch_size": BATCH_SIZE}


def part():
    """One pass in two epochs."""
    return {
        "x": dataset().shuffle(500).repeat(2).batch(BATCH_SIZE),
        "steps_per_epoch": STEPS,
    }


class Batches(keras.utils.PyDataset):
    """Shuffled by Keras, and once more by itself, after each epoch."""

    def __init__(self):
        super().__init__()
        self._order = list(range(STEPS))
        self._random = random.Random(5)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = slice(self._order[index] * BATCH_SIZE, (self._order[index] + 1) * BATCH_SIZE)
        return (IDS[rows], X[rows]), Y[rows]

    def on_epoch_end(self):
        self._random.shuffle(self._order)


def py_dataset():
    return {"x": Batches()}


def generator():
    def batches():
        order = np.random.default_rng(3)
        while True:
            rows = order.integers(0, NUM_EXAMPLES, BATCH_SIZE)
            yield (IDS[rows], X[rows]), Y[rows]

    return {"x": batches(), "steps_per_epoch": STEPS}


class Beginning(keras.callbacks.Callback):
    """Prints with how many updates a training begins."""

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self, "printed"):
            self.printed = True
            iterations = int(self.model.optimizer.iterations.numpy())
            print(f"epoch {epoch}, {iterations} updates", flush=True)


class Listening(keras.callbacks.Callback):
    """Hears of batches, so that each execution returns its result, and checks their numbers."""

    def on_epoch_begin(self, epoch, logs=None):
        self.last = None

    def on_train_batch_end(self, batch, logs=None):
        assert self.last is None or batch > self.last
        self.last = batch


# Data, shards, optimizer, steps per execution, whether somebody listens to batches, `save_freq`.
TRAININGS = {
    "known": (known, 2, keras.optimizers.Adam, 10, False, "epoch"),
    "unknown": (unknown, 1, keras.optimizers.SGD, 1, False, "epoch"),
    "endless": (endless, 2, keras.optimizers.Adam, 10, True, "epoch"),
    "creator": (creator, 1, keras.optimizers.Adam, 1, False, 50),
    "arrays": (arrays, 2, keras.optimizers.SGD, 10, True, 100),
    "py_dataset": (py_dataset, 1, keras.optimizers.Adam, 10, False, "epoch"),
    "part": (part, 1, keras.optimizers.Adam, 10, False, "epoch"),
    "kept_order": (kept_order, 1, keras.optimizers.Adam, 10, False, "epoch"),
    "generator": (generator, 1, keras.optimizers.SGD, 7, False, "epoch"),
    "unknown_10": (unknown, 2, keras.optimizers.Adam, 10, True, "epoch"),
    "known_1": (known, 1, keras.optimizers.SGD, 1, True, "epoch"),
    "endless_1": (endless, 1, keras.optimizers.SGD, 1, False, "epoch"),
}


def compiled(make_optimizer, steps_per_execution):
    with strategy.scope():
        ids = keras.Input((3,), dtype="int32")
        x = keras.Input((4,))
        rows = keras.layers.Flatten()(keras.layers.Embedding(NUM_IDS, 4)(ids))
        hidden = keras.layers.Dense(8)(keras.layers.Concatenate()([rows, x]))
        hidden = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(hidden))
        model = keras.Model([ids, x], keras.layers.Dense(1)(hidden))
        model.compile(
            make_optimizer(0.01),
            "mse",
            metrics=["mae"],
            steps_per_execution=steps_per_execution,
        )
    return model


def train(name, backup=None):
    """Returns everything that a training ends with, by name."""
    make_data, PARTITIONER.num_shards, make_optimizer, steps, listens, save_freq = TRAININGS[name]
    keras.utils.set_random_seed(11)
    model = compiled(make_optimizer, steps)
    stopping = keras.callbacks.EarlyStopping("loss", patience=5)
    callbacks = [stopping, Beginning(), *([Listening()] if listens else [])]
    if backup is not None:
        callbacks.append(
            kerasps.BackupAndRestore(backup, save_freq=save_freq, interval_s=options.interval)
        )
    began = time.monotonic()
    history = model.fit(**make_data(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    print(f"{name} took {time.monotonic() - began:.2f} s", flush=True)
    # Without a listener it depends on time how floats of metrics are added up.
    logs = {f"log {key}": values[-1] for key, values in history.history.items()}
    # Metrics are compared by their logs.
    metrics = {id(v) for v in model.metrics_variables}
    state = [v for v in [*model.variables, *model.optimizer.variables] if id(v) not in metrics]
    values = {f"{number} {v.shape}": np.asarray(v) for number, v in enumerate(state)}
    return {**values, **logs, "wait": stopping.wait, "best": stopping.best}


def differences(name, expected, received):
    """What is not equal: bit for bit, but the logs of a training that nobody listens to."""
    found = []
    listens = TRAININGS[name][4]
    for key in expected:
        ours, theirs = np.asarray(expected[key]), np.asarray(received[key])
        close = key in ("best",) or key.startswith("log ")
        if close and not listens:
            same = np.allclose(ours, theirs, rtol=1e-5, atol=0)
        else:
            same = ours.tobytes() == theirs.tobytes()
        if not same:
            found.append(f"{name}: {key}: {ours.ravel()[:4]} and {theirs.ravel()[:4]}")
    return found


parser = argparse.ArgumentParser()
parser.add_argument("--directory", type=Path, required=True)
parser.add_argument("--interval", type=float, default=0.25)
parser.add_argument("--only", nargs="*", default=[], help="of the trainings; else all")
options = parser.parse_args()
names = options.only or list(TRAININGS)
found = []
with local_strategy(1, 2, partitioner=PARTITIONER, table_min_bytes=0) as (cluster, strategy):
    for name in names:
        expected, done = options.directory / f"{name}.npz", options.directory / f"{name}.done"
        if done.exists():
            continue
        if not expected.exists():
            np.savez(options.directory / "partial.npz", **train(name))
            (options.directory / "partial.npz").rename(expected)
        print(f"TRAINING {name}", flush=True)
        received = train(name, options.directory / name)
        done.write_text(json.dumps(differences(name, np.load(expected), received)))
        print(f"DONE {name}", flush=True)
for name in names:
    found += json.loads((options.directory / f"{name}.done").read_text())
print_report({"different": found})
