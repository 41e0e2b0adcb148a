"""Uses tf_keras beside a strategy and under it; run as a process by test_libraries.py.

Prints one JSON line: for each way of using it, the error that came, or None.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = sys.argv[1]

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import kerasps

X, Y = np.ones((32, 3), "float32"), np.ones((32, 1), "float32")


class Mixed(keras.Model):
    """A model of Keras 3 with a layer of Keras 2."""

    def __init__(self):
        super().__init__()
        self.theirs, self.ours = tf_keras.layers.Dense(2), keras.layers.Dense(1)

    def call(self, x):
        return self.ours(self.theirs(x))


def trained(library):
    model = library.Sequential([library.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    return model


def mixed():
    model = Mixed()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)


def optimizer():
    variable = tf.Variable(1.0)
    tf_keras.optimizers.legacy.Adam().apply_gradients([(tf.constant(1.0), variable)])


REFUSED = {
    "sequential": lambda: tf_keras.Sequential([tf_keras.layers.Dense(1)]),
    "layer": lambda: tf_keras.layers.Dense(1).build((None, 3)),
    "metric": lambda: tf_keras.metrics.Mean(),
    "optimizer": lambda: tf_keras.optimizers.Adam(),
    "legacy_optimizer": optimizer,
    "loaded": lambda: tf_keras.models.load_model("model.h5"),
    "mixed": mixed,
}
TAKEN = {"keras_3": lambda: trained(keras), "variable": lambda: tf.Variable(1.0).assign_add(1.0)}
if sys.argv[1] == "1":
    REFUSED["tf.keras"] = lambda: tf.keras.Sequential([tf.keras.layers.Dense(1)])


def error_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return None


def main():
    trained(tf_keras).save("model.h5")
    with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            report = {name: error_of(function) for name, function in {**REFUSED, **TAKEN}.items()}
        report["outside"] = error_of(lambda: trained(tf_keras))
    print("REPORT", json.dumps({"errors": report, "refused": list(REFUSED)}))


if __name__ == "__main__":
    main()
