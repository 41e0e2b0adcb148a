"""Pushes on local devices: changes of variables, lanes, and how stale updates are.

What a step gets, and what becomes of its gradients, `tests/cluster/one_worker` compares with plain
Keras.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from kerasps.errors import KeraspsError
from kerasps.step.contract.change import Change, StateChange
from kerasps.step.phases.pull import PullPhase
from kerasps.step.phases.push import DevicePush, PushPhase
from kerasps.step.phases.push_message import StepChanges
from kerasps.step.phases.step_context import ReplicaInputs, StepContext
from kerasps.step.phases.update_rules import Immediate
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.records.specs import spec_of
from kerasps.step.rows.lookups import Round
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

SHAPES = [(6, 2), (4,), (), (5, 3)]


@pytest.fixture(autouse=True)
def optimizers(monkeypatch):
    patch_optimizers(monkeypatch)


def values_of(shapes, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def lock(device):
    with tf.init_scope(), tf.device(device):
        return tf.raw_ops.MutexV2(container="", shared_name=f"test lock {device}")


def made_twice(make, values):
    """Return an optimizer of Keras's own and ours, each with variables of these values."""
    pair = []
    for _ in range(2):
        optimizer = make()
        optimizer.build([keras.Variable(value) for value in values])
        pair.append(optimizer)
    make_optimizer_local(pair[1])
    return pair


def changes_of(*updates, states=()):
    return StepChanges(updates, states, IdentitySet(), "lazy", ())


class Lanes(dict):
    """The same lane on each device."""

    def __init__(self, lane):
        self._lane = lane

    def __getitem__(self, device):
        return tf.constant(self._lane)


def context(names, lane=OPEN_LANE):
    return StepContext({}, [ReplicaInputs({}, names, None, ByIdentity())], Lanes(lane))


def push(changes, outputs):
    """Have a step push `outputs`, from a graph, as a step graph does."""
    _, names, _ = compute_graph(inventory_of(), None, lambda inputs: [])
    step = context(names)
    step.outputs = outputs
    PushPhase(changes, (), lock, Immediate(Fences(lock))).add_to(step)


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


# Pull


# Push


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
        step = context(names, lane)
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
        step = context(names, lane)
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
