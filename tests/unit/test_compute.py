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


def test_a_variable_that_is_used_whole_is_pulled_whole():
    weights = matrix()
    step = Traced(lambda batch: [tf.reduce_sum(batch * weights.value)], 3.0)
    assert list(step.inventory.pulled) == [weights]
    assert step.num_traces == 2
    assert step.run().logs[0] == 3.0 * 28.0


def test_what_is_expected_and_not_touched_is_not_pulled():
    weights, other = matrix(), matrix()
    step = Traced(lambda batch: [weights.value[0, 1]], 0, expected=[weights, other])
    assert list(step.inventory.pulled) == [weights]


@pytest.mark.parametrize("expected", [True, False])
def test_a_variable_that_is_read_by_rows_only_is_a_table(expected):
    weights = matrix()
    ids = [3, 1, 3]
    step = Traced(lambda batch: [weights.take(batch)], ids, expected=[weights] if expected else [])
    assert list(step.inventory.tables.items()) == [(weights, 1)]
    assert len(step.inventory.pulled) == 0
    np.testing.assert_array_equal(step.run(ids).logs[0], [[6, 7], [2, 3], [6, 7]])


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


@pytest.mark.parametrize("place", ["beside", "loop"])
def test_a_table_that_is_used_in_another_way_too_is_read_whole(place):
    weights = matrix()

    def body(batch):
        rows = weights.take(batch)
        if place == "beside":
            return [rows, tf.reduce_sum(weights.value)]
        total = tf.while_loop(
            lambda i, _: i < 3, lambda i, t: (i + 1, t + weights.take(i)), (0, tf.zeros(2))
        )[1]
        return [rows, total]

    step = Traced(body, [3, 1])
    assert list(step.inventory.pulled) == [weights]
    assert len(step.inventory.tables) == 0
    rows, total = step.run().logs
    np.testing.assert_array_equal(rows, [[6, 7], [2, 3]])
    np.testing.assert_array_equal(total, 28.0 if place == "beside" else [6, 9])


def test_each_look_up_of_a_table_is_counted():
    weights = matrix()
    step = Traced(lambda batch: [weights.take(batch), weights.take(batch + 1)], [0, 1])
    assert step.inventory.tables[weights] == 2


# What a step assigns


def changed(step, outputs, values=None):
    """The values of the variables that a step changes, after its changes."""
    values = [c.variable._value for c in step.phase.changes] if values is None else values
    return [
        sent.filled_from(change.numbers).of(tf.constant(value, change.variable.storage.dtype))
        for change, sent, value in zip(step.phase.changes, outputs.changes, values, strict=True)
    ]


def test_a_counter_is_pushed_as_an_addition_and_a_flag_as_a_value():
    counter = local_variable(np.int64(40), trainable=False)
    flag = local_variable(np.array(True), trainable=False, dtype="bool")

    def body(batch):
        counter.assign_add(batch)
        counter.assign(counter.value * 2)
        flag.assign(False)
        return [counter.value]

    step = Traced(body, tf.constant(2, tf.int64))
    assert [change.variable for change in step.phase.changes] == [counter, flag]
    outputs = step.run()
    assert outputs.logs[0] == 84
    assert changed(step, outputs) == [84, False]
    # Another worker has pushed meanwhile: what the step added is doubled, and so is the rest.
    assert changed(step, outputs, [50, False]) == [104, False]


@pytest.mark.parametrize("taken", [True, False])
def test_what_is_assigned_inside_a_condition_leaves_the_step(taken):
    counter = local_variable(np.int64(40), trainable=False)

    def add():
        counter.assign_add(5)

    step = Traced(lambda batch: tf.cond(batch, add, lambda: None), taken)
    assert step.inventory.scratch
    assert changed(step, step.run(), [100]) == [105 if taken else 100]


