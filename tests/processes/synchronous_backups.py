"""Stops one of two workers for a while, where updates are synchronous and may do without the
slowest; run as a process of its own by test_sync.py.

    python tests/processes/synchronous_backups.py --backups 1

Without backup workers it stays stopped for a few seconds; with them, until the other one has made
pushes. Prints one JSON line: how many pushes the other worker made meanwhile, what was counted, and
what was said of what cannot be.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from support.models import counting_model, ids_data
from support.optimizers import OPTIMIZERS
from support.process_checks import wait_for
from support.spread import spread

STOPPED_S = 3.0
# More than are on their way when the other worker is stopped.
NUM_PUSHES = 20


def endless(context):
    return tf.data.Dataset.from_tensor_slices(ids_data(96)).repeat().batch(8)


def pushes(worker):
    return sum(staleness.pushes for staleness in strategy.staleness() if staleness.worker == worker)


class Stops(threading.Thread):
    """Stops worker 1 for a while once training has begun, and counts what worker 0 does."""

    def run(self):
        while pushes(1) < 40:
            time.sleep(0.01)
        pid = cluster.processes["worker", 1].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            before = pushes(0)
            if options.backups:
                wait_for(lambda: pushes(0) > before + NUM_PUSHES, "pushes of the other worker")
            else:
                time.sleep(STOPPED_S)
            report["meanwhile"] = pushes(0) - before
        finally:
            os.kill(pid, signal.SIGCONT)


def scheduled():
    """Have a custom loop apply an optimizer."""
    with strategy.scope():
        weight = keras.Variable(np.zeros(3, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones(3)], [weight]))

    strategy.coordinator.schedule(step)
    strategy.coordinator.join()


def fitted(optimizer):
    model = counting_model(strategy, optimizer=optimizer)
    model.fit(*ids_data(32), verbose=0)


class ReadsAgain(keras.Model):
    """Reads its weights after it has updated them."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": keras.ops.mean((self(x) - y) ** 2)}


def read_again():
    with strategy.scope():
        model = ReadsAgain()
        model.compile("sgd")
    model.fit(*ids_data(32), verbose=0)


def said(call, *arguments):
    """What the error of a call says."""
    try:
        call(*arguments)
    except kerasps.UnsupportedError as error:
        return str(error)
    return "nothing"


parser = argparse.ArgumentParser()
parser.add_argument("--backups", type=int, default=0)
options = parser.parse_args()
report = {"meanwhile": None}
spread()
with local_strategy(
    shards=2, table_min_bytes=0, update_mode="sync", num_backup_workers=options.backups
) as (cluster, strategy):
    if options.backups:
        report["refused"] = {
            "clipnorm": said(fitted, keras.optimizers.SGD(0.1, clipnorm=1.0)),
            "clipvalue": said(fitted, keras.optimizers.SGD(0.1, clipvalue=1.0)),
            "global_clipnorm": said(fitted, keras.optimizers.SGD(0.1, global_clipnorm=1.0)),
            "condition": said(fitted, OPTIMIZERS["loss_scale"]()),
            "scheduled": said(scheduled),
            "read again": said(read_again),
        }
    model = counting_model(strategy, 2)
    stops = Stops()
    stops.start()
    steps = 0
    report["batches"] = []
    while stops.is_alive():
        history = model.fit(
            kerasps.DatasetCreator(endless), steps_per_epoch=2000, verbose=0
        ).history
        report["batches"] += history["batches"]
    stops.join()
    report["iterations"] = int(model.optimizer.iterations.numpy())
    print_report(report)
