"""Interrupts synchronous training at random instants; run as a process of its own by test_sync.py.

    python tests/processes/synchronous_interrupts.py 8

With gradients of 1 and a learning rate of 1, a weight is minus the number of updates. Prints one
JSON line: how many interrupts there were, and what was wrong after them.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from support.spread import spread
from support.unit_gradients import compiled_unit_model

NUM_IDS, BATCH_SIZE, SEED = 40, 4, 2


def endless(context):
    ids = np.arange(NUM_IDS, dtype="int32")[:, None]
    return tf.data.Dataset.from_tensor_slices((ids, ids)).repeat().batch(BATCH_SIZE)


class Interrupter(threading.Thread):
    """Interrupts once, a while after training has begun."""

    def __init__(self, delay):
        super().__init__(daemon=True)
        self._delay = delay

    def run(self):
        time.sleep(self._delay)
        os.kill(os.getpid(), signal.SIGINT)


def fit(model, **arguments):
    return model.fit(kerasps.DatasetCreator(endless), verbose=0, **arguments).history


def problems(model):
    """What is wrong with the counts of updates, and with a `fit` that follows."""
    found = []
    before = int(model.optimizer.iterations.numpy())
    weights = model.trainable_variables[1:]
    counts = {float(-count) for weight in weights for count in weight.numpy().ravel()}
    if counts != {float(before)}:
        found.append(f"weights {sorted(counts)} after {before} updates")
    history = fit(model, steps_per_epoch=28)
    if history["batches"] != [28]:
        found.append(f"batches {history['batches']}")
    after = int(model.optimizer.iterations.numpy())
    if after - before != 14:
        found.append(f"{after - before} updates of 28 batches")
    return found


chance = random.Random(SEED)
report = {"problems": [], "interrupts": 0}
spread()
with local_strategy(shards=2, table_min_bytes=0, update_mode="sync") as (cluster, strategy):
    model = compiled_unit_model(strategy, NUM_IDS, lambda: keras.optimizers.SGD(1.0), 7)
    fit(model, steps_per_epoch=28)
    for _ in range(int(sys.argv[1])):
        interrupter = Interrupter(chance.uniform(0.1, 1.5))
        try:
            interrupter.start()
            fit(model, steps_per_epoch=10**6)
        except KeyboardInterrupt:
            report["interrupts"] += 1
        report["problems"] += [f"seed {SEED}: {problem}" for problem in problems(model)]
    print_report(report)
