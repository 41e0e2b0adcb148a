"""Makes and trains a table of 4 million rows; run as a process of its own by test_large_table.py.

Prints one JSON line: what the coordinator's memory grew by, and where the table went.
"""

from __future__ import annotations

import resource

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps

NUM_ROWS, WIDTH = 4_000_000, 32


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def dataset_fn(context):
    ids = (
        np.random.default_rng(context.input_pipeline_id)
        .integers(0, NUM_ROWS, (64, 26))
        .astype("int32")
    )
    return tf.data.Dataset.from_tensor_slices((ids, np.ones([64, 1], "float32"))).repeat().batch(16)


def make_model(num_rows):
    layers = [
        keras.Input((26,), dtype="int32"),
        keras.layers.Embedding(num_rows, WIDTH),
        keras.layers.Flatten(),
    ]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=5)
    model.optimizer.build(model.trainable_variables)
    return model


with local_strategy(1, 2, partitioner=kerasps.MinSizePartitioner()) as (cluster, strategy):
    with strategy.scope():
        make_model(1000)  # what TensorFlow and Keras load with the first model is not the table's
        before = peak_bytes()
        model = make_model(NUM_ROWS)
    created = peak_bytes()
    table = model.layers[0].embeddings
    some = np.array([0, 1, 2_000_000, NUM_ROWS - 1])
    rows_before = keras.ops.convert_to_numpy(keras.ops.take(table, some, axis=0))
    history = model.fit(kerasps.DatasetCreator(dataset_fn), steps_per_epoch=40, epochs=2, verbose=0)
    report = {
        "grew_by_creating": created - before,
        "grew_by_training": peak_bytes() - before,
        "shards": [[shard.device, shard.shape.as_list()] for shard in table.shards],
        "bytes": [task.num_bytes for task in strategy.placement()],
        "std": float(rows_before.std()),
        "loss": history.history["loss"],
        "bytes_read": [
            task.bytes_read_per_second * strategy.load_report().seconds / 80
            for task in strategy.load_report()
        ],
    }
print_report(report)
