"""Steps of a large model use the memory again that the steps before have freed."""

from __future__ import annotations

import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import kerasps
from kerasps.cluster.local.local_registry import connected_cluster

STEPS, WIDTH = 10, 1024


def page_faults(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7])


def test_steps_take_no_new_memory(strategy):
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH) for _ in range(3)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile("adam", "mse", steps_per_execution=STEPS)
    x = np.ones((8, WIDTH), "float32")
    data = kerasps.DatasetCreator(lambda context: tf.data.Dataset.from_tensors((x, x)).repeat())
    model.fit(data, steps_per_epoch=3 * STEPS, verbose=0)
    tasks = connected_cluster().processes
    before = {task: page_faults(process.pid) for task, process in tasks.items()}
    model.fit(data, steps_per_epoch=5 * STEPS, verbose=0)
    after = {task: page_faults(process.pid) for task, process in tasks.items()}
    # A step receives the values, or gradients, of its variables once.
    pages = 5 * STEPS * model.count_params() * 4 / os.sysconf("SC_PAGE_SIZE")
    for task, faults in after.items():
        # Without reuse it is as many pages or more; a machine that swaps has some faults anyway.
        assert faults - before[task] < pages / 4, task
