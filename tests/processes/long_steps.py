"""Trains in steps during which nothing is sent for minutes; run as a process of its own by
test_long_steps.py. Stops a worker in the midst of its step; lets it go on when it counts as lost.

    python tests/processes/long_steps.py 150

Prints `REPORT` and a JSON object.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report
from tensorflow.python.data.experimental.ops import testing

from support.process_checks import wait_for
from support.unit_gradients import Outputs

SECONDS = float(sys.argv[1])
NUM_STEPS = 3


def pause():
    """Return 0 after so many seconds, in which the worker only waits."""
    # It waits before its element, and before its end.
    slow = tf.data.Dataset.range(1).apply(testing.sleep(int(SECONDS / 2 * 1e6)))
    return tf.cast(slow.reduce(tf.constant(0, tf.int64), lambda a, b: 0 * (a + b)), tf.float32)


class Sum(keras.layers.Layer):
    """Gives its weights a gradient of 1, after a pause."""

    def build(self, input_shape):
        self.parts = [self.add_weight(shape=(2,), initializer="zeros") for _ in range(2)]

    def call(self, x):
        total = tf.add_n([tf.reduce_sum(part) for part in self.parts]) + pause()
        return tf.reduce_mean(x) * 0.0 + total * tf.ones([1, 1])


def stop_in_step():
    """Stop worker 1 in its step, and let it go on when it counts as lost."""
    time.sleep(SECONDS * 2 / 3)
    pid = cluster.processes["worker", 1].pid
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: strategy.workers()[1].status != "connected", "the loss of the worker")
    report["noticed"] = strategy.workers()[1].status
    with contextlib.suppress(ProcessLookupError):  # the cluster may have replaced it
        os.kill(pid, signal.SIGCONT)


report = {}
with local_strategy() as (cluster, strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Sum()])
        model.compile(keras.optimizers.SGD(1.0), Outputs(reduction="sum"))
    stopper = threading.Thread(target=stop_in_step, daemon=True)
    x = np.ones([NUM_STEPS, 1], "float32")
    began = time.monotonic()
    stopper.start()
    model.fit(x, x, batch_size=1, epochs=1, verbose=0)
    stopper.join()
    report |= {
        "took_s": time.monotonic() - began,
        "updates": int(model.optimizer.iterations.numpy()),
        "weights": sorted({float(w) for part in model.get_weights() for w in np.ravel(part)}),
        "times_taken_back": strategy.extended.host.membership.generation(0),
        "evaluated": model.evaluate(x[:1], x[:1], verbose=0),
    }
print_report(report)
