"""A script that fails in one of several ways; run as a process of its own by test_last_words.py."""

from __future__ import annotations

import os
import sys
import threading

import keras
import numpy as np
import tensorflow as tf

import kerasps


class Checking(keras.layers.Layer):
    def call(self, x):
        tf.print("largest:", tf.reduce_max(x))
        limit = 0.5 if way == "step" else 2.0
        tf.debugging.assert_less(tf.reduce_max(x), limit, message="the values are too large")
        return x


def dataset_fn(context):
    def check(x, y):
        # In words that TensorFlow's coordinator takes for those of a lost worker.
        message = "a bad row in /job:worker/replica:0/task:0, of an unknown device"
        tf.debugging.assert_less(tf.reduce_max(x), 0.5 if way == "data" else 2.0, message=message)
        return x, y

    return (
        tf.data.Dataset.from_tensor_slices(
            (np.ones([64, 4], "float32"), np.ones([64, 1], "float32"))
        )
        .map(check)
        .batch(8)
    )


way, log_dir = sys.argv[1], sys.argv[2]
# Nobody closes it: a script that fails mostly does not.
cluster = (
    None
    if "TF_CONFIG" in os.environ
    else kerasps.LocalCluster(num_workers=2, num_ps=2, log_dir=log_dir)
)
strategy = kerasps.ParameterServerStrategy(cluster and cluster.cluster_resolver)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((4,)), Checking(), keras.layers.Dense(8), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
if way == "ps":
    threading.Timer(1.0, cluster.kill, ["ps", 1]).start()
    model.fit(
        kerasps.DatasetCreator(lambda context: dataset_fn(context).repeat()),
        steps_per_epoch=100_000,
        verbose=0,
    )
if way == "input":
    model.fit(kerasps.DatasetCreator(lambda context: dataset_fn(context).repeat()), verbose=0)
model.fit(kerasps.DatasetCreator(dataset_fn), verbose=0)
own_error = "the script's own error"  # not in the line that a traceback shows
raise ValueError(own_error)
