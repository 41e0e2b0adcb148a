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
PASSES, IS_HELD, BEGINS, OPENS = range(4)


class Gates(keras.layers.Layer):
    """Passes rows on that were pulled. One batch is held until another one opens, and the first of
    the other worker waits until it is.
    """

    def __init__(self, directory, **options):
        super().__init__(**options)
        self.held, self.opened = str(directory / "held"), str(directory / "opened")

    def call(self, rows, marks):
        def write(path):
            with tf.control_dependencies([rows]):
                written = tf.io.write_file(path, "")
            with tf.control_dependencies([written]):
                return tf.constant(0)

        def hold():
            with tf.control_dependencies([write(self.held)]):
                return wait_until_exists(self.opened)

        acts = {
            PASSES: lambda: tf.constant(0),
            IS_HELD: hold,
            BEGINS: lambda: wait_until_exists(self.held),
            OPENS: lambda: write(self.opened),
        }
        with tf.control_dependencies([tf.switch_case(tf.reduce_max(marks), acts)]):
            return tf.identity(rows)


def batches(context):
    """Worker 0 has a batch of one id, and is held with its row; then worker 1 has new ids."""
    is_first = context.input_pipeline_id == 0
    new = np.arange(1000, 1000 + STEPS * BATCH_SIZE).reshape(STEPS, BATCH_SIZE, 1)
    ids = np.full((1, BATCH_SIZE, 1), HELD_ID) if is_first else new
    marks = np.full(len(ids), IS_HELD if is_first else PASSES)
    if not is_first:
        marks[0], marks[-1] = BEGINS, OPENS
    marks = np.broadcast_to(marks[:, None, None], ids.shape).astype("int32")
    return tf.data.Dataset.from_tensor_slices(((ids, marks), ids))


def test_a_gradient_makes_the_row_anew_that_was_given_up_meanwhile(strategy, tmp_path):
    with strategy.scope():
        ids, marks = keras.Input((1,), dtype="int64"), keras.Input((1,), dtype="int32")
        table = DynamicEmbedding(1, "zeros", max_rows=40, eviction=Eviction("lru"))
        gated = Gates(tmp_path)(table(ids), marks)
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
