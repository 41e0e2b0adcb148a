"""Stops a ps, or a worker, for less than the hang limit, while all kinds of calls wait for it.

Prints a line of JSON; `test_paused.py` says what is expected. Each weight is minus the number of
its updates. A pause mostly begins before a call; the limit leaves it minutes more than it takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
from tempfile import TemporaryDirectory

os.environ.update(KERAS_BACKEND="tensorflow", KERASPS_HANG_TIMEOUT="300")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps
from kerasps.runtime.probe import break_connections
from support.unit_gradients import Outputs

PAUSE_S = 2.4
STEPS, BATCH, NUM_WEIGHTS = 30, 4, 1_000_000


class Pauses:
    """Stops a task, and has another process let it go on.

    In this process TensorFlow may wait for the task with Python's lock held.
    """

    def __init__(self, cluster):
        self._cluster = cluster
        self._processes = []

    def begin(self, task):
        pid = self._cluster.processes[task].pid
        os.kill(pid, signal.SIGSTOP)
        commands = f"sleep {PAUSE_S}; kill -CONT {pid}"
        self._processes.append(subprocess.Popen(["sh", "-c", commands]))

    def end(self):
        for process in self._processes:
            process.wait()
        self._processes.clear()


class Large(keras.layers.Layer):
    """Weights of which a pull or a push does not fit into what the kernel keeps for a process."""

    def build(self, input_shape):
        self.large = self.add_weight(shape=(NUM_WEIGHTS,), initializer="zeros")
        self.small = self.add_weight(shape=(3,), initializer="zeros")

    def call(self, rows):
        total = tf.reduce_sum(self.large) + tf.reduce_sum(self.small)
        return rows + total / tf.cast(tf.shape(rows)[0], tf.float32)


class Reading(keras.callbacks.Callback):
    """Reads weights with every fifth batch, and begins a pause in the middle."""

    def __init__(self, begin_pause):
        super().__init__()
        self._begin_pause = begin_pause

    def on_train_batch_end(self, batch, logs=None):
        if batch == STEPS // 2:
            self._begin_pause()
        if batch % 5 == 0:
            self.model.layers[-1].small.numpy()


class Calls:
    """What a script asks the tasks for, by name."""

    def __init__(self, strategy, pauses, folder):
        self.model, self._pauses, self._folder = self._compiled(strategy), pauses, folder
        x = np.ones((STEPS * BATCH, 1), "float32")
        self._data = tf.data.Dataset.from_tensor_slices((x, x)).repeat().batch(BATCH)
        self.fits = 0

    @staticmethod
    def _compiled(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), Large()])
            model.compile(keras.optimizers.SGD(1.0), Outputs(reduction="sum"), metrics=["mae"])
        return model

    def fit(self, callbacks=()):
        self.model.fit(self._data, steps_per_epoch=STEPS, verbose=0, callbacks=list(callbacks))
        self.fits += 1

    def evaluate(self):
        self.model.evaluate(self._data, steps=STEPS, verbose=0)

    def save(self):
        self.model.save(f"{self._folder}/model.keras")

    def checkpoint(self):
        tf.train.Checkpoint(model=self.model).save(f"{self._folder}/checkpoint")

    def values(self):
        for weight in self.model.weights:
            weight.assign(weight.numpy())

    def callback_of(self, task):
        """Return a call of `fit` in the middle of which a pause of a task begins."""
        return lambda: self.fit([Reading(lambda: self._pauses.begin(task))])


def main():
    report = {"problems": []}
    with TemporaryDirectory() as folder, kerasps.LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        pauses = Pauses(cluster)
        calls = Calls(strategy, pauses, folder)
        calls.fit()
        calls.evaluate()

        def call(action, task, is_broken=False, in_the_middle=False):
            if not in_the_middle:
                pauses.begin(task)
            if is_broken:  # as by a machine in between that forgets connections
                break_connections(cluster.description.jobs[task[0]][task[1]])
            try:
                action()
            except Exception as exc:
                report["problems"].append(f"{action} {task}: {type(exc).__name__}: {exc}")
            pauses.end()

        call(calls.fit, ("ps", 0))
        call(calls.evaluate, ("ps", 1))
        call(calls.checkpoint, ("ps", 1))
        for action in (calls.checkpoint, calls.save, calls.values):
            call(action, ("ps", 0), is_broken=True)
        call(calls.fit, ("worker", 0))
        for task in (("ps", 0), ("worker", 1)):
            call(calls.callback_of(task), task, in_the_middle=True)
        report["updates"] = int(calls.model.optimizer.iterations.numpy())
        report["weights"] = sorted({-float(v) for w in calls.model.weights for v in np.unique(w)})
        report["wanted"] = calls.fits * STEPS
        report["times_taken_back"] = [
            strategy.extended.host.membership.generation(w) for w in range(2)
        ]
    print_report(report)


if __name__ == "__main__":
    main()