def test_seeds_are_counted_and_other_assignments_are_not():
    seeds = local_variable(
        np.array([1, 0], np.uint32), trainable=False, name="seed_generator_state", dtype="uint32"
    )
    counter = local_variable(np.int64(0), trainable=False)

    def body(batch):
        for _ in range(3):
            counter.assign_add(1)
        for _ in range(2):
            seeds.assign(seeds.value + np.array([0, 1]))
        return [tf.cast(seeds.value, tf.int64)]

    step = Traced(body, 0)
    assert list(step.inventory.seeds) == [seeds]
    assert list(step.phase.values.draws.items()) == [(seeds, 2)]
    np.testing.assert_array_equal(step.run().logs[0], [1, 2])


def test_a_generator_that_draws_in_a_loop_is_given_many_seeds():
    seeds = local_variable(
        np.array([1, 0], np.uint32), trainable=False, name="seed_generator_state", dtype="uint32"
    )

    def draw(number):
        seeds.assign(seeds.value + np.array([0, 1]))
        return [number + 1]

    step = Traced(lambda batch: tf.while_loop(lambda n: n < batch, draw, [0]), 3)
    assert step.phase.values.draws[seeds] == SEEDS_PER_STEP_OF_A_LOOP


def test_a_value_of_another_shape_is_refused():
    weights = matrix()
    with pytest.raises(ValueError, match=r"Expected: \(4, 2\)[^$]*Received: \(3,\)"):
        Traced(lambda batch: weights.assign(tf.zeros(3)), 0)


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


@pytest.mark.parametrize("clipnorm", [None, 1.0])
def test_an_update_is_recorded_with_clipped_gradients_and_moved_iterations(clipnorm):
    weights = matrix()
    optimizer = built(keras.optimizers.SGD(0.25, clipnorm=clipnorm), weights)
    traced = traced_update(optimizer, weights, 3.0)
    (update,) = traced.phase.updates
    assert update.variables == [weights]
    outputs = traced.run()
    (tensors,) = outputs.updates
    norm = 3.0 * np.sqrt(8)
    expected = 3.0 if clipnorm is None else 3.0 / norm
    np.testing.assert_allclose(tensors.gradients[0], np.full((4, 2), expected), rtol=1e-6)
    assert tensors.scalars.learning_rate == 0.25
    assert tensors.applied is None
    # The ps are to see the iterations before this update, and to count it.
    shared = dict(zip([v.name for v in update.shared], tensors.scalars.shared, strict=True))
    assert shared["iteration"] == 0
    assert len(traced.inventory.ahead) == 0


def test_a_step_that_reads_a_variable_after_its_update_sees_the_new_value():
    weights = matrix()
    optimizer = built(keras.optimizers.SGD(0.25), weights)

    def body(update, value):
        update()
        return [weights.value]

    traced = traced_update(optimizer, weights, 2.0, body)
    assert list(traced.inventory.ahead) == [weights]
    outputs = traced.run()
    before = np.arange(8, dtype=np.float32).reshape(4, 2)
    np.testing.assert_allclose(outputs.logs[0], before - 0.25 * 2.0)
    # The ps is sent the gradient; the worker's own update is not pushed as well.
    assert len(outputs.changes) == 0
    np.testing.assert_allclose(outputs.updates[0].gradients[0], np.full((4, 2), 2.0))


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


@pytest.mark.parametrize("value", [2.0, -2.0])
def test_an_update_inside_a_condition_says_whether_it_is_wanted(value):
    weights = matrix()
    optimizer = built(keras.optimizers.SGD(0.25), weights)

    def body(update, value):
        tf.cond(value > 0, lambda: update(), lambda: None)

    traced = traced_update(optimizer, weights, value, body)
    (tensors,) = traced.run().updates
    assert bool(tensors.applied) == (value > 0)
    if value > 0:
        np.testing.assert_allclose(tensors.gradients[0], np.full((4, 2), 2.0))
        assert tensors.scalars.learning_rate == 0.25


def test_an_update_inside_a_loop_is_refused():
    weights = matrix()
    optimizer = built(keras.optimizers.SGD(0.25), weights)

    def body(update, value):
        def turn(i):
            update()
            return [i + 1]

        tf.while_loop(lambda i: i < 2, turn, [0])

    with pytest.raises(UnsupportedError, match=r"inside a `tf.while_loop`[^$]*outside loops"):
        traced_update(optimizer, weights, 1.0, body)


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
