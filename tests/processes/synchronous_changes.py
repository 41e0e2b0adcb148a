"""Follows a table while a joint waits for one of two workers; run by test_sync.py.

Prints one JSON line.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import keras
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from support.gates import wait_while_exists
from support.row_readers import Reader, rows_of

STEPS, BATCH_SIZE, HELD_STEP = 10, 8, 5
GATE = Path(tempfile.mkdtemp()) / "closed"


def batches(context):
    """Each id is in one joint. Worker 1 waits in a step until the gate is open."""
    worker = context.input_pipeline_id
    first = worker * 10**6

    def batch(number):
        is_held = tf.equal(number, HELD_STEP) & (worker == 1)
        with tf.control_dependencies([wait_while_exists(GATE, is_held)]):
            ids = first + number * BATCH_SIZE + tf.range(BATCH_SIZE, dtype=tf.int64)
        return ids[:, None], tf.ones([BATCH_SIZE, 1])

    return tf.data.Dataset.range(STEPS).map(batch)


GATE.touch()
with local_strategy(num_workers=2, update_mode="sync") as (cluster, strategy):
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        table = kerasps.layers.DynamicEmbedding(4)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
        model.compile("adam", "mse")
    reader = Reader(table)

    def follow():
        # The push of worker 0 makes its rows, and waits for that of worker 1.
        while HELD_STEP * BATCH_SIZE not in reader.read().rows:
            pass
        GATE.unlink()

    thread = threading.Thread(target=follow)
    thread.start()
    model.fit(kerasps.DatasetCreator(batches), epochs=1, steps_per_epoch=2 * STEPS, verbose=0)
    thread.join()
    reader.read()
    expected = rows_of(table)
    different = [key for key, row in expected.items() if reader.rows.get(key) != row]
    print_report({"different": different, "more": sorted(reader.rows.keys() - expected.keys())})
