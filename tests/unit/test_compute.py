"""The compute phase, traced without a cluster: what variables are in a step, and what leaves it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.compute.compute import Compute
from kerasps.step.compute.step_values import SEEDS_PER_STEP_OF_A_LOOP
from kerasps.step.contract.compute_messages import ComputeInputs
from kerasps.step.contract.inventory import Inventory
from kerasps.step.phases.compute_phase import ComputePhase
from kerasps.step.phases.step_context import ReplicaInputs, StepContext
from kerasps.step.records.identity import ByIdentity
from kerasps.variables import anonymous_handle, entering
from support.local_variables import local_variable, make_optimizer_local, patch_optimizers

MAX_TRACES = 8


@pytest.fixture(autouse=True)
def optimizers(monkeypatch):
    patch_optimizers(monkeypatch)


class Traced:
    """A step `body(batch)`, traced until nothing in it is news."""

    def __init__(self, body, batch, *, optimizers=(), expected=(), presumed=()):
        self.inventory = Inventory()
        self.num_traces = 0
        self._batch = tf.convert_to_tensor(batch)
        for variable in expected:
            self.inventory.add(variable)
        self.inventory.presume(presumed, None)
        for _ in range(MAX_TRACES):
            self.num_traces += 1
            self.inventory.grew = False
            self.inventory.add_optimizers(optimizers)
            self._function = self._trace(body)
            self.phase.settle_reads()
            self.inventory.settle_reads(self.phase.whole, self.phase.lookups)
            if not self.inventory.grew:
                return
        raise AssertionError("The traces never settle.")

    def _trace(self, body):
        def compute(*arguments):
            inputs = ComputeInputs(*arguments)
            self.phase = Compute(self.inventory, inputs)
            with entering(self.phase):
                logs = body(inputs.batch)
            return self.phase.outputs()._replace(logs=[] if logs is None else logs)

        spec = tf.TensorSpec.from_tensor(self._batch)
        return tf.function(compute, autograph=False).get_concrete_function(
            *ComputeInputs.specs(spec, self.inventory)
        )

    def run(self, ids=None):
        """Run the step as a step graph does; `ids` are the rows that are there of the one table."""
        inventory, phase = self.inventory, self.phase
        captures = list(self._function.captured_inputs)
        compute = ComputePhase(self._function, captures, inventory, phase.updates, "CPU:0", False)

        @tf.function
        def run():
            scratch = {
                key: anonymous_handle(spec.shape, spec.dtype)
                for key, spec in inventory.scratch.items()
            }
            start = ByIdentity(
                (v, v._value.read_value())
                for v in [*inventory.pulled, *inventory.metrics, *inventory.seeds]
            )
            replica = ReplicaInputs(scratch, phase.inputs, self._batch, start)
            step = StepContext({}, [replica], {})
            for table in inventory.tables:
                rows, positions = tf.unique(tf.constant(ids))
                values = tf.gather(table._value, rows)
                step.add_table(table, values, [positions], [tf.gather(values, positions)])
            compute.add_to(step)
            return step.outputs

        return run()


def matrix(rows=4, **kwargs):
    return local_variable(np.arange(rows * 2, dtype=np.float32).reshape(rows, 2), **kwargs)


def built(optimizer, *variables):
    optimizer.build(list(variables))
    make_optimizer_local(optimizer)
    return optimizer


# How variables reach a step


def test_the_weight_of_an_embedding_is_a_table_from_the_first_trace_on():
    weights, whole, both, unused = (matrix(name="embeddings") for _ in range(4))
    presumed = [weights, whole, both, unused]
    ids = [3, 1, 3]
    step = Traced(lambda batch: [weights.take(batch)], ids, presumed=[weights])
    assert (list(step.inventory.tables.items()), step.num_traces) == ([(weights, 1)], 1)
    np.testing.assert_array_equal(step.run(ids).logs[0], [[6, 7], [2, 3], [6, 7]])

    def body(batch):
        rows = weights.take(batch) + weights.take(batch + 0) + both.take(batch)
        return [rows, tf.reduce_sum(whole.value), tf.reduce_sum(both.value)]

    step = Traced(body, [3, 1], presumed=presumed)
    assert list(step.inventory.tables.items()) == [(weights, 2)]
    assert {id(v) for v in step.inventory.pulled} == {id(whole), id(both)}


# What a step assigns


def test_a_generator_that_draws_in_a_loop_is_given_many_seeds():
    seeds = local_variable(
        np.array([1, 0], np.uint32), trainable=False, name="seed_generator_state", dtype="uint32"
    )

    def draw(number):
        seeds.assign(seeds.value + np.array([0, 1]))
        return [number + 1]

    step = Traced(lambda batch: tf.while_loop(lambda n: n < batch, draw, [0]), 3)
    assert step.phase.values.draws[seeds] == SEEDS_PER_STEP_OF_A_LOOP


# What its optimizers record


def apply(step_of, optimizer, variables, gradients):
    """Call `optimizer.apply` as the hooks do."""
    step_of().meet(optimizer)
    step_of().apply_gradients(optimizer, gradients, variables)


def traced_update(optimizer, weights, batch, body=None):
    holder = {}

    def whole(value):
        def update():
            phase = holder["traced"].phase
            apply(lambda: phase, optimizer, [weights], [value * tf.ones([4, 2])])

        return (body or (lambda update, value: update()))(update, value)

    traced = Traced.__new__(Traced)
    holder["traced"] = traced
    traced.__init__(whole, batch, optimizers=[optimizer])
    return traced


def test_what_a_step_adds_before_an_update_is_pushed_beside_the_update():
    weights = matrix()
    optimizer = built(keras.optimizers.SGD(0.25), weights)

    def body(update, value):
        weights.assign_add(tf.ones([4, 2]))
        update()
        weights.assign_add(10.0 * tf.ones([4, 2]))
        return [weights.value]

    traced = traced_update(optimizer, weights, 2.0, body)
    outputs = traced.run()
    before = np.arange(8, dtype=np.float32).reshape(4, 2)
    np.testing.assert_allclose(outputs.logs[0], before + 1.0 - 0.25 * 2.0 + 10.0)
    # One comes before the update on the ps, the other after it.
    assert [change.after for change in traced.phase.changes] == [0, 1]
    for sent, addend in zip(outputs.changes, (1.0, 10.0), strict=True):
        np.testing.assert_allclose(sent.addend, np.full((4, 2), addend))


def test_an_optimizer_that_updates_elsewhere_is_refused():
    class Elsewhere(keras.optimizers.SGD):
        def _backend_update_step(self, grads, trainable_variables, learning_rate):
            """Update nothing where an update belongs."""

    weights = matrix()
    optimizer = built(Elsewhere(0.25), weights)
    with pytest.raises(UnsupportedError, match="updates variables in `_backend_update_step`"):
        traced_update(optimizer, weights, 1.0)


def looked_up(traced, variable):
    return {
        "table": variable in traced.inventory.tables,
        "whole": variable in traced.inventory.pulled,
    }


VALUES = {
    "gather": (lambda v, ids: tf.gather(v.value, ids), True),
    "embedding_lookup": (lambda v, ids: tf.nn.embedding_lookup(v.value, ids), True),
    "converted": (lambda v, ids: tf.gather(tf.convert_to_tensor(v), ids), True),
    "twice": (lambda v, ids: tf.gather(v.value, ids) + tf.gather(v.value, ids), True),
    "columns": (lambda v, ids: tf.gather(v.value, ids % 2, axis=1), False),
    "multiplied": (lambda v, ids: tf.gather(2 * v.value, ids), False),
    "in a loop": (lambda v, ids: tf.map_fn(lambda i: v.value[i], ids, "float32"), False),
    "rows and all": (lambda v, ids: tf.gather(v.value, ids) + tf.reduce_sum(v.value), False),
}


@pytest.mark.parametrize("way", VALUES)
def test_value_of_which_rows_alone_are_used_makes_a_table(way):
    read, is_table = VALUES[way]
    variable = local_variable(np.arange(8, dtype="float32").reshape(4, 2), name="table")
    traced = Traced(lambda ids: [tf.reduce_sum(read(variable, ids))], np.array([1, 3]))
    assert looked_up(traced, variable) == {"table": is_table, "whole": not is_table}


def test_value_that_is_read_for_nothing_is_not_read():
    variable = local_variable(np.ones((4, 2), "float32"), name="table")

    def body(ids):
        assert variable.value.shape == (4, 2)
        return [tf.reduce_sum(ids)]

    traced = Traced(body, np.array([1, 3]), expected=[variable])
    assert looked_up(traced, variable) == {"table": False, "whole": False}


def test_value_that_is_returned_is_read_whole():
    variable = local_variable(np.ones((4, 2), "float32"), name="table")
    traced = Traced(lambda ids: [variable.value], np.array([1, 3]), expected=[variable])
    assert looked_up(traced, variable) == {"table": False, "whole": True}


def test_shapes_alone_say_nothing_of_how_a_variable_is_read():
    variable = local_variable(np.ones((4, 2), "float32"), name="table")

    def body(ids):
        keras.layers.Lambda(lambda x: variable.value * x).compute_output_spec(
            keras.KerasTensor((4, 2))
        )
        return [tf.reduce_sum(variable.take(ids))]

    traced = Traced(body, np.array([1, 3]), expected=[variable])
    assert looked_up(traced, variable) == {"table": True, "whole": False}
