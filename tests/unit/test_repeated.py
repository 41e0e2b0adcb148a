"""The pass of a dataset that repeats without end, found in its graph."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.inputs.dataset_graphs import dataset_graph
from kerasps.inputs.make_input import as_input
from kerasps.inputs.repeated import one_pass

UNKNOWN = tf.data.UNKNOWN_CARDINALITY


def numbers():
    return tf.data.Dataset.range(12)


def options():
    chosen = tf.data.Options()
    chosen.threading.private_threadpool_size = 2
    chosen.deterministic = False
    return chosen


def add(x):
    return x + 1


FOUND = {
    "batch, repeat": (lambda: numbers().batch(5).repeat(), 3),
    "repeat, batch": (lambda: numbers().repeat().batch(4), 3),
    "batches of batches": (lambda: numbers().repeat().batch(2).batch(3, True), 2),
    "shuffle": (lambda: numbers().shuffle(12).repeat(), 12),
    "map and prefetch": (lambda: numbers().repeat().map(add).prefetch(2), 12),
    "parallel": (
        lambda: numbers().repeat().map(add, num_parallel_calls=2).batch(4, num_parallel_calls=2),
        3,
    ),
    "options": (lambda: numbers().batch(4).repeat().with_options(options()), 3),
    "unknown length": (lambda: numbers().filter(lambda x: x > 2).batch(5).repeat(), UNKNOWN),
    "counted before": (lambda: numbers().repeat(2).repeat(), 24),
    "draws without seeds": (
        lambda: numbers().map(lambda x: tf.random.uniform([])).repeat(),
        12,
    ),
}
LEFT = {
    "no repetition": lambda: numbers(),
    "a counted one": lambda: numbers().repeat(3),
    "a batch of two passes": lambda: numbers().repeat().batch(5),
    "batches of an unknown number": lambda: numbers().filter(lambda x: x > 2).repeat().batch(2),
    "a shuffle over passes": lambda: numbers().repeat().shuffle(12),
    "numbers": lambda: numbers().repeat().enumerate(),
    "a window": lambda: numbers().repeat().skip(3),
    "repeated twice": lambda: numbers().repeat().repeat(),
    "a cache": lambda: numbers().cache().repeat(),
    "draws with seeds": lambda: (
        numbers().repeat().map(lambda x: x + tf.random.uniform([], 0, 9, tf.int64, seed=3))
    ),
    "fewer elements than workers": lambda: numbers().batch(12).repeat(),
    "nothing": lambda: tf.data.Dataset.range(0).repeat(),
}


def elements(graph_def, element_spec):
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph_def.SerializeToString())
    dataset = tf.data.experimental.from_variant(variant, element_spec)
    return [element.tolist() for element in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("name", FOUND)
def test_a_pass_that_is_found(name):
    make, length = FOUND[name]
    dataset = make()
    graph_def, found = one_pass(dataset_graph(dataset), 2)
    assert found == length
    in_pass = elements(graph_def, dataset.element_spec)
    assert len(in_pass) == (length if length >= 0 else 2)
    if name not in ("shuffle", "draws without seeds"):
        twice = [element.tolist() for element in dataset.take(2 * len(in_pass)).as_numpy_iterator()]
        assert twice == in_pass * 2


@pytest.mark.parametrize("name", LEFT)
def test_a_dataset_that_is_left_as_it_is(name):
    assert one_pass(dataset_graph(LEFT[name]()), 2) is None


def test_who_reads_in_passes():
    data = numbers().batch(4).repeat()
    both = {"steps": 5, "goes_on": True}
    assert as_input(data, 2, in_passes=True, **both).begins_again
    assert as_input(data, 2, in_passes=True, **both).num_batches == 3
    assert not as_input(data, 2, **both).begins_again
    assert not as_input(data, 1, in_passes=True, **both).begins_again, "one worker is plain Keras"
    assert not as_input(data, 2, steps=5).begins_again, "the first batches of `evaluate`"
    creator = kerasps.DatasetCreator(lambda context: numbers().batch(4).repeat())
    assert not as_input(creator, 2, in_passes=True, **both).begins_again
    weighted = tf.data.Dataset.zip(numbers(), numbers()).batch(4).repeat()
    given = as_input(weighted, 2, in_passes=True, class_weight={0: 2.0}, **both)
    assert given.begins_again


def test_each_pass_has_an_order_of_its_own_and_the_workers_agree():
    given = as_input(
        numbers().shuffle(12).batch(2).repeat(), 2, steps=5, goes_on=True, in_passes=True
    )
    orders = []
    for _ in range(2):
        given.start_pass(0, must_end=False)
        splits = [given.open(split, 0) for split in range(2)]
        assert [split.left for split in splits] == [3, 3]
        batches = [[batch.numpy() for batch in split.iterator] for split in splits]
        orders.append(np.concatenate([b for pair in zip(*batches, strict=True) for b in pair]))
        assert sorted(orders[-1]) == [*range(12)]
    assert orders[0].tolist() != orders[1].tolist()


def test_a_position_of_endless_data_behind_the_pass_has_nothing_left():
    given = as_input(numbers().batch(2).repeat(), 2, steps=5, goes_on=True, in_passes=True)
    given.start_pass(0, must_end=False)
    assert given.open(0, 50).left == 0
