"""Interrupts training at random instants and looks what is left; run as a process of its own by
test_interrupts.py.

Each weight counts the updates that were applied: with a gradient of 1 and a learning rate of 1 it
is minus their number, under SGD; under Adagrad the slots count them. A table without a vocabulary
has a row for each example, updated once, and one that each batch updates. Does so as many times as
it is told, at each place. Prints one JSON line, by place: how many interrupts there were, of which
kind, and what was wrong after them.

    python tests/processes/interrupted_training.py 1 28

Steps go to "both" ps, or what is on one of them is on the "other" in flight.
"""

from __future__ import annotations

import collections
import contextlib
import math
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

seed, num_times = int(sys.argv[1]), int(sys.argv[2])
MOST_SWALLOWED = 3


BATCH_SIZE = 4
# The id that each batch has.
COMMON = -7


class Sum(keras.layers.Layer):
    """Gives every element of its weights, and of the rows of its table, a gradient of 1."""

    def build(self, input_shape):
        self.parts = [
            self.add_weight(shape=shape, initializer="zeros") for shape in [(3,), (2, 4), (), (5,)]
        ]
        self.table = kerasps.layers.DynamicEmbedding(1, "zeros")
        self.table.build()

    def call(self, ids):
        parts = [*self.parts, self.table(ids), self.table(tf.constant([COMMON]))]
        return tf.add_n([tf.reduce_sum(part) for part in parts]) * tf.ones([1, 1])


class Expired(Exception):
    """What the script's own signal handler raises."""


class Watching(keras.callbacks.Callback):
    """Looks at a weight after each batch, so that training comes to rest again and again; fails
    where it is to.
    """

    def __init__(self, fails_at=None):
        super().__init__()
        self.fails_at, self.batches = fails_at, 0

    def on_train_batch_end(self, batch, logs=None):
        self.model.get_weights()
        self.batches += 1
        if self.batches == self.fails_at:
            raise Expired


def expire(number, frame):
    raise Expired


def compiled(make_optimizer, steps_per_execution):
    with strategy.scope():
        optimizer = make_optimizer(1.0)
        model = keras.Sequential([keras.Input((1,), dtype="int64"), Sum()])
        model.compile(
            optimizer,
            lambda y, y_pred: tf.reduce_mean(y_pred),
            steps_per_execution=steps_per_execution,
        )
    return model


def new_ids():
    return tf.random.uniform([1], minval=0, maxval=2**62, dtype=tf.int64)


def dataset_fn(context):
    return (
        tf.data.Dataset.from_tensors(np.ones([1], "float32"))
        .repeat()
        .map(lambda y: (new_ids(), y))
        .batch(BATCH_SIZE)
    )


def train_on_batch(model):
    ids = np.stack([new_ids() for _ in range(BATCH_SIZE)])
    model.train_on_batch(ids, np.ones([BATCH_SIZE, 1], "float32"))


def train(model, way):
    if way == "on_batch":
        while True:
            train_on_batch(model)
    callbacks = {"watched": [Watching()], "failing": [Watching(rng.randrange(1, 50))]}.get(way, [])
    # A worker holds a step at any time of an epoch, and none between two.
    steps = 1_000_000 if way == "stopped" else 30
    model.fit(data, epochs=10_000, steps_per_epoch=steps, verbose=0, callbacks=callbacks)


def send(signals, sent, has_left, ready):
    ready()
    for delay, number in signals:
        time.sleep(delay)
        sent.append(number)
        os.kill(os.getpid(), number)
    # Python prints, and drops, what is raised within a `__del__`: there was no interrupt then.
    # Without an answer to an interrupt, training would not end at all.
    while signals and report["swallowed"] < MOST_SWALLOWED and not has_left.wait(60):
        report["swallowed"] += 1
        os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def until_interrupted():
    """Ends the block at an interrupt. In the midst of TensorFlow's C++, an error of TensorFlow's
    replaces it.
    """
    try:
        yield
    except (KeyboardInterrupt, Expired):
        pass
    except RuntimeError as exc:
        if "REPLACED BY" not in str(exc):
            raise
    except SystemError as exc:
        # A list of C++'s got no element, since the interrupt ended what was to make it.
        if "bad argument to internal function" not in str(exc):
            raise


def interrupted(model, way, signals, ready=lambda: None):
    """Trains until a signal comes; the second of a pair may come at any time. The first is sent so
    long after `ready` returned.
    """
    sent, has_left = [], threading.Event()
    sender = threading.Thread(target=send, args=[signals, sent, has_left, ready])
    sender.start()
    with until_interrupted():
        with until_interrupted():
            train(model, way)
        while len(sent) < len(signals):
            time.sleep(0.001)
            if way != "stopped":
                model.get_weights()
    has_left.set()
    sender.join()


