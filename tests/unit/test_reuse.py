"""Names that are given again, and executions that do the same."""

from __future__ import annotations

import pytest
import tensorflow as tf

from kerasps.step.running import kept_graphs
from kerasps.step.running.kept_graphs import KeptGraphs
from kerasps.step.running.message_texts import OtherWords
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


def shared(executions, graph):
    return executions.shared(graph, OtherWords())


def test_what_differs_in_the_names_of_operations_and_functions_is_shared():
    executions = KeptGraphs()
    first = shared(executions, traced())
    assert shared(executions, traced(name="other")) is first


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
    shared(executions, traced())
    other = traced(**difference)
    assert shared(executions, other) is other


def test_random_numbers_that_count_on_in_an_operation_are_not_shared():
    executions = KeptGraphs()
    shared(executions, traced(random=True))
    other = traced(random=True)
    assert shared(executions, other) is other


def test_random_numbers_without_a_seed_are_shared():
    executions = KeptGraphs()
    first = shared(executions, traced(random="without a seed"))
    assert shared(executions, traced(random="without a seed")) is first


def test_what_captures_the_same_values_is_shared(monkeypatch):
    executions = KeptGraphs()
    values = [tf.constant([1.0, 2.0]), tf.constant([1.0, 2.0]), tf.constant([1.0, 3.0])]
    first, same, other = (traced(captured=value) for value in values)
    assert shared(executions, first) is first
    assert shared(executions, same) is first
    assert shared(executions, other) is other
    monkeypatch.setattr(kept_graphs, "MAX_CAPTURED_BYTES", 4)
    assert shared(executions, same) is same


def test_what_captures_a_resource_is_not_shared():
    def execution():
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        lookup = tf.function(table.lookup, autograph=False)
        return lookup.get_concrete_function(tf.TensorSpec([], tf.int64))

    executions = KeptGraphs()
    shared(executions, execution())
    other = execution()
    assert shared(executions, other) is other


def error_of(graph, value):
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        graph(tf.constant([value, value]), tf.constant([0.0, 0.0]))
    return caught.value


@pytest.mark.parametrize(
    "text", ["in 'layer_7'", 'a "text"\n[b] \\ \x01', "é", "[in layer_1]", "in layer_10"]
)
def test_what_differs_in_messages_is_shared_and_says_its_own(text):
    executions, words = KeptGraphs(), OtherWords()
    first = shared(executions, traced(texts=["in layer_1", "second of layer_1"]))
    other = traced(texts=[text, "second"])
    assert executions.shared(other, words) is first
    said = words.say(error_of(first, 5.0))
    expected = error_of(other, 5.0).message
    assert (
        said.message.partition("assertion failed: ")[2].splitlines()[0]
        == (expected.partition("assertion failed: ")[2].splitlines()[0])
    )
    assert "layer_1]" not in said.message.replace(text, "")
    # Of the model that it was built for, it says what it said.
    unchanged = error_of(first, 5.0)
    assert OtherWords().say(unchanged) is unchanged


def test_texts_that_are_the_same_in_one_graph_alone_are_not_shared():
    executions = KeptGraphs()
    shared(executions, traced(texts=["a", "b"]))
    other = traced(texts=["c", "c"])
    assert shared(executions, other) is other


def test_a_text_that_would_stand_for_two_is_not_shared():
    executions, words = KeptGraphs(), OtherWords()
    shared(executions, traced(texts=["a"]))
    assert executions.shared(traced(texts=["b"]), words) is not None
    shared(executions, traced(texts=["a"], factor=3.0))
    other = traced(texts=["c"], factor=3.0)
    assert executions.shared(other, words) is other


def test_a_text_that_is_also_a_result_is_not_shared():
    def execution(text):
        def step(x):
            said = tf.constant(text)
            tf.debugging.assert_less(x, 1.0, said)
            return said

        spec = tf.TensorSpec([], tf.float32)
        return tf.function(step, autograph=False).get_concrete_function(spec)

    executions = KeptGraphs()
    shared(executions, execution("a"))
    other = execution("b")
    assert shared(executions, other) is other


def test_the_executions_used_last_are_kept(monkeypatch):
    executions = KeptGraphs()
    first, second = traced(factor=10.0), traced(factor=11.0)
    size = sum(len(function.node_def) for function in first.graph.as_graph_def().library.function)
    size += len(first.graph.as_graph_def().node)
    monkeypatch.setattr("kerasps.step.running.kept_graphs.MAX_OPERATIONS_KEPT", 2 * size)
    shared(executions, first)
    shared(executions, second)
    assert shared(executions, traced(factor=10.0)) is first
    third = shared(executions, traced(factor=12.0))
    assert shared(executions, traced(factor=10.0)) is first
    assert shared(executions, traced(factor=12.0)) is third
    again = traced(factor=11.0)
    assert shared(executions, again) is again
