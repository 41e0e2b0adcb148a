"""Trains with a `variable_partitioner` and plainly; run as a process of its own by
test_partitioner.py.

Prints one JSON line: how far the two models are apart, and what became of a bare `tf.Variable`.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps

partitioners = tf.distribute.experimental.partitioners
partitioner = {
    "fixed": partitioners.FixedShardsPartitioner(2),
    # 120 bytes make two shards of 40 or more, 24 bytes make one.
    "min_size": partitioners.MinSizePartitioner(min_shard_bytes=40, max_shards=2),
}[sys.argv[1]]
VALUE = np.arange(30, dtype="float32").reshape(10, 3)


def make_model():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=5)
    return model


def dataset():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1] * x[:, 1:2])).repeat().batch(16)


def largest_difference(first, second):
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


def describe_shards(shards):
    return {
        "shapes": [shard.shape.as_list() for shard in shards],
        "devices": [shard.device for shard in shards],
    }


def describe(variable):
    return {"type": type(variable).__name__} | describe_shards(
        getattr(variable, "variables", [variable])
    )


with local_strategy(1, 2, partitioner=partitioner) as (cluster, strategy):
    keras.utils.set_random_seed(7)
    plain = (
        make_model()
    )  # not before the strategy: connecting takes away what TensorFlow holds by then
    before = plain.get_weights()
    plain_history = plain.fit(dataset(), steps_per_epoch=20, shuffle=False, verbose=0)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = make_model()
        table = tf.Variable(VALUE, name="table")
        lazy = tf.Variable(lambda: tf.constant(VALUE), name="lazy")
        small = tf.Variable(VALUE[:2], name="small")
    report = {"difference_before": largest_difference(before, model.get_weights())}
    history = model.fit(
        kerasps.DatasetCreator(lambda context: dataset()), steps_per_epoch=20, verbose=0
    )
    report |= {
        "learned": largest_difference(before, model.get_weights()),
        "difference": largest_difference(plain.get_weights(), model.get_weights()),
        "optimizer_difference": largest_difference(
            [v.numpy() for v in plain.optimizer.variables],
            [v.numpy() for v in model.optimizer.variables],
        ),
        "loss_difference": abs(history.history["loss"][0] - plain_history.history["loss"][0]),
        "iterations": int(model.optimizer.iterations.numpy()),
        "weights": [describe_shards(weight.shards) for weight in model.weights],
        "table": describe(table),
        "lazy": describe(lazy),
        "small": describe(small),
    }
    for name, variable in (("table", table), ("lazy", lazy)):
        report[name]["value_is_right"] = bool(np.array_equal(tf.convert_to_tensor(variable), VALUE))
    table.assign(VALUE + 1)
    report["table"]["takes_values"] = bool(np.array_equal(tf.convert_to_tensor(table), VALUE + 1))
    report["table"]["rows"] = tf.nn.embedding_lookup(table, [0, 9]).numpy().tolist()
    report["placed"] = [
        [name for name in task.names if "table" in name] for task in strategy.placement()
    ]
    try:
        kerasps.ParameterServerStrategy(cluster.cluster_resolver)
    except ValueError as exc:
        report["second_strategy"] = [type(exc).__name__, str(exc)]
    history = model.fit(
        kerasps.DatasetCreator(lambda context: dataset()), steps_per_epoch=5, verbose=0
    )
    report["first_still_trains"] = len(history.history["loss"])
print_report(report)
