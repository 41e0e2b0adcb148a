"""What a look-up finds, and what its gradient is a sum of."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from kerasps.step.compute.found_rows import GradientSums, rows_found
from kerasps.step.contract.compute_messages import TableRows
from kerasps.step.records.identity import ByIdentity

TABLE = "the table"
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


def test_of_no_ids_no_rows_are_found():
    def find(rows):
        table_rows = TableRows(rows, [tf.zeros([0], tf.int32)], [tf.zeros([0, 2])])
        with tf.GradientTape() as tape:
            tape.watch(rows)
            loss = tf.reduce_sum(rows_found(table_rows, 0, tf.zeros([2, 0], tf.int32)))
        return tf.convert_to_tensor(tape.gradient(loss, rows))

    np.testing.assert_array_equal(in_graph(find, tf.constant(ROWS)), np.zeros((4, 2)))


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


@pytest.mark.parametrize("numbers", [[0], [1], [0, 1], [0, 0]])
def test_the_addends_of_a_gradient_are_known(numbers):
    def compute(rows):
        table_rows = table(rows)
        sums = GradientSums(ByIdentity([(TABLE, table_rows)]))
        with tf.GradientTape() as tape:
            tape.watch(rows)
            loss = sum(
                tf.reduce_sum(rows_found(table_rows, number, table_rows.positions[number]))
                * (factor + 1.0)
                for factor, number in enumerate(numbers)
            )
        gradient = tape.gradient(loss, rows)
        dense = sums.dense(gradient)
        known, addends = sums.addends(dense, TABLE)
        assert sorted(known) == numbers
        assert sums.addends(dense * 1.0, TABLE) is None
        assert sums.addends(dense, "another table") is None
        positions = tf.concat([table_rows.positions[number] for number in known], 0)
        return dense, tf.math.unsorted_segment_sum(tf.concat(addends, 0), positions, 4)

    dense, summed = in_graph(compute, tf.constant(ROWS))
    np.testing.assert_array_equal(dense, summed)


def test_a_gradient_that_is_more_than_look_ups_has_no_known_addends():
    def compute(rows):
        table_rows = table(rows)
        sums = GradientSums(ByIdentity([(TABLE, table_rows)]))
        with tf.GradientTape() as tape:
            tape.watch(rows)
            found = rows_found(table_rows, 0, table_rows.positions[0])
            loss = tf.reduce_sum(found) + tf.reduce_sum(rows**2)
        gradient = sums.dense(tape.gradient(loss, rows))
        assert sums.addends(gradient, TABLE) is None
        assert sums.dense(None) is None
        return gradient

    expected = 2 * ROWS
    np.add.at(expected, POSITIONS[0], 1.0)
    np.testing.assert_array_equal(in_graph(compute, tf.constant(ROWS)), expected)
