"""Shards of arrays yield what TensorFlow's yield, and pass over nothing."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.inputs.array_shards import MAX_BYTES, cut_arrays
from kerasps.inputs.make_input import as_input

LENGTH = 11
SOURCES = {
    "one": lambda: np.arange(LENGTH),
    "several": lambda: (np.arange(LENGTH * 6).reshape(LENGTH, 2, 3), np.arange(LENGTH) % 2 == 0),
    "named": lambda: {"a": np.ones((LENGTH, 0)), "b": (np.arange(LENGTH, dtype="float16"), None)},
    "strings": lambda: np.array([f"{i}" for i in range(LENGTH)]),
    "bfloat16": lambda: tf.cast(tf.range(LENGTH), tf.bfloat16),
    "ragged": lambda: (tf.ragged.constant([[i] * (i % 3) for i in range(LENGTH)]), [0] * LENGTH),
    "sparse": lambda: tf.sparse.from_dense(np.eye(LENGTH)),
}


def made(make, *, cut):
    """The graph in which a dataset is made, and what it yields."""
    graphs = []

    def trace():
        dataset = make()
        if cut:
            cut_arrays(dataset)
        graphs.append(tf.compat.v1.get_default_graph())
        return dataset

    dataset = tf.function(trace, autograph=False)()
    return graphs[0], int(dataset.cardinality()), [repr(element) for element in dataset]


def shards(graph):
    """Of each shard in a graph, how many there are to its source."""
    return [
        int(tf.get_static_value(op.inputs[1]))
        for op in graph.get_operations()
        if op.type == "ShardDataset"
    ]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 20])
def test_a_shard_yields_what_it_yielded(source, num_shards):
    for index in {0, 1, num_shards - 1} & {*range(num_shards)}:

        def make(index=index):
            dataset = tf.data.Dataset.from_tensor_slices(SOURCES[source]()).shard(num_shards, index)
            return dataset.shuffle(5, seed=1).repeat(2).batch(2)

        _, *expected = made(make, cut=False)
        graph, *found = made(make, cut=True)
        assert found == expected
        is_cut = num_shards > 1 and source not in ("ragged", "sparse")
        assert shards(graph) == [1 if is_cut else num_shards]


def test_each_shard_of_a_source_that_several_read_is_its_own():
    def make():
        source = tf.data.Dataset.from_tensor_slices(np.arange(LENGTH))
        parts = [source.shard(3, i).shard(2, j) for i, j in itertools.product(range(3), range(2))]
        whole = source
        for part in parts:
            whole = whole.concatenate(part)
        return whole

    _, *expected = made(make, cut=False)
    graph, *found = made(make, cut=True)
    assert found == expected
    # A shard of a shard reads no array.
    assert sorted(shards(graph)) == [1] * 6 + [2] * 6


class TestWhatStaysAsItIs:
    MAKERS: ClassVar = {
        "large": lambda: tf.data.Dataset.from_tensor_slices(
            tf.zeros([64, MAX_BYTES // 64 + 1], tf.uint8)
        ).shard(2, 1),
        "of unknown length": lambda: tf.data.Dataset.from_tensor_slices(
            tf.boolean_mask(tf.range(8), tf.range(8) > 2)
        ).shard(2, 1),
        "by a tensor": lambda: tf.data.Dataset.from_tensor_slices(tf.range(8)).shard(
            2, tf.random.uniform([], 1, 2, tf.int64)
        ),
        "not of arrays": lambda: tf.data.Dataset.range(8).shard(2, 1),
    }

    @pytest.mark.parametrize("maker", MAKERS)
    def test_it_is_read_as_before(self, maker):
        make = self.MAKERS[maker]
        _, *expected = made(make, cut=False)
        graph, *found = made(make, cut=True)
        assert found == expected
        assert shards(graph) == [2]


def test_slices_are_made_beside_the_dataset_and_on_no_gpu():
    def make():
        with tf.device("/job:worker/task:3"):
            return tf.data.Dataset.from_tensor_slices(np.arange(LENGTH)).shard(2, 1)

    with tf.Graph().as_default() as graph:
        cut_arrays(make())
    devices = [op.device for op in graph.get_operations() if op.type == "StridedSlice"]
    assert devices == ["/job:worker/task:3/device:CPU:0"]


def test_an_index_out_of_range_is_tensorflows_error():
    with pytest.raises(tf.errors.InvalidArgumentError, match="index"):
        made(lambda: tf.data.Dataset.from_tensor_slices([1, 2]).shard(2, 2), cut=True)


def test_workers_of_a_creator_read_their_own_examples():
    def dataset_fn(context):
        dataset = tf.data.Dataset.from_tensor_slices(np.arange(LENGTH))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.map(lambda number: number).batch(2)

    found = as_input(kerasps.DatasetCreator(dataset_fn), 3)
    assert [shards(split.function.graph) for split in found._splits] == [[1]] * 3
    found.start_pass(0, must_end=True)
    datasets = [split.make(found._key)[0] for split in found._splits]
    batches = [[batch.tolist() for batch in dataset.as_numpy_iterator()] for dataset in datasets]
    assert batches == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8]]]
