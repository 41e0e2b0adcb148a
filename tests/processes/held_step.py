"""Kills a worker while it holds a step, and looks at what the ps have applied; run as a process of
its own by test_promises.py.

    python tests/processes/held_step.py FOLDER STEPS_PER_EXECUTION

A step of worker 1 has pulled, says so by the file `held`, and waits while the file `closed` is
there, which goes after the kill. Each weight is minus the number of its updates. Prints one JSON
line behind `REPORT `.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from support.gates import wait_while_exists
from support.unit_gradients import Ids, Outputs, Sum

FOLDER, STEPS_PER_EXECUTION = Path(sys.argv[1]), int(sys.argv[2])
HELD, CLOSED = FOLDER / "held", FOLDER / "closed"
NUM_EXAMPLES, BATCH_SIZE, STEPS, EPOCHS = 400, 4, 100, 2


class Gate(keras.layers.Layer):
    """Passes rows on; holds the batch whose mark is set until the gate is open."""

    def call(self, rows, marks):
        def hold():
            # The rows are here: the step has pulled.
            with tf.control_dependencies([rows]):
                held = tf.io.write_file(str(HELD), "")
            with tf.control_dependencies([held]):
                return wait_while_exists(CLOSED, tf.constant(True))

        waited = tf.cond(tf.reduce_any(marks > 0), hold, lambda: tf.constant(0))
        with tf.control_dependencies([waited]):
            return tf.identity(rows)


def dataset_fn(context):
    ids = np.arange(NUM_EXAMPLES, dtype="int32")[:, None]
    dataset = tf.data.Dataset.from_tensor_slices((ids, ids)).repeat().batch(BATCH_SIZE)

    def marked(number, batch):
        is_held = (number == 8) & (context.input_pipeline_id == 1)
        return (batch[0], tf.fill([BATCH_SIZE, 1], tf.cast(is_held, tf.int32))), batch[1]

    return dataset.enumerate().map(marked)


def kill_the_holder(cluster):
    while not HELD.exists():
        time.sleep(0.01)
    cluster.kill("worker", 1)
    cluster.restart("worker", 1)
    CLOSED.unlink()


with local_strategy(table_min_bytes=0) as (cluster, strategy):
    with strategy.scope():
        ids, marks = (keras.Input((1,), dtype="int32") for _ in range(2))
        rows = keras.layers.Embedding(NUM_EXAMPLES, 1, embeddings_initializer="zeros")(ids)
        model = keras.Model([ids, marks], Sum()(Gate()(rows, marks)))
        # The sum over the batch, so that each row and weight has a gradient of 1.
        model.compile(
            keras.optimizers.SGD(1.0),
            Outputs(reduction="sum"),
            metrics=[Ids()],
            steps_per_execution=STEPS_PER_EXECUTION,
        )
    CLOSED.touch()
    killer = threading.Thread(target=kill_the_holder, args=(cluster,))
    killer.start()
    data = kerasps.DatasetCreator(dataset_fn)
    history = model.fit(data, epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0).history
    killer.join()
    table, *weights = model.trainable_variables
    report = {
        "iterations": int(model.optimizer.iterations.numpy()),
        "updates": sorted({float(-n) for weight in weights for n in np.ravel(weight.numpy())}),
        "rows": float(-table.numpy().sum()),
        "history": {name: history[name] for name in ("batches", "examples")},
    }
    print_report(report)