def problems(model):
    """What is wrong with the weights and slots of a model, given the updates that its optimizer has
    counted.
    """
    count = int(model.optimizer.iterations.numpy())
    weight = -count
    slots = slots_of(model)
    if slots:  # a step of Adagrad is the gradient over the root of what it has met
        weight = -sum(1 / math.sqrt(0.1 + update) for update in range(1, count + 1))
    once = -1 / math.sqrt(1.1) if slots else -1.0
    expected = [(v, weight, once, 0.5 if not slots else 0.01) for v in model.trainable_variables]
    expected += [(slot, 0.1 + count, 1.1, 0.5) for slot in slots]
    found = []
    for variable, value, in_new_row, tolerance in expected:
        values = variable.numpy()
        if "embedding" in variable.path:
            values, value = values.rows, np.where(values.ids == COMMON, value, in_new_row)[:, None]
            if len(values) != 1 + BATCH_SIZE * count:
                found.append(f"{variable.path}: {len(values)} rows after {count} updates")
        if not np.allclose(values, value, rtol=0, atol=tolerance):
            wrong = values[np.abs(values - value) > tolerance]
            found.append(f"{variable.path}: {wrong[:20].tolist()} after {count} updates")
    return found


def slots_of(model):
    """Adagrad's slots: the sum of the squares of gradients, which counts updates too."""
    return [v for v in model.optimizer.variables if "accumulator" in v.path]


def all_workers_push():
    """Return whether each worker has pushed in the training that runs."""
    return [worker.worker for worker in strategy.staleness() if worker.pushes] == [0, 1]


def train_with_stopped_worker(model):
    """Interrupts training while a worker holds a step and does not answer; returns how many updates
    the next `fit`, of ten steps, applies meanwhile.
    """
    pid = cluster.processes["worker", 1].pid
    iterations = model.optimizer.iterations.storage
    before = int(iterations.read_value())

    def stop_worker():
        # On a busy machine one worker may do many steps before the other begins.
        while int(iterations.read_value()) < before + 60 or not all_workers_push():
            time.sleep(0.001)
        os.kill(pid, signal.SIGSTOP)

    interrupted(model, "stopped", [(0.3, signal.SIGINT), (0.3, signal.SIGINT)], stop_worker)
    try:
        # This read waits until the step that the worker holds is given up.
        before = int(model.optimizer.iterations.numpy())
        model.fit(data, steps_per_epoch=10, verbose=0)
        return int(model.optimizer.iterations.numpy()) - before
    finally:
        # The cluster kills a worker that does not answer, and starts it again.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def interrupt_again_and_again():
    """Interrupt two models in turn, and note in the report what is wrong."""
    models = [compiled(keras.optimizers.SGD, 1), compiled(keras.optimizers.Adagrad, 10)]
    for model in models:
        model.fit(data, steps_per_epoch=30, verbose=0)
        train_on_batch(model)
    report["slots"] = len(slots_of(models[1]))
    for index in range(num_times):
        model, way = (
            models[index % 2],
            ("fit", "watched", "fit", "on_batch", "fit", "failing", "fit")[index % 7],
        )
        # Half of them while an epoch begins, and half of them twice.
        signals = [
            (
                0.005 + rng.random() * rng.choice([0.05, 0.5]),
                rng.choice([signal.SIGINT, signal.SIGINT, signal.SIGALRM]),
            )
        ]
        if rng.random() < 0.5:
            signals.append((rng.random() * 0.05, signal.SIGINT))
            report["pairs"] += 1
        if way == "failing":
            signals = []
        report["ways"][way] += 1
        interrupted(model, way, signals)
        report["problems"] += [
            f"seed {seed}, {index}, {way}, {signals}: {problem}" for problem in problems(model)
        ]
        before = int(model.optimizer.iterations.numpy())
        model.fit(data, steps_per_epoch=10, verbose=0)
        report["updates"] += before
        report["problems"] += [
            f"{index}, {way}, fit after: {problem}" for problem in problems(model)
        ]
        if int(model.optimizer.iterations.numpy()) != before + 10:
            report["problems"].append(
                f"{index}, {way}: {before} updates, {model.optimizer.iterations.numpy()} after 10 "
                "more"
            )
        if report["problems"]:
            break
    report["stopped"] = train_with_stopped_worker(models[0])
    report["problems"] += [
        f"after a worker was stopped: {problem}" for problem in problems(models[0])
    ]
    report["weights"] = len(models[0].get_weights())


signal.signal(signal.SIGALRM, expire)
with local_strategy() as (cluster, strategy):
    data = kerasps.DatasetCreator(dataset_fn)
    reports = {}
    for where in ("other", "both"):
        if where == "both":
            spread()
        rng = random.Random(seed)
        report = reports[where] = {
            "problems": [],
            "ways": collections.Counter(),
            "pairs": 0,
            "updates": 0,
            "swallowed": 0,
        }
        interrupt_again_and_again()
    print_report(reports)
