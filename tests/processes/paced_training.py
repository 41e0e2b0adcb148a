"""Trains on two workers of which one reads slowly, and watches on the ps how far they drift; run as
a process of its own by test_paced.py.

    python tests/processes/paced_training.py 6

Prints one JSON line: the most steps that one worker was ahead of the other, and what was counted.
"""

from __future__ import annotations

import sys
import threading

import tensorflow as tf
from scenario import local_strategy, print_report
from tensorflow.python.data.experimental.ops.testing import sleep

import kerasps
from support.models import counting_model, ids_data

STEPS, STEPS_PER_EXECUTION = 60, 4
SLEEP_US = 20_000


def slow_on_the_second(context):
    dataset = tf.data.Dataset.from_tensor_slices(ids_data(96)).repeat().batch(8)
    return dataset.apply(sleep(SLEEP_US)) if context.input_pipeline_id == 1 else dataset


def pushes():
    """Return how many pushes of each worker were applied, all at one instant."""
    of_workers = {staleness.worker: staleness.pushes for staleness in strategy.staleness()}
    return [of_workers.get(worker, 0) for worker in range(2)]


class Watch(threading.Thread):
    """Looks again and again while steps run."""

    def __init__(self):
        super().__init__(daemon=True)
        self.is_over = threading.Event()
        self.most_ahead = 0
        self.looks = set()

    def run(self):
        while not self.is_over.is_set():
            fast, slow = pushes()
            self.looks.add((fast, slow))
            self.most_ahead = max(self.most_ahead, abs(fast - slow))


max_staleness = int(sys.argv[1])
with local_strategy(2, 1, max_staleness=max_staleness) as (cluster, strategy):
    model = counting_model(strategy, STEPS_PER_EXECUTION)
    watch = Watch()
    watch.start()
    history = model.fit(
        kerasps.DatasetCreator(slow_on_the_second),
        steps_per_epoch=STEPS,
        epochs=2,
        verbose=0,
    ).history
    watch.is_over.set()
    watch.join()
    report = {
        "most_ahead": watch.most_ahead,
        "looks": len(watch.looks),
        "pushes": pushes(),
        "max_staleness": strategy.staleness().max,
        "batches": history["batches"],
        "iterations": int(model.optimizer.iterations.numpy()),
    }
    print_report(report)
