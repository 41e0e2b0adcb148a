"""`fit` works without all private names that only other features need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import dataclasses
import warnings

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat, _private_names
from kerasps._private_names import FIT
from kerasps.hooks import table as hooks_table


def without(table):
    return [
        row if row.feature is FIT else dataclasses.replace(row, where="keras.src.moved:moved")
        for row in table
    ]


_compat.PRIVATE_NAMES = {row.name: row for row in without(_compat.PRIVATE_NAMES.values())}
_compat.PRIVATE_ATTRIBUTES = without(_compat.PRIVATE_ATTRIBUTES)
hooks_table.PATCHES = without(hooks_table.PATCHES)

import kerasps


def refused(use):
    try:
        use()
    except kerasps.MissingNameError as error:
        assert "Install a supported pair of versions" in str(error)
        # Keras writes more around an error in a layer, and this line in bold.
        [line] = [line for line in str(error).splitlines() if " cannot work" in line]
        print("refused:", line.removeprefix(chr(27) + "[1m").partition(" cannot work")[0])


cluster = kerasps.LocalCluster(num_workers=1, num_ps=1)
earlier = tf.Variable(1.0)
refused(lambda: kerasps.ParameterServerStrategy(cluster))
del earlier
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    strategy = kerasps.ParameterServerStrategy(cluster)
[warning] = [str(w.message) for w in caught if "private names are missing" in str(w.message)]
lacking = {row.feature for row in _compat.PRIVATE_ATTRIBUTES if row.feature is not FIT}
assert all(feature.name in warning for feature in lacking), warning

x = np.arange(64, dtype="int32").reshape(32, 2) % 8
y = np.ones((32, 1), "float32")


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(8, 4), keras.layers.Flatten(),
         keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    return model


with strategy.scope():
    model = make()
initial = model.get_weights()
before = model.evaluate(x, y, batch_size=8, verbose=0)[0]
model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)
assert model.evaluate(x, y, batch_size=8, verbose=0)[0] < before
plain = make()
plain.set_weights(initial)
plain.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)
for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)



class Wrapping(keras.layers.Layer):
    # Calls a function.
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def fit(*layers, run_eagerly=False):
    with strategy.scope():
        made = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
        made.compile("sgd", "mse", run_eagerly=run_eagerly)
    made.fit(x.astype("float32"), y, batch_size=8, verbose=0)


@tf.function
def with_control_flow(inputs):
    if tf.reduce_sum(inputs) > 0.0:
        inputs = inputs + 1.0
    return inputs


def draws(inputs):
    return tf.map_fn(lambda row: row + tf.random.uniform([2]), inputs)


def gradients():
    @tf.function
    def of_variable():
        table = model.trainable_variables[0]
        return tf.gradients(tf.reduce_sum(table.value), table)

    return of_variable()


def lookup_sparse(inputs):
    ids = tf.sparse.from_dense(tf.ones([8, 1], "int64"))
    table = model.trainable_variables[0].value
    return inputs + tf.nn.embedding_lookup_sparse(table, ids, None)[:, :2]


@tf.function
def without_strategy(number):
    rows = tf.nn.embedding_lookup(table, [number])
    of_ids = tf.nn.embedding_lookup_sparse(table, tf.sparse.from_dense([[number]]), None)
    return rows, of_ids, tf.gradients(of_ids, table)


# What needs nothing of the strategy works.
table = tf.Variable([[1.0], [2.0]])
for rows in without_strategy(1)[:2]:
    np.testing.assert_array_equal(rows, [[2.0]])
bags = tf.ragged.constant([[0, 1], [1]], dtype="int64")
np.testing.assert_array_equal(tf.nn.embedding_lookup_sparse(table, bags, None), [[1.5], [2.0]])
recurrent = keras.Sequential(
    [keras.Input((2, 1)), keras.layers.GRU(2, return_sequences=True), keras.layers.LSTM(1)]
)
recurrent.compile("sgd", "mse")
backup = keras.callbacks.BackupAndRestore("plain backup")
recurrent.fit(x[:, :, None], y, verbose=0, callbacks=[backup])


plain.save("plain.keras")
checkpoint = tf.train.Checkpoint(model=model)
for use in (
    lambda: model.save("model.keras"),
    lambda: keras.saving.load_model("plain.keras"),
    lambda: model.load_weights("plain.keras"),
    lambda: checkpoint.write("checkpoint"),
    lambda: checkpoint.read("checkpoint"),
    lambda: fit(run_eagerly=True),
    lambda: tf.nn.embedding_lookup(model.trainable_variables[0], [1]),
    lambda: fit(Wrapping(lookup_sparse)),
    lambda: tf.saved_model.save(model, "saved"),
    gradients,
    lambda: fit(keras.layers.Reshape((2, 1)), keras.layers.GRU(2)),
    lambda: fit(keras.layers.Reshape((2, 1)), keras.layers.LSTM(2)),
    lambda: fit(Wrapping(with_control_flow)),
    lambda: fit(Wrapping(draws)),
    lambda: kerasps.CentralStorageStrategy(),
    lambda: model.save_weights("model.weights.h5"),
    lambda: model.fit(x, y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("backup")]),
    lambda: model.fit(x, y, verbose=0, validation_split=0.5),
    lambda: model.fit(x, y, verbose=0, callbacks=[kerasps.Trace("trace")]),
    lambda: strategy.coordinator.schedule(print),
    lambda: model.export("exported", verbose=False),
):
    refused(use)
fit(keras.layers.Dense(2))  # goes on
cluster.close()
"""

FILES = "saving and loading models"
# In the order of the script.
REFUSED = [
    "an object on the cluster that was made before the strategy",
    *(FILES, FILES, FILES, "`tf.train.Checkpoint`", "`tf.train.Checkpoint`", "`run_eagerly`"),
    *("`tf.nn.embedding_lookup`", "`tf.nn.embedding_lookup`"),
    *("`Model.export` and `tf.saved_model.save`", "`tf.gradients`"),
    *("recurrent layers", "recurrent layers"),
    "a `tf.function` with AutoGraph that a step calls",
    "a function in a step that draws random numbers",
    *("`CentralStorageStrategy`", FILES, "`BackupAndRestore`", "`validation_split`"),
    "traces of tasks",
    *("`ClusterCoordinator.schedule`", "`Model.export` and `tf.saved_model.save`"),
]


def test_fit_needs_no_name_that_only_another_feature_needs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}")
    checkout = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([checkout, *sys.path])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert refused == [f"refused: {feature}" for feature in REFUSED]
