"""Pull and push on local devices: what a step gets, and what becomes of its gradients."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from kerasps.errors import KeraspsError
from kerasps.step.contract.change import Change, StateChange
from kerasps.step.phases.pull import PullMessage, PullPhase
from kerasps.step.phases.push import DevicePush, PushPhase
from kerasps.step.phases.push_message import StepChanges
from kerasps.step.phases.step_context import ReplicaInputs, StepContext, batch_inputs
from kerasps.step.phases.update_rules import Immediate
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.records.packing import Packing
from kerasps.step.records.specs import spec_of
from kerasps.step.rows.groups import grouping
from kerasps.step.rows.lookups import Round, plan_rounds
from kerasps.step.rows.row_places import RowPlaces
from kerasps.step.updates.fused import FusedVariables
from kerasps.variables import Shard, shards_in
from kerasps.variables.lanes import fences as fences_module
from kerasps.variables.lanes.fences import OPEN_LANE, Fences
from kerasps.variables.lanes.lane_table import NO_LANE, NUM_BINS, NUM_LANES, read_clock
from support.local_variables import (
    adding,
    compute_graph,
    inventory_of,
    local_variable,
    make_optimizer_local,
    outputs_of,
    patch_optimizers,
    replacing,
    update_of,
)

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
}
SHAPES = [(6, 2), (4,), (), (5, 3)]
_names = itertools.count()


@pytest.fixture(autouse=True)
def optimizers(monkeypatch):
    patch_optimizers(monkeypatch)


def values_of(shapes, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def lock(device):
    with tf.init_scope(), tf.device(device):
        return tf.raw_ops.MutexV2(container="", shared_name=f"test lock {device}")


def made_twice(make, values, num_shards=1, layout="mod"):
    """Return an optimizer of Keras's own and ours, each with variables of these values."""
    pair = []
    for _ in range(2):
        optimizer = make()
        optimizer.build([keras.Variable(value) for value in values])
        pair.append(optimizer)
    make_optimizer_local(pair[1], num_shards, layout)
    return pair


def changes_of(*updates, tables=(), fused=(), states=(), sparse_updates="lazy"):
    return StepChanges(updates, states, IdentitySet(tables), sparse_updates, fused)


class Lanes(dict):
    """The same lane on each device."""

    def __init__(self, lane):
        self._lane = lane

    def __getitem__(self, device):
        return tf.constant(self._lane)


def context(inventory, names, batch, lane=OPEN_LANE, asked=None):
    replicas = [ReplicaInputs({}, names, batch, ByIdentity())]
    return StepContext({}, replicas, Lanes(lane), asked=asked)


def push(changes, outputs, pulls=(), step=None, fences=None):
    """Have a step push `outputs`, from a graph, as a step graph does."""
    phase = PushPhase(changes, pulls, lock, Immediate(fences or Fences(lock)))
    if step is None:
        inventory = inventory_of()
        _, names, _ = compute_graph(inventory, None, lambda inputs: [])
        step = context(inventory, names, None)
    step.outputs = outputs
    phase.add_to(step)
    return phase


def assert_equal(plain, ours, **tolerance):
    # The iterations are shared state, which the compute phase moves and pushes as a difference.
    state = [
        (a, b)
        for a, b in zip(plain.variables, ours.variables, strict=True)
        if a.name not in ("iteration", "learning_rate")
    ]
    trained = zip(plain._trainable_variables, ours._trainable_variables, strict=True)
    for expected, actual in [*trained, *state]:
        np.testing.assert_allclose(
            actual.storage.numpy(), expected.numpy(), err_msg=expected.path, **tolerance
        )


# Messages


