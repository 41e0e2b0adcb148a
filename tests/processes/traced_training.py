"""Traces a training while a worker is lost, or waits for `kerasps trace`; run as a process of its
own by test_trace.py.

    python tests/processes/traced_training.py lost logs
    python tests/processes/traced_training.py attached logs

Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kerasps  # isort: skip
import keras
import tensorflow as tf

scenario, log_dir = sys.argv[1], Path(sys.argv[2])


def data(context):
    batch = tf.ones([16, 8], tf.int32), tf.ones([16, 1])
    return tf.data.Dataset.from_tensors(batch).repeat()


class KillsWorker(keras.callbacks.Callback):
    """Kills worker 1 in the third epoch, and has worker 0 go on alone."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            os.kill(cluster.processes["worker", 1].pid, 9)


class RunsCommand(keras.callbacks.Callback):
    """Runs `kerasps trace` beside the training, which goes on until that has ended."""

    process = None

    def on_epoch_end(self, epoch, logs=None):
        if self.process is None:
            command = [sys.executable, "-m", "kerasps", "trace", "--log-dir", str(log_dir)]
            command += ["--seconds", "1", str(os.getpid())]
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        self.model.stop_training = self.process.poll() is not None


with kerasps.LocalCluster(num_workers=2, num_ps=1, max_restarts=0) as cluster:
    strategy = kerasps.ParameterServerStrategy(cluster)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,), dtype="int32"),
                keras.layers.Embedding(300, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    creator = kerasps.DatasetCreator(data)
    report = {"pid": os.getpid()}
    if scenario == "lost":
        trace = kerasps.Trace(log_dir, first_step=50, num_steps=10_000)
        model.fit(
            creator, steps_per_epoch=100, epochs=8, verbose=0, callbacks=[trace, KillsWorker()]
        )
        report["steps"] = trace.report.num_steps
        report["missing"] = [f"{job} {index}" for job, index in trace.report.missing]
        report["said"] = str(trace.report)
        report["file"] = str(trace.report.file)
    else:
        command = RunsCommand()
        model.fit(creator, steps_per_epoch=100, epochs=10_000, verbose=0, callbacks=[command])
        report["out"], report["err"] = command.process.communicate()
        report["code"] = command.process.returncode
print("REPORT " + json.dumps(report), flush=True)
