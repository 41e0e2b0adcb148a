"""What an execution is given and what it returns, as records."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from kerasps.step.records.packing import Packing
from kerasps.step.tracing.state import StepState, Ticket, WorkerVariables
from kerasps.variables.keras.joins import Join

SPECS = StepState(
    steps=tf.TensorSpec([], tf.int64),
    metrics=[tf.TensorSpec([]), tf.TensorSpec([3])],
    rows=[tf.TensorSpec([4], tf.int64)],
    logs=[tf.TensorSpec([])],
)

SUMS = [Join.SUM, Join.SUM]


def state(steps, scale=1.0):
    return StepState(
        steps=tf.constant(steps, tf.int64),
        metrics=[tf.constant(scale), tf.constant([1.0, 2.0, 3.0]) * scale],
        rows=[tf.range(4, dtype=tf.int64) * steps],
        logs=[tf.constant(scale * 10)],
    )


def assert_state(actual, expected):
    assert isinstance(actual, StepState)
    tf.nest.map_structure(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("dtype", [tf.float32, tf.int32, tf.bool])
def test_maxima_and_minima_are_joined_on_the_way(dtype):
    spec = tf.TensorSpec([2], dtype)
    specs = StepState(tf.TensorSpec([], tf.int64), [spec, spec], [], [])
    joins = [Join.MAXIMUM, Join.MINIMUM]
    packing = Packing(specs)
    variables = WorkerVariables(packing, 1, joins)
    handles = variables.make(tf.constant(Ticket(1, [0]).to_array()))
    values = tf.cast(tf.constant([[0, 1], [1, 1]]), dtype)
    for row in values:
        variables.add(handles, StepState(tf.constant(1, tf.int64), [row, row], [], []))
    collected = packing.unpack(variables.collect(handles))
    np.testing.assert_array_equal(collected.metrics[0], tf.cast([1, 1], dtype))
    np.testing.assert_array_equal(collected.metrics[1], tf.cast([0, 1], dtype))
    nothing = packing.unpack(variables.collect(handles))
    for join, state, start in zip(joins, collected.metrics, nothing.metrics, strict=True):
        np.testing.assert_array_equal(join.arrays(start.numpy(), state.numpy()), state)


def test_totals_stay_on_the_worker_until_they_are_collected():
    packing = Packing(SPECS)
    variables = WorkerVariables(packing, 2, SUMS)
    ticket = tf.constant(Ticket(7, [1, 2]).to_array())

    @tf.function
    def advance(handles, steps):
        variables.add(handles, state(1)._replace(steps=steps))
        return variables.ticket(handles)

    handles = variables.make(ticket)
    for steps in (2, 3):
        read = advance(handles, tf.constant(steps, tf.int64))
        np.testing.assert_array_equal(read, ticket)
    collected = packing.unpack(variables.collect(handles))
    assert collected.steps == 5
    np.testing.assert_array_equal(collected.metrics[1], [2.0, 4.0, 6.0])
    assert_state(packing.unpack(variables.collect(handles)), SPECS.start(SUMS))
    variables.give(handles, tf.constant(Ticket(8, [0, 0]).to_array()))
    np.testing.assert_array_equal(variables.ticket(handles), [8, 0, 0])


def test_what_is_made_ready_again_has_a_ticket_and_totals_of_its_own():
    packing = Packing(SPECS)
    variables = WorkerVariables(packing, 1, SUMS)
    before, after = (variables.make(tf.constant(Ticket(lane, [0]).to_array())) for lane in (1, 2))
    variables.add(before, state(1))
    assert_state(packing.unpack(variables.collect(after)), SPECS.start(SUMS))
    assert [int(variables.ticket(handles)[0]) for handles in (before, after)] == [1, 2]