@pytest.mark.parametrize("counts", [[3], [0], [2, 0, 4], [0, 0], [1, 5]])
def test_a_message_that_asks_for_rows_arrives_as_it_was_sent(counts):
    ids = [np.arange(count, dtype=np.int32) * 7 + number for number, count in enumerate(counts)]
    message = PullMessage([tf.constant(counts)], [tf.constant(np.concatenate(ids))])
    packed = message.pack(len(counts))
    assert PullMessage.spec().is_compatible_with(packed)
    lengths, received = tf.function(PullMessage.unpack)(packed, len(counts))
    assert len(received) == len(ids)
    for actual, expected in zip(received, ids, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert (lengths is None) if len(counts) == 1 else (lengths.numpy().tolist() == counts)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_ps_knows_how_many_rows_of_some_shards_were_asked_for(is_told):
    # By index alone: nobody asks for what is in them.
    shards = [Shard(None, index) for index in range(5)]
    counts = [2, 0, 3, 1, 4]
    vectors = dict(zip(shards, [tf.zeros([count], tf.int32) for count in counts], strict=True))
    places = RowPlaces({})
    for part in (shards[:3], shards[3:]):  # two messages
        told = tf.constant([counts[shard.index] for shard in part])
        places.add(RowPlaces({s: vectors[s] for s in part}, told if is_told else None))
    assert list(places) == shards
    for of in (shards[:3], shards[1:3], shards[3:], shards[2:4], shards[3:2:-1], shards[::2]):
        assert places.counts(of).numpy().tolist() == [counts[shard.index] for shard in of]


@pytest.mark.parametrize("applied", [None, True])
def test_a_push_arrives_with_the_gradients_of_a_fused_variable_in_one(applied):
    values = values_of([(2, 3), (4,), (1,)])
    _, optimizer = made_twice(OPTIMIZERS["adam"], values)
    gradients = [tf.constant(g) for g in values_of([(2, 3), (4,), (1,)], seed=1)]
    update = update_of(
        optimizer, gradients, applied=None if applied is None else tf.constant(applied)
    )
    first, second, third = optimizer._trainable_variables
    # The third is read in another way too, so it is no part of the fused variable.
    fused = FusedVariables([update], IdentitySet([first, second]), IdentitySet())
    counter = local_variable(np.int64(2**40), trainable=False)
    flag = local_variable(np.array([True, False]), trainable=False)
    changes = changes_of(update, fused=fused.all, states=[adding(counter), replacing(flag)])
    (device,) = changes.devices
    on_device = changes.on(device)
    inventory = inventory_of()
    _, names, _ = compute_graph(inventory, None, lambda inputs: [])
    step = context(inventory, names, None)
    new_flag = tf.constant([False, True])
    sent = [Change(addend=tf.constant(3, tf.int64)), Change(addend=new_flag)]
    step.outputs = outputs_of(update, changes=sent)
    sent, received = (
        Packing(specs(clocked=False, numbered=False))
        for specs in (on_device.sent_specs, on_device.received_specs)
    )
    assert sent.carrier_specs == received.carrier_specs
    message = received.unpack(sent.pack(on_device.select(step)))
    (pushed,) = message.updates
    assert pushed.scalars.learning_rate == np.float32(0.1)
    assert [v.name for v in update.shared] == ["iteration", "learning_rate"]
    assert [float(value) for value in pushed.scalars.shared] == [0.0, np.float32(0.1)]
    assert pushed.scalars.clip_scale is None
    np.testing.assert_array_equal(
        pushed.fused[0], np.concatenate([np.ravel(g) for g in gradients[:2]])
    )
    np.testing.assert_array_equal(pushed.gradients[0], gradients[2])
    assert pushed.applied is None if applied is None else pushed.applied == 1.0
    assert message.changes[0].addend == 3
    np.testing.assert_array_equal(message.changes[1].addend, [False, True])
    assert on_device.updates[0].single == shards_in([third])


# Pull


@pytest.mark.parametrize("layout", ["mod", "div"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_pull_brings_dense_values_and_the_rows_that_are_looked_up(num_shards, layout):
    dense = [local_variable(v, num_shards if v.ndim else 1, layout) for v in values_of(SHAPES)]
    wholes = values_of([(10, 3), (8, 2)], seed=1)
    tables = [local_variable(whole, num_shards, layout) for whole in wholes]
    inventory = inventory_of(dense, tables)
    function, names, lookups = compute_graph(
        inventory, tf.TensorSpec([None], tf.int64), lambda i: [[i.batch], [i.batch // 2]]
    )
    rounds = plan_rounds(function, [names], lookups, dense, grouping([], "lazy"))
    pull = PullPhase(dense, rounds, [], {})
    batch = np.array([9, 4, 9, 0], np.int64)
    step = context(inventory, names, tf.constant(batch))
    pull.add_to(step)
    for variable, expected in zip(dense, values_of(SHAPES), strict=True):
        np.testing.assert_array_equal(step.values[variable], expected)
    for table, whole, ids in zip(tables, wholes, [batch, batch // 2], strict=True):
        found = step.replicas[0].tables[table]
        assert len(found.rows) == len(np.unique(ids))
        np.testing.assert_array_equal(tf.gather(found.rows, found.positions[0]), whole[ids])


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("num_tables", [1, 2])
def test_what_several_steps_ask_for_together_is_what_each_asks_for(num_tables, num_shards):
    wholes = values_of([(10, 3), (8, 2)])[:num_tables]
    tables = [local_variable(whole, num_shards) for whole in wholes]
    inventory = inventory_of(tables=tables)
    function, names, lookups = compute_graph(
        inventory,
        tf.TensorSpec([None], tf.int64),
        lambda inputs: [[inputs.batch], [inputs.batch // 2]][:num_tables],
    )
    rounds = plan_rounds(function, [names], lookups, [], grouping([], "lazy"))
    pull = PullPhase([], rounds, [], {})
    batches = [np.array(ids, np.int64) for ids in ([9, 4, 9, 0], [], [1], [5, 5, 6, 7, 8])]
    known = [batch_inputs([names], [tf.constant(batch)]) for batch in batches]
    for batch, asked in zip(batches, pull.ask_ahead({}, known), strict=True):
        step = context(inventory, names, tf.constant(batch), asked=asked)
        pull.add_to(step)
        assert {id(message) for message in step.messages.values()} == {
            id(message) for of_round in asked.values() for message in of_round.messages.values()
        }
        for table, whole, ids in zip(tables, wholes, [batch, batch // 2], strict=False):
            found = step.replicas[0].tables[table]
            assert len(found.rows) == len(np.unique(ids))
            np.testing.assert_array_equal(tf.gather(found.rows, found.positions[0]), whole[ids])


def test_what_follows_from_a_pulled_value_is_not_asked_for_ahead():
    (whole,) = values_of([(10, 3)])
    table, offset = local_variable(whole), local_variable(np.int64(3), trainable=False)
    inventory = inventory_of([offset], [table])
    function, names, lookups = compute_graph(
        inventory,
        tf.TensorSpec([None], tf.int64),
        lambda inputs: [[inputs.batch + inputs.pulled[0]]],
    )
    rounds = plan_rounds(function, [names], lookups, [offset], grouping([], "lazy"))
    pull = PullPhase([offset], rounds, [], {})
    batch = tf.constant([4, 0], tf.int64)
    (asked,) = pull.ask_ahead({}, [batch_inputs([names], [batch])])
    assert asked == {}
    step = context(inventory, names, batch, asked=asked)
    pull.add_to(step)
    found = step.replicas[0].tables[table]
    np.testing.assert_array_equal(tf.gather(found.rows, found.positions[0]), whole[[7, 3]])


def test_a_pull_takes_the_values_of_fused_variables_from_where_they_lie():
    values = values_of(SHAPES)
    _, optimizer = made_twice(OPTIMIZERS["sgd"], values)
    dense = optimizer._trainable_variables
    update = update_of(optimizer, [tf.zeros(v.shape) for v in values])
    fused = FusedVariables([update], IdentitySet(dense), IdentitySet())
    fused.load()
    (only,) = fused.all
    only.values.assign(only.values * 2.0)
    inventory = inventory_of(dense)
    function, names, lookups = compute_graph(inventory, None, lambda inputs: [])
    pull = PullPhase(
        dense, plan_rounds(function, [names], lookups, dense, grouping([], "lazy")), fused.all, {}
    )
    step = context(inventory, names, None)
    pull.add_to(step)
    for variable, value in zip(dense, values, strict=True):
        np.testing.assert_array_equal(step.values[variable], value * 2.0)
        np.testing.assert_array_equal(variable.storage, value)  # until they are stored
    fused.store()
    np.testing.assert_array_equal(dense[0].storage, values[0] * 2.0)


# Push


@pytest.mark.parametrize("layout", ["mod", "div"])
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_push_of_dense_gradients_is_what_the_optimizer_does(name, num_shards, layout):
    plain, ours = made_twice(OPTIMIZERS[name], values_of(SHAPES), num_shards, layout)
    for step in range(3):
        gradients = [tf.constant(g) for g in values_of(SHAPES, seed=step + 1)]
        update = update_of(ours, gradients)
        one = Change(addend=tf.constant(1, ours._iterations.storage.dtype))
        push(
            changes_of(update, states=[adding(ours._iterations)]),
            outputs_of(update, changes=[one]),
        )
        plain.apply(gradients)
    assert int(ours._iterations.storage) == int(plain._iterations.numpy()) == 3
    assert_equal(plain, ours, rtol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.01}],
    ids=str,
)
def test_a_push_of_sgd_is_one_kernel_with_the_bits_of_keras(arguments):
    shapes = [*SHAPES, (300, 70)]
    values = values_of(shapes)
    plain, ours = made_twice(lambda: keras.optimizers.SGD(0.1, **arguments), values)
    for step in range(3):
        gradients = [tf.constant(g) for g in values_of(shapes, seed=step + 1)]
        update = update_of(ours, gradients)
        push(changes_of(update), outputs_of(update))
        plain.apply(gradients)
    # Of decayed weights TensorFlow rounds another way in graphs, also without the kernel.
    assert_equal(plain, ours, rtol=1e-6 if "weight_decay" in arguments else 0)
    changes = changes_of(update).on(ours._trainable_variables[0].device)
    phase = DevicePush(changes.device, changes, [], lock, Immediate(Fences(lock)))
    kernels = [op.type for op in phase.function.graph.get_operations() if "Apply" in op.type]
    expected = "KerasMomentum" if "momentum" in arguments else "GradientDescent"
    assert kernels == [f"ResourceApply{expected}"] * len(shapes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_push_to_fused_variables_is_what_the_optimizer_does(name):
    plain, ours = made_twice(OPTIMIZERS[name], values_of(SHAPES))
    gradients = [tf.constant(g) for g in values_of(SHAPES, seed=1)]
    update = update_of(ours, gradients)
    variables = IdentitySet(ours._trainable_variables)
    fused = FusedVariables([update], variables, IdentitySet())
    assert [len(vector.shards) for vector in fused.all] == [len(SHAPES)]
    fused.load()
    push(changes_of(update, fused=fused.all), outputs_of(update))
    np.testing.assert_array_equal(
        ours._trainable_variables[0].storage, values_of(SHAPES)[0]
    )  # stale until stored
    fused.store()
    plain.apply(gradients)
    assert_equal(plain, ours, rtol=1e-6)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("sparse_updates", ["lazy", "exact"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_push_of_rows_updates_them_as_the_optimizer_does(name, sparse_updates, num_shards):
    (whole,) = values = values_of([(9, 2)])
    plain, ours = made_twice(OPTIMIZERS[name], values, num_shards)
    (table,) = ours._trainable_variables
    inventory = inventory_of(tables=[table])
    function, names, lookups = compute_graph(
        inventory, tf.TensorSpec([None], tf.int64), lambda inputs: [[inputs.batch]]
    )
    pull = PullPhase([], plan_rounds(function, [names], lookups, [], grouping([], "lazy")), [], {})
    ids = np.array([7, 2, 7, 4], np.int64)
    step = context(inventory, names, tf.constant(ids))
    pull.add_to(step)
    weights = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    found = step.replicas[0].tables[table]
    gradient = tf.math.unsorted_segment_sum(weights, found.positions[0], tf.shape(found.rows)[0])
    update = update_of(ours, [gradient])
    changes = changes_of(update, tables=[table], sparse_updates=sparse_updates)
    push(changes, outputs_of(update), pull.pulls, step)
    dense = np.zeros_like(whole)
    np.add.at(dense, ids, weights.numpy())
    plain.apply([tf.constant(dense)])
    assert_equal(plain, ours, rtol=1e-6)
    untouched = [row for row in range(9) if row not in ids]
    np.testing.assert_array_equal(table.storage.numpy()[untouched], whole[untouched])
    assert not np.allclose(table.storage.numpy()[ids], whole[ids])


@pytest.mark.parametrize(("sparse_updates", "moves"), [("lazy", False), ("exact", True)])
def test_rows_that_no_step_touched_keep_or_lose_their_momentum(sparse_updates, moves):
    (whole,) = values = values_of([(4, 2)])
    _, ours = made_twice(OPTIMIZERS["sgd"], values)
    (table,) = ours._trainable_variables
    ours.momentums[0].storage.assign(np.ones((4, 2), np.float32))
    inventory = inventory_of(tables=[table])
    function, names, lookups = compute_graph(
        inventory, tf.TensorSpec([None], tf.int64), lambda inputs: [[inputs.batch]]
    )
    pull = PullPhase([], plan_rounds(function, [names], lookups, [], grouping([], "lazy")), [], {})
    step = context(inventory, names, tf.constant([1], tf.int64))
    pull.add_to(step)
    update = update_of(ours, [tf.ones([1, 2])])
    changes = changes_of(update, tables=[table], sparse_updates=sparse_updates)
    push(changes, outputs_of(update), pull.pulls, step)
    changed = np.any(table.storage.numpy() != whole, axis=1)
    np.testing.assert_array_equal(changed, [moves, True, moves, moves])


@pytest.mark.parametrize("applied", [True, False])
def test_an_update_that_was_not_wanted_changes_nothing(applied):
    plain, ours = made_twice(OPTIMIZERS["adam"], values_of(SHAPES))
    gradients = [tf.constant(g) for g in values_of(SHAPES, seed=1)]
    update = update_of(ours, gradients, applied=tf.constant(applied))
    push(changes_of(update), outputs_of(update))
    if applied:
        plain.apply(gradients)
    assert_equal(plain, ours, rtol=1e-6)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_additions_are_added_and_values_assigned_shard_by_shard(num_shards):
    counts = local_variable(np.arange(7), num_shards, trainable=False)
    scale = local_variable(np.arange(7, dtype=np.float32), num_shards, trainable=False)
    changes = changes_of(states=[adding(counts), replacing(scale)])
    added, assigned = np.arange(7) * 10, np.arange(7, dtype=np.float32)[::-1].copy()
    sent = [Change(addend=tf.constant(added)), Change(addend=tf.constant(assigned))]
    push(changes, outputs_of(changes=sent))
    np.testing.assert_array_equal(counts.storage.numpy(), np.arange(7) * 11)
    np.testing.assert_array_equal(scale.storage.numpy(), assigned)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_moving_averages_of_one_factor_are_changed_as_one(num_shards):
    values = values_of([(7,), (5,), (), (2, 3)])
    variables = [local_variable(v, num_shards if v.ndim else 1, trainable=False) for v in values]
    states = [
        StateChange(v, 0, Change(scale=np.float32(scale)), Change(addend=spec_of(v)), False)
        for v, scale in zip(variables, (0.5, 0.5, 0.5, 0.25), strict=True)
    ]
    addends = values_of([(7,), (5,), (), (2, 3)], seed=1)
    changes = changes_of(states=states)
    push(changes, outputs_of(changes=[Change(addend=tf.constant(a)) for a in addends]))
    for variable, value, state, addend in zip(variables, values, states, addends, strict=True):
        expected = value * state.numbers.scale + addend
        np.testing.assert_allclose(variable.storage.numpy(), expected, rtol=1e-6)
    (on_device,) = [changes.on(device) for device in changes.devices]
    keys = [state.key_of_averages for state in on_device.states]
    assert keys.count((np.float32(0.5), tf.float32)) == 2 * num_shards


# Lanes


def pushing_in_lanes(num_lanes=NUM_LANES, redoes=False):
    """Return fences; what pushes 1 to a counter in a lane, and returns the sum; and the devices."""
    counter = local_variable(np.int64(0), trainable=False)
    changes = changes_of(states=[adding(counter)])
    fences, inventory = Fences(lock, num_lanes), inventory_of()
    _, names, _ = compute_graph(inventory, None, lambda inputs: [])
    phase = PushPhase(changes, (), lock, Immediate(fences))
    phase = phase.redoing() if redoes else phase

    def push_in(lane):
        step = context(inventory, names, None, lane)
        step.outputs = outputs_of(changes=[Change(addend=tf.constant(1, tf.int64))])
        phase.add_to(step)
        return int(counter.storage.numpy())

    return fences, push_in, changes.devices


@pytest.mark.parametrize("redoes", [False, True])
def test_a_push_is_applied_where_its_lane_is_open_and_counted(redoes):
    fences, push_in, devices = pushing_in_lanes(redoes=redoes)
    first, second = fences.open_lane(devices), fences.open_lane(devices)
    assert len({first, second, OPEN_LANE}) == 3
    assert [push_in(lane) for lane in (first, first, second)] == [1, 2, 3]
    assert fences.close_lane(first, devices) == (2,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a push was refused"):
        push_in(first)
    # Who was refused has not kept the lock.
    assert [push_in(lane) for lane in (second, OPEN_LANE)] == [4, 5]
    assert fences.close_lane(first, devices) == (2,)  # what was refused is not counted
    if redoes:
        assert push_in(NO_LANE) == 5
    assert fences.close_lane(second, devices) == (2,)


def test_a_lane_that_takes_the_place_of_another_is_open_and_empty():
    fences, push_in, devices = pushing_in_lanes(num_lanes=3)
    first, second = fences.open_lane(devices), fences.open_lane(devices)
    push_in(first)
    assert fences.close_lane(first, devices) == (1,)
    fences.give_back(second)
    fences.give_back(first)
    # Which was given back first goes first.
    third, fourth = fences.open_lane(devices), fences.open_lane(devices)
    assert len({first, second, third, fourth, OPEN_LANE}) == 5
    (((record,),),) = [fences.records([fourth], devices)]
    assert (record.applied, record.total, record.largest, record.counts.any()) == (0, 0, 0, False)
    assert [push_in(lane) for lane in (third, fourth, third)] == [2, 3, 4]
    # What comes late, in a lane that was closed or only given back, changes nothing.
    for lane in (first, second):
        with pytest.raises(tf.errors.InvalidArgumentError, match="a push was refused"):
            push_in(lane)
        assert fences.close_lane(lane, devices) == (0,)
        assert [
            [record.applied for record in records] for records in fences.records([lane], devices)
        ] == [[0]]
    assert push_in(fourth) == 5
    assert [fences.close_lane(lane, devices) for lane in (third, fourth)] == [(2,), (2,)]


def test_no_lane_is_given_to_two_and_none_free_is_an_error():
    fences, _, devices = pushing_in_lanes(num_lanes=3)
    first, _ = fences.open_lane(devices), fences.open_lane(devices)
    with pytest.raises(KeraspsError, match=r"No lane is free.*Received: 2 lanes, all in use"):
        fences.open_lane(devices)
    for _ in range(2):  # twice is as good as once
        fences.give_back(first)
    again = fences.open_lane(devices)
    fences.give_back(first)  # of another lane by now
    with pytest.raises(KeraspsError, match="No lane is free"):
        fences.open_lane(devices)
    [record] = fences.retire_lane(again, devices)
    assert record.applied == 0
    assert fences.open_lane(devices) not in (first, again)


def test_a_place_is_used_until_the_number_of_a_lane_is_no_int32(monkeypatch):
    monkeypatch.setattr(fences_module, "LANES_END", 3 * NUM_LANES)
    fences, push_in, devices = pushing_in_lanes(num_lanes=2)
    for count in (1, 2, 3):
        lane = fences.open_lane(devices)
        assert push_in(lane) == count
        fences.give_back(lane)
    with pytest.raises(KeraspsError, match="No lane is free"):
        fences.open_lane(devices)


def test_all_that_lanes_need_is_traced_when_the_first_is_opened(monkeypatch):
    """A function that is traced waits for all tasks, and lanes are closed when a worker hangs."""
    fences, _, devices = pushing_in_lanes(num_lanes=3)
    lane = fences.open_lane(devices)

    def no_more(self, function, *args):
        raise AssertionError(f"traced too late: {function}")

    monkeypatch.setattr(tf_context.Context, "add_c_function", no_more)
    fences.records([lane], devices)
    fences.retire_lane(lane, devices)
    for _ in range(3):
        lane = fences.open_lane(devices)
        fences.close_lane(lane, devices)
        fences.give_back(lane)
    assert lane >= NUM_LANES, "one that takes the place of another"


# Staleness


def test_a_push_counts_what_was_applied_since_its_pull():
    weight = local_variable(np.float32(0), trainable=False)
    inventory = inventory_of(pulled=[weight])
    fences = Fences(lock)
    changes = changes_of(states=[adding(weight)])
    tables = {device: fences.table(device) for device in changes.devices}
    clocks = {d: lambda table=table: read_clock(table.handle) for d, table in tables.items()}
    _, names, _ = compute_graph(inventory, None, lambda inputs: [])
    pull = PullPhase([weight], [Round([], [], None, [])], [], clocks)
    phase = PushPhase(changes, pull.pulls, lock, Immediate(fences))
    first, second = (fences.open_lane(changes.devices) for _ in range(2))

    def pulled(lane):
        step = context(inventory, names, None, lane)
        pull.add_to(step)
        step.outputs = outputs_of(changes=[Change(addend=tf.constant(1.0))])
        return step

    slow = pulled(first)
    for _ in range(40):
        phase.add_to(pulled(second))
    phase.add_to(slow)
    early, late = pulled(first), pulled(second)
    phase.add_to(late)
    phase.add_to(early)
    ((record, other),) = fences.records([first, second], changes.devices)
    assert (record.total, record.largest) == (41, 40)
    assert (record.counts[1], record.counts[NUM_BINS - 1], record.counts.sum()) == (1, 1, 2)
    assert (other.total, other.largest, other.counts[0], other.counts.sum()) == (0, 0, 41, 41)
    # What is done in a closed lane is not counted, and what it has counted before stays.
    fences.close_lane(first, changes.devices)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a push was refused"):
        phase.add_to(pulled(first))
    ((record,),) = fences.records([first], changes.devices)
    assert record.counts.sum() == 2
