"""Names that are given again, and executions that do the same."""

from __future__ import annotations

import pytest
import tensorflow as tf

from kerasps.step.running import kept_graphs
from kerasps.step.running.kept_graphs import KeptGraphs
from kerasps.variables.storage.names import Names


def test_names_are_given_again_in_the_order_in_which_they_were_given_first():
    names = Names()
    first = [names.claim("a") for _ in range(3)]
    assert len(set(first)) == 3
    other = names.claim("b")
    for name in (first[2], first[0], first[1]):
        names.give_back("a", name)
    assert [names.claim("a") for _ in range(3)] == first
    assert names.claim("a") not in [*first, other]


def test_names_that_were_retired_are_not_given_again():
    names = Names()
    free, taken = names.claim("a"), names.claim("a")
    names.give_back("a", free)
    names.retire()
    names.give_back("a", taken)
    assert names.claim("a") not in (free, taken)


def traced(
    name="x",
    factor=2.0,
    device="CPU:0",
    swap=False,
    inner_factor=3.0,
    outputs=1,
    turned=False,
    random=False,
    texts=(),
    captured=None,
):
    def inner(x):
        with tf.name_scope(name):
            return x * inner_factor

    inner_function = tf.function(
        inner, autograph=False, experimental_attributes={"_noinline": True}
    )

    def step(x, y):
        with tf.device(device), tf.name_scope(name):
            first, second = (y, x) if swap else (x, y)
            result = tf.cond(
                tf.reduce_sum(first) > 0,
                lambda: inner_function(first) - second,
                lambda: second * factor,
            )
            if random:
                result += tf.random.normal([2], seed=None if random == "without a seed" else 1)
            for text in texts:
                tf.debugging.assert_less(result, 1.0, text)
            if captured is not None:
                result *= captured
            results = [result, result - factor]
        return [*reversed(results)] if turned else [*results, *[result] * (outputs - 1)]

    spec = tf.TensorSpec([2], tf.float32)
    return tf.function(step, autograph=False).get_concrete_function(spec, spec)


def test_what_differs_in_the_names_of_operations_and_functions_is_shared():
    executions = KeptGraphs()
    first = executions.shared(traced())
    assert executions.shared(traced(name="other")) is first


@pytest.mark.parametrize(
    "difference",
    [
        {"factor": 4.0},
        {"device": "CPU:1"},
        {"swap": True},
        {"inner_factor": 5.0},
        {"outputs": 2},
        {"turned": True},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_what_does_something_else_is_not_shared(difference):
    executions = KeptGraphs()
    executions.shared(traced())
    other = traced(**difference)
    assert executions.shared(other) is other


def test_random_numbers_that_count_on_in_an_operation_are_not_shared():
    executions = KeptGraphs()
    executions.shared(traced(random=True))
    other = traced(random=True)
    assert executions.shared(other) is other


def test_random_numbers_without_a_seed_are_shared():
    executions = KeptGraphs()
    first = executions.shared(traced(random="without a seed"))
    assert executions.shared(traced(random="without a seed")) is first


def test_what_captures_the_same_values_is_shared(monkeypatch):
    executions = KeptGraphs()
    values = [tf.constant([1.0, 2.0]), tf.constant([1.0, 2.0]), tf.constant([1.0, 3.0])]
    first, same, other = (traced(captured=value) for value in values)
    assert executions.shared(first) is first
    assert executions.shared(same) is first
    assert executions.shared(other) is other
    monkeypatch.setattr(kept_graphs, "MAX_CAPTURED_BYTES", 4)
    assert executions.shared(same) is same


def test_what_captures_a_resource_is_not_shared():
    def execution():
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        lookup = tf.function(table.lookup, autograph=False)
        return lookup.get_concrete_function(tf.TensorSpec([], tf.int64))

    executions = KeptGraphs()
    executions.shared(execution())
    other = execution()
    assert executions.shared(other) is other


def test_what_says_something_else_where_it_fails_is_not_shared():
    executions = KeptGraphs()
    executions.shared(traced(texts=["in layer_1"]))
    other = traced(texts=["in layer_2"])
    assert executions.shared(other) is other


def test_the_executions_used_last_are_kept(monkeypatch):
    executions = KeptGraphs()
    first, second = traced(factor=10.0), traced(factor=11.0)
    size = sum(len(function.node_def) for function in first.graph.as_graph_def().library.function)
    size += len(first.graph.as_graph_def().node)
    monkeypatch.setattr("kerasps.step.running.kept_graphs.MAX_OPERATIONS_KEPT", 2 * size)
    executions.shared(first)
    executions.shared(second)
    assert executions.shared(traced(factor=10.0)) is first
    third = executions.shared(traced(factor=12.0))
    assert executions.shared(traced(factor=10.0)) is first
    assert executions.shared(traced(factor=12.0)) is third
    again = traced(factor=11.0)
    assert executions.shared(again) is again
