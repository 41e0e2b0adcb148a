"""The functions that a step's assignments are found to be, and what a ps makes of them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from kerasps.step.changes.change_finder import find_form
from kerasps.step.changes.sources import Sources
from kerasps.step.contract.change import Change, StateChange
from kerasps.step.phases.joint_changes import JointChange
from support.local_variables import local_variable

V, X, ON, OFF = [2.0, 4.0, -2.0], [1.0, 5.0, -3.0], True, False


def found(function, old, *arguments):
    """The form of `function(old, *arguments)`, its value, and that of the form."""
    forms = []

    @tf.function(autograph=False)
    def step(old, *arguments):
        sources = Sources()
        sources.add(old, ("variable", 0))
        new = function(old, *arguments)
        forms.append(find_form(sources, ("variable", 0), new))
        return new, forms[-1].change.of(old)

    new, of_form = step(tf.constant(old), *map(tf.constant, arguments))
    return forms[-1], new.numpy(), of_form.numpy()


ADDITIONS = {
    "add": (lambda v, x: v + x, V, X),
    "count": (lambda v: v + 1, 3),
    "subtract": (lambda v, x: v - x, V, X),
    "add twice": (lambda v, x: v + x + x, V, X),
    "stacked": (lambda v, x: tf.reduce_sum(tf.stack([v, x]), 0), V, X),
    "cast": (lambda v: tf.cast(tf.cast(v, tf.int64) + 1, tf.int32), 3),
    "reshaped": (lambda v, x: tf.reshape(tf.reshape(v, [1, 3]) + x, [3]), V, X),
    "in a branch": (lambda v, x, c: tf.cond(c, lambda: v + x, lambda: v), V, X, ON),
    "not in a branch": (lambda v, x, c: tf.cond(c, lambda: v + x, lambda: v), V, X, OFF),
    "in branches": (
        lambda v, x, c: tf.cond(c, lambda: tf.cond(c, lambda: v + x, lambda: v - 1.0), lambda: v),
        V,
        X,
        ON,
    ),
    "where": (lambda v, x, c: tf.where(c, v + x, v), V, X, ON),
    "scattered": (lambda v, i: tf.tensor_scatter_nd_add(v, i, [1.0, 1.0]), V, [[0], [0]]),
    "cancelled": (lambda v: v * 2.0 - v, V),
}
AVERAGES = {
    "keras": (lambda v, x: v * 0.9 + x * (1.0 - 0.9), V, X),
    "towards": (lambda v, x: v + (x - v) * 0.1, V, X),
    "away": (lambda v, x: v - (v - x) * 0.1, V, X),
    "momentum": (lambda v, x, m: m * v + (1.0 - m) * x, V, X, 0.9),
    "divided": (lambda v, x: (v + x) / 3.0, V, X),
    "negative": (lambda v, x: x - v, V, X),
    "float16": (
        lambda v, x: tf.cast(tf.cast(v, tf.float16) * 0.5 + tf.cast(x, tf.float16), tf.float32),
        V,
        X,
    ),
    "in a branch": (
        lambda v, x, c: tf.cond(c, lambda: v * 0.9 + 0.1 * x, lambda: v),
        V,
        X,
        ON,
    ),
}
BOUNDS = {
    "maximum": (lambda v, x: ops.maximum(v, x), V, X),
    "minimum": (lambda v, x: ops.minimum(v, x), V, X),
    "clip": (lambda v: ops.clip(v, -1.0, 3.0), V),
    "tf.clip": (lambda v: tf.clip_by_value(v, -1.0, 3.0), V),
    "relu": (tf.nn.relu, V),
    "x > v": (lambda v, x: tf.where(x > v, x, v), V, X),
    "v > x": (lambda v, x: tf.where(v > x, v, x), V, X),
    "v < x": (lambda v, x: tf.where(v < x, v, x), V, X),
    "x <= v": (lambda v, x: ops.where(x <= v, x, v), V, X),
    "computed twice": (lambda v, x: ops.where(ops.max(x) > v, ops.max(x), v), V, X),
    "stacked": (lambda v, x: tf.reduce_max(tf.stack([v, x]), 0), V, X),
    "end to end": (lambda v, x: tf.reduce_max(tf.concat([[v], x], 0)), 2.0, X),
    "in a branch": (lambda v, x, c: tf.cond(c, lambda: ops.maximum(v, x), lambda: v), V, X, ON),
    "or": (lambda v, x: tf.logical_or(v, x), [ON, OFF], [OFF, OFF]),
    "and": (lambda v, x: tf.logical_and(v, x), [ON, ON], [ON, OFF]),
    "scattered": (lambda v, i: tf.tensor_scatter_nd_max(v, i, [1.0, 7.0]), V, [[0], [0]]),
}
VALUES = {
    "value": (lambda v, x: x * 2.0, V, X),
    "norm": (lambda v: v / tf.norm(v), V),
    "square": (lambda v: v * v, V),
    "rolled": (lambda v: tf.roll(v, 1, 0), V),
    "queue": (lambda v, x: tf.concat([x[:1], v[:-1]], 0), V, X),
    "and its tanh": (lambda v: v + tf.tanh(v), V),
    "like it": (lambda v, x: tf.zeros_like(v) + x, V, X),
}
IN_PLACES = {
    "first batch": (lambda v, x, c: tf.where(c, v, x), V, X, OFF),
    "later batch": (lambda v, x, c: tf.where(c, v, x), V, X, ON),
    "zeros alone": (lambda v, x: tf.where(v == 0.0, x, v), [0.0, 1.0, 0.0], X),
    "first in a branch": (lambda v, x, c: tf.cond(c, lambda: v, lambda: x), V, X, OFF),
    "flag": (lambda v, c: tf.cond(c, lambda: True, lambda: v), OFF, ON),
    "rows": (lambda v, i: tf.tensor_scatter_nd_update(v, i, [1.0, 7.0]), V, [[0], [1]]),
    "slice": (lambda v: ops.slice_update(v, [1], [9.0]), V),
    "no number": (lambda v, x, c: tf.where(c, v, x), [np.nan] * 3, X, OFF),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, cases in (
            ("addition", ADDITIONS),
            ("average", AVERAGES),
            ("bound", BOUNDS),
            ("value", VALUES),
            ("places", IN_PLACES),
        )
        for name in cases
    ],
)
def test_an_assignment_is_found_to_be(kind, name):
    cases = {
        "addition": ADDITIONS,
        "average": AVERAGES,
        "bound": BOUNDS,
        "value": VALUES,
        "places": IN_PLACES,
    }
    form, new, of_form = found(*cases[kind][name])
    np.testing.assert_allclose(new, of_form, rtol=1e-6)
    change = form.change
    assert change.only_replaces == (kind == "value")
    assert form.replaces == (kind in ("value", "places"))
    if kind == "addition":
        assert change.only_adds
        assert form.is_exact
    elif kind == "bound":
        assert (change.scale, change.addend) == (None, None)
        assert change.low is not None or change.high is not None
        assert form.is_exact
    elif kind == "average":
        assert change.scale is not None
        assert form.is_exact
    # A function of another value, which another worker has pushed meanwhile.
    if kind in ("addition", "average") and name not in ("in branches",):
        other = tf.constant(cases[kind][name][1]).numpy() + 10
        moved = found(cases[kind][name][0], other, *cases[kind][name][2:])
        assert moved[0].change.numbers() == change.numbers()
        np.testing.assert_allclose(moved[1], moved[2], rtol=1e-3)


def test_clipping_after_other_changes_is_kept_in_bounds():
    form, new, of_form = found(lambda v, x: -2.0 * ops.clip(v + x, -1.0, 1.0) + 1.0, V, X)
    np.testing.assert_allclose(new, of_form)
    assert (form.change.scale, form.change.low, form.change.high) == (-2.0, -1.0, 3.0)


def joined(form_of, *pushes, shape=(3,), old=0.0):
    """The value of a variable after a joint of pushes with these arguments."""
    variable = local_variable(np.full(shape, old, np.float32), trainable=False)
    records = []
    changes = []
    for arguments in pushes:

        @tf.function(autograph=False)
        def step(old, *arguments):
            sources = Sources()
            sources.add(old, ("variable", 0))
            form = find_form(sources, ("variable", 0), form_of(old, *arguments))
            change, tensors = StateChange.of(variable, 0, form.change, replaces=form.replaces)
            changes.append(change)
            return tensors

        tensors = step(variable.storage.read_value(), *map(tf.constant, arguments))
        records.append((changes[-1], tensors))
    change = records[0][0]
    joint = JointChange(change, change.sent)
    for _ in range(2):  # a second joint finds no rest of the first
        for _, tensors in records:
            joint.add(tensors)
        result = joint.joined(tf.constant(len(records))).filled_from(change.numbers)
        joint.clear()
        new = result.of(variable.storage.read_value()).numpy()
    by_replicas = change.joined([tensors for _, tensors in records])
    of_replicas = by_replicas.filled_from(change.numbers).of(variable.storage.read_value())
    np.testing.assert_allclose(of_replicas, new, rtol=1e-6)
    return new


def test_a_joint_takes_the_mean_of_additions_and_averages():
    np.testing.assert_allclose(joined(lambda v, x: v + x, (X,), (V,)), [1.5, 4.5, -2.5])
    average = joined(lambda v, x: v * 0.5 + x, (X,), (V,), old=4.0)
    np.testing.assert_allclose(average, [3.5, 6.5, -0.5])


def test_a_joint_takes_the_largest_of_maxima_and_the_smallest_of_minima():
    np.testing.assert_allclose(joined(ops.maximum, (X,), (V,)), [2.0, 5.0, 0.0])
    np.testing.assert_allclose(joined(ops.minimum, (X,), (V,)), [0.0, 0.0, -3.0])


def test_of_values_in_a_joint_the_last_stands_where_it_was_assigned():
    np.testing.assert_allclose(joined(lambda v, x: x * 1.0, (X,), (V,)), V)

    def first(v, x, is_first):
        return tf.where(is_first, x, v)

    for pushes in ([(X, ON), (V, OFF)], [(V, OFF), (X, ON)], [(V, ON), (X, ON)]):
        np.testing.assert_allclose(joined(first, *pushes), X)


def test_a_keras_layer_that_assigns_is_known():
    """The operations of batch normalisation are those of a moving average."""
    layer = keras.layers.BatchNormalization(momentum=0.75)
    layer.build((None, 3))

    def new_mean(v, x):
        return v * layer.momentum + ops.mean(x, 0) * (1.0 - layer.momentum)

    form, *_ = found(new_mean, V, [X, X])
    assert form.change.scale == 0.75
    assert form.change.low is form.change.high is None
    assert isinstance(form.change, Change)
