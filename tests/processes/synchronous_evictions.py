"""Three workers train a table that gives up rows, by synchronous updates; run by test_sync.py.

Rows begin with zeros and the smallest norm goes first: so a row of an open joint, which has no
gradient yet, would go before all others. Each id comes in one batch. Prints one JSON line.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from kerasps.layers import DynamicEmbedding, Eviction
from support.unit_gradients import Outputs, Sum

BATCH_SIZE, STEPS, MAX_ROWS = 8, 60, 100


def batches(context):
    first = 1_000_000 * (1 + context.input_pipeline_id)
    ids = first + np.arange(STEPS * BATCH_SIZE).reshape(STEPS, BATCH_SIZE, 1)
    return tf.data.Dataset.from_tensor_slices((ids, ids))


with local_strategy(3, 1, update_mode="sync") as (cluster, strategy):
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        eviction = Eviction("norm", low=0.5)
        table = DynamicEmbedding(1, "zeros", max_rows=MAX_ROWS, eviction=eviction)
        model = keras.Model(ids, Sum()(table(ids)))
        model.compile(keras.optimizers.SGD(1.0), Outputs())
    model.fit(kerasps.DatasetCreator(batches), steps_per_epoch=3 * STEPS, verbose=0)
    rows = [rows for _, rows in table.items()]
    figures = table.figures()
    print_report(
        {
            "iterations": int(model.optimizer.iterations.numpy()),
            "values": np.unique(np.concatenate(rows)).tolist(),
            **{name: figures[name] for name in ("rows", "inserted", "evicted", "refused_for_room")},
        }
    )
