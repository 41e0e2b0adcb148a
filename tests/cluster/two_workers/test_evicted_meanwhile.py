"""A row is given up while a step has it: the gradient makes it anew, and reaches no other row."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import kerasps
from kerasps.layers import DynamicEmbedding, Eviction
from support.gates import wait_until_exists
from support.unit_gradients import Outputs, Sum

HELD_ID, BATCH_SIZE, STEPS = 7, 8, 60
PASSES, WAITS, OPENS = range(3)


class Gate(keras.layers.Layer):
    """Passes rows on that were pulled; a batch may wait for another one, which opens."""

    def __init__(self, path, **options):
        super().__init__(**options)
        self.gate = str(path)

    def call(self, rows, marks):
        def open_it():
            with tf.control_dependencies([rows]):
                opened = tf.io.write_file(self.gate, "")
            with tf.control_dependencies([opened]):
                return tf.constant(0)

        def wait():
            with tf.control_dependencies([rows]):
                return wait_until_exists(self.gate)

        mark = tf.reduce_max(marks)
        opened = tf.cond(tf.equal(mark, OPENS), open_it, lambda: tf.constant(0))
        waited = tf.cond(tf.equal(mark, WAITS), wait, lambda: tf.constant(0))
        with tf.control_dependencies([opened, waited]):
            return tf.identity(rows)


def batches(context):
    """Worker 0 has a batch of one id, and is held; meanwhile, worker 1 has new ids."""
    is_first = context.input_pipeline_id == 0
    new = np.arange(1000, 1000 + STEPS * BATCH_SIZE).reshape(STEPS, BATCH_SIZE, 1)
    ids = np.full((1, BATCH_SIZE, 1), HELD_ID) if is_first else new
    marks = np.full(len(ids), WAITS if is_first else PASSES)
    if not is_first:
        marks[-1] = OPENS
    marks = np.broadcast_to(marks[:, None, None], ids.shape).astype("int32")
    return tf.data.Dataset.from_tensor_slices(((ids, marks), ids))


def test_a_gradient_makes_the_row_anew_that_was_given_up_meanwhile(strategy, tmp_path):
    with strategy.scope():
        ids, marks = keras.Input((1,), dtype="int64"), keras.Input((1,), dtype="int32")
        table = DynamicEmbedding(1, "zeros", max_rows=40, eviction=Eviction("lru"))
        gated = Gate(tmp_path / "open")(table(ids), marks)
        model = keras.Model([ids, marks], Sum()(gated))
        model.compile(keras.optimizers.SGD(1.0), Outputs())
    # Each update of a row takes 1 from it. Before, it has two.
    one = np.full((BATCH_SIZE, 1), HELD_ID)
    for _ in range(2):
        model.train_on_batch((one, np.zeros_like(one)), one)
    np.testing.assert_array_equal(table.rows([HELD_ID]), [[-2.0]])
    model.fit(kerasps.DatasetCreator(batches), steps_per_epoch=STEPS + 1, verbose=0)
    figures = table.figures()
    assert figures["resurrected"] == 1
    assert figures["evicted"] == figures["inserted"] - figures["rows"] > STEPS
    np.testing.assert_array_equal(table.rows([HELD_ID]), [[-1.0]])
    found = np.concatenate([ids for ids, _ in table.items()])
    # Each other row has had one update.
    others = found[found != HELD_ID]
    np.testing.assert_allclose(table.rows(others), np.full((len(others), 1), -1 / BATCH_SIZE))
