"""Trains models, and reports what their placement and traffic were, to compare with their plans.

Arguments: a file for the report, or "-", and the names of the models. A plan is of the first.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import kerasps

STEPS, BATCH = 6, 16


def dense():
    """Large layers in shards, small ones together, state of an optimizer."""
    x = inputs = keras.Input((64,))
    for units in (512, 1024, 8, 8):
        x = keras.layers.Dense(units, activation="relu")(x)
        x = keras.layers.BatchNormalization()(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.1)(x)))
    model.compile("adam", "mse", metrics=["mae"])
    return model, np.zeros((BATCH, 64), np.float32)


class Scaled(keras.layers.Layer):
    """A layer that reads a variable of TensorFlow's own."""

    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(np.ones((40, 8), np.float32), trainable=False)

    def call(self, x):
        return x * self.scale[0, 0]


def tables():
    """A large table in shards, one that is looked up twice, one without a gradient, a small one,
    one without a vocabulary; and a variable of TensorFlow's own.
    """
    ids = keras.Input((5,), dtype="int64")
    large = keras.layers.Embedding(200_000, 16, name="large")
    twice = keras.layers.Embedding(7_000, 32, name="twice")
    frozen = keras.layers.Embedding(9_000, 8, trainable=False, name="frozen")
    small = keras.layers.Embedding(100, 8, name="small")
    growing = kerasps.layers.DynamicEmbedding(8, name="growing")
    growing(np.array([[-1]]))
    assert (growing.num_rows, len(growing.rows([5])), list(growing.items())) == (0, 1, [])
    found = [
        growing(ids * -(10**9)),
        large(ids),
        twice(ids % 50),
        twice(ids % 7),
        frozen(ids % 90),
        small(ids % 100),
    ]
    flat = [keras.layers.Flatten()(x) for x in found]
    model = keras.Model(ids, keras.layers.Dense(1)(Scaled()(keras.layers.Concatenate()(flat))))
    model.compile(keras.optimizers.Adagrad(), "mse")
    return model, np.arange(BATCH * 5).reshape(BATCH, 5) ** 2 % 10_000


def many():
    """As many tables as share storages, in groups, with slots."""
    ids = keras.Input((12,), dtype="int32")
    columns = [keras.layers.Embedding(3_000 + n, 8, name=f"t{n}") for n in range(12)]
    flat = [layer(ids[:, n : n + 1]) for n, layer in enumerate(columns)]
    x = keras.layers.Flatten()(keras.layers.Concatenate()(flat))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Dense(8)(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model, np.arange(BATCH * 12).reshape(BATCH, 12) % 37


def chained():
    """Ids that are rows of another table: they are known a round trip later."""

    class Friends(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.friend = keras.layers.Embedding(9_000, 8, trainable=False)
            self.person = keras.layers.Embedding(9_000, 8)

        def call(self, ids):
            friends = keras.ops.cast(keras.ops.max(self.friend(ids), axis=-1) * 0, "int32")
            return self.person(ids) + self.person(friends)

    ids = keras.Input((2,), dtype="int32")
    x = keras.layers.Flatten()(Friends()(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model, np.arange(BATCH * 2).reshape(BATCH, 2)


MODELS = {make.__name__: make for make in (dense, tables, many, chained)}


def dataset_fn(x):
    """Each batch is the same, so that each step asks for as many rows."""
    y = np.ones((BATCH, 1), np.float32)
    return lambda context: tf.data.Dataset.from_tensors((x, y)).repeat()


def train(strategy, name):
    """Trains a model, and returns what plan and run have in common."""
    with strategy.scope():
        model, x = MODELS[name]()
    model.fit(kerasps.DatasetCreator(dataset_fn(x)), steps_per_epoch=STEPS, verbose=0)
    placement, load = strategy.placement(), strategy.load_report()
    looked_up = placement.looked_up

    def per_step(rate):
        return [round(getattr(task, rate) * load.seconds / load.steps, 3) for task in load]

    return {
        "num_variables": [task.num_variables for task in placement],
        "num_bytes": [task.num_bytes for task in placement],
        "pulled_bytes": per_step("bytes_read_per_second"),
        "pushed_bytes": per_step("bytes_written_per_second"),
        "rows_per_step": per_step("rows_read_per_second"),
        "tables": sorted(looked_up.tables),
        # Of rows that the run made; with a slot each.
        "grown_bytes": sum(
            2 * table.num_bytes for table in strategy.status().tables if "growing" in table.name
        ),
    }


def main():
    report, *names = sys.argv[1:]
    strategy = kerasps.ParameterServerStrategy(
        variable_partitioner=kerasps.MinSizePartitioner(min_shard_bytes=1 << 20)
    )
    found = {}
    for name in names:
        found[name] = train(strategy, name)
        keras.utils.clear_session()
        gc.collect()
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
