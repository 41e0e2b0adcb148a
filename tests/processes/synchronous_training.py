"""Trains on two workers whose updates are synchronous, and in this process on batches of twice the
size; run as a process of its own by test_sync.py.

    python tests/processes/synchronous_training.py --steps-per-execution 4

Prints one JSON line: how far the weights differ at most, for each optimizer, and what was counted.
"""

from __future__ import annotations

import argparse
import os

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

from support.models import Batches
from support.optimizers import NOT_ELEMENTWISE, OPTIMIZERS

NUM_IDS, BATCH_SIZE, BATCHES = 40, 8, 24

# Updates that are not elementwise, and conditions, are refused (see test_strategy.py).
NAMES = [n for n in OPTIMIZERS if n not in NOT_ELEMENTWISE and n != "loss_scale"]
MAKERS = {
    **{name: OPTIMIZERS[name] for name in NAMES},
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=5),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9
    ),
}


def data():
    """Ids that no two examples of a step share, numbers, and targets."""
    generator = np.random.default_rng(0)
    rows = [generator.permutation(NUM_IDS)[: 2 * BATCH_SIZE] for _ in range(BATCHES // 2)]
    ids = np.concatenate(rows).astype("int32")[:, None]
    numbers = generator.normal(size=(len(ids), 4)).astype("float32")
    return (ids, numbers), np.sin(ids) + numbers[:, :1]


def make_model():
    ids = keras.Input((1,), dtype="int32")
    numbers = keras.Input((4,))
    x = keras.layers.Flatten()(keras.layers.Embedding(NUM_IDS, 3)(ids))
    x = keras.layers.Concatenate()([x, numbers])
    x = keras.layers.Dense(6, activation="tanh")(x)
    x = keras.layers.Dense(5, activation="tanh")(x)
    return keras.Model([ids, numbers], keras.layers.Dense(1)(x))


def compare(name, steps_per_execution):
    """Train both, and return what a test looks at."""
    x, y = data()
    keras.utils.set_random_seed(1)
    plain = make_model()
    plain.compile(MAKERS[name](), "mse")
    # Traced with the first step, what `build` assigns would be assigned in every step.
    plain.optimizer.build(plain.trainable_variables)
    with strategy.scope():
        model = make_model()
        # Before there is an optimizer, which may begin with what it finds.
        model.set_weights(plain.get_weights())
        model.compile(
            MAKERS[name](), "mse", metrics=[Batches()], steps_per_execution=steps_per_execution
        )
    # The k-th batches of the workers are halves of the k-th batch of twice the size.
    plain.fit(x, y, batch_size=2 * BATCH_SIZE, shuffle=False, epochs=2, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE // options.replicas)
    history = model.fit(dataset, epochs=2, verbose=0).history
    slots = [
        (a, b)
        for a, b in zip(plain.optimizer.variables, model.optimizer.variables, strict=True)
        if a.name != "learning_rate"
    ]
    return {
        "weights": difference(zip(plain.weights, model.weights, strict=True)),
        "slots": difference(slots),
        "moved": float(np.abs(plain.get_weights()[0]).max()),
        "iterations": int(model.optimizer.iterations.numpy()),
        "plain_iterations": int(plain.optimizer.iterations.numpy()),
        "batches": history["batches"],
        "staleness": strategy.staleness().max,
    }


def difference(pairs):
    """How far the values of variables differ at most, relative to those larger than 1."""
    return max(
        float((np.abs(a - b) / np.maximum(1, np.abs(a))).max(initial=0))
        for a, b in (
            (np.asarray(a.numpy(), "float64"), np.asarray(b.numpy(), "float64")) for a, b in pairs
        )
    )


parser = argparse.ArgumentParser()
parser.add_argument("--steps-per-execution", type=int, default=1)
parser.add_argument("--replicas", type=int, default=1, help="of each worker, on batches as small")
parser.add_argument("--optimizers", nargs="*", default=MAKERS)
options = parser.parse_args()
os.environ["KERASPS_CPU_DEVICES"] = str(options.replicas)
with local_strategy(
    shards=2,
    sparse_updates="dense",
    table_min_bytes=0,
    update_mode="sync",
    worker_devices=[f"CPU:{index}" for index in range(options.replicas)],
) as (cluster, strategy):
    report = {name: compare(name, options.steps_per_execution) for name in options.optimizers}
    print_report(report)
