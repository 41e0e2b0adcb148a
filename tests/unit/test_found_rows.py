"""What a look-up finds, and what its gradient is a sum of."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from kerasps.step.compute.found_rows import rows_found
from kerasps.step.contract.compute_messages import TableRows

ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
POSITIONS = [np.array([3, 1, 3, 0], np.int32), np.array([1, 2], np.int32)]


def table(rows):
    positions = [tf.constant(places) for places in POSITIONS]
    return TableRows(rows, positions, [tf.gather(ROWS, places) for places in POSITIONS])


def in_graph(function, *arguments):
    return tf.function(function, autograph=False)(*arguments)


@pytest.mark.parametrize(
    ("shape", "spec"), [((4,), [None]), ((2, 2), [None, 2]), ((2, 2), [None, None]), ((4,), None)]
)
def test_a_look_up_finds_rows_in_the_shape_of_its_ids(shape, spec):
    @tf.function(input_signature=[tf.TensorSpec(spec, tf.int64)], autograph=False)
    def find(ids):
        return rows_found(table(tf.constant(ROWS)), 0, ids)

    found = find(tf.zeros(shape, tf.int64))
    np.testing.assert_array_equal(found, ROWS[POSITIONS[0]].reshape(*shape, 2))


def test_a_gradient_is_that_of_a_gather_also_of_a_gradient():
    def differentiate(look_up):
        def compute(rows):
            with tf.GradientTape() as outer:
                outer.watch(rows)
                with tf.GradientTape() as inner:
                    inner.watch(rows)
                    loss = tf.reduce_sum(look_up(rows, 0) ** 3) + tf.reduce_sum(
                        tf.sin(look_up(rows, 1))
                    )
                gradient = tf.convert_to_tensor(inner.gradient(loss, rows))
                penalty = tf.reduce_sum(gradient**2)
            return gradient, tf.convert_to_tensor(outer.gradient(penalty, rows))

        return in_graph(compute, tf.constant(ROWS))

    # The rows are what was found in them.
    ours = differentiate(
        lambda rows, number: rows_found(table(rows), number, tf.constant(POSITIONS[number]))
    )
    plain = differentiate(lambda rows, number: tf.gather(rows, POSITIONS[number]))
    for found, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
