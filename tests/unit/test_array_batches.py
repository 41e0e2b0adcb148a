"""Batches of arrays that are gathered are those that TensorFlow makes of elements."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.inputs import array_batches
from kerasps.inputs.array_batches import gather_batches, with_gathered_batches
from kerasps.inputs.dataset_graphs import as_graph, dataset_graph
from kerasps.inputs.make_input import as_input

LENGTH = 23
from_arrays = tf.data.Dataset.from_tensor_slices


def arrays():
    return {
        "a": np.arange(LENGTH * 2, dtype="float32").reshape(LENGTH, 2),
        "b": np.array([f"{i}" for i in range(LENGTH)]),
        "c": (np.arange(LENGTH) % 2 == 0, np.ones((LENGTH, 0), "float16"), None),
    }


def made_here(make, *, gathers):
    """Whether the batches of a dataset were gathered, its length, and what it yields."""
    found = []

    def trace():
        dataset = make().prefetch(2)
        if gathers:
            found.append(gather_batches(tf.compat.v1.get_default_graph()))
        return dataset

    dataset = tf.function(trace, autograph=False)()
    yielded = dataset.element_spec, int(dataset.cardinality()), contents(dataset)
    return bool(sum(found)), yielded


def contents(dataset):
    return [repr(element) for element in dataset]


def kinds(graph_def):
    return {node.op for node in graph_def.node}


def pipeline(seed):
    """A dataset that orders and picks examples at random, and makes batches of them."""
    chosen = random.Random(seed)
    options = tf.data.Options()
    options.deterministic = True
    steps = [
        lambda data: data.shuffle(chosen.choice([1, 5, 100]), seed=chosen.randint(1, 9)),
        lambda data: data.shuffle(9, seed=chosen.randint(1, 9), reshuffle_each_iteration=False),
        lambda data: data.repeat(chosen.randint(1, 3)),
        lambda data: data.take(chosen.choice([0, 7, 100])),
        lambda data: data.skip(chosen.choice([0, 3])),
        lambda data: data.shard(3, chosen.randint(0, 2)),
        lambda data: data.prefetch(3),
        lambda data: data.with_options(options),
        lambda data: data.apply(tf.data.experimental.assert_cardinality(data.cardinality())),
        lambda data: data.apply(tf.data.experimental.shuffle_and_repeat(7, 2, seed=3)),
    ]
    dataset = from_arrays(arrays())
    for _ in range(chosen.randint(0, 4)):
        dataset = chosen.choice(steps)(dataset)
    dataset = dataset.batch(
        chosen.choice([1, 4, 50]),
        drop_remainder=chosen.choice([True, False]),
        num_parallel_calls=chosen.choice([None, 2]),
    )
    ends = [
        lambda data: data,
        lambda data: data.map(lambda batch: batch),
        lambda data: data.shard(2, 1),
        lambda data: data.unbatch().batch(3),
        lambda data: data.repeat(2),
        lambda data: data.concatenate(data),
    ]
    return chosen.choice(ends)(dataset)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_pipeline_yields_what_it_yielded(seed):
    was_gathered, found = made_here(lambda: pipeline(seed), gathers=True)
    assert was_gathered
    assert found == made_here(lambda: pipeline(seed), gathers=False)[1]
    dataset = pipeline(seed)
    graph_def = with_gathered_batches(dataset_graph(dataset))
    # Nothing is left of what was replaced.
    assert "TensorSliceDataset" not in kinds(graph_def)
    serialized = tf.constant(graph_def.SerializeToString())
    copy = as_graph(dataset.element_spec, int(dataset.cardinality()), lambda key: serialized)(None)
    # The copy shares the seeds of `dataset`, which differ from pass to pass.
    assert contents(copy) == contents(pipeline(seed))


@pytest.mark.parametrize("dtype", array_batches._DTYPES)
def test_arrays_of_every_dtype_are_gathered(dtype):
    numbers = tf.range(LENGTH)
    array = tf.as_string(numbers) if dtype == "string" else tf.cast(numbers, dtype)
    was_gathered, found = made_here(lambda: from_arrays(array).batch(4), gathers=True)
    assert was_gathered
    assert found == made_here(lambda: from_arrays(array).batch(4), gathers=False)[1]


def shuffled_for_two():
    shuffled = from_arrays(np.arange(8)).shuffle(8, seed=1)
    return shuffled.batch(2).concatenate(shuffled.batch(3))


class TestWhatStaysAsItIs:
    MAKERS: ClassVar = {
        "ragged": lambda: from_arrays(tf.ragged.constant([[1], [], [2, 3]])).batch(2),
        "sparse": lambda: from_arrays(tf.sparse.from_dense(np.eye(4))).batch(2),
        "of unknown length": lambda: from_arrays(
            tf.boolean_mask(tf.range(8), tf.range(8) > 2)
        ).batch(2),
        "mapped one by one": lambda: from_arrays(np.arange(8)).map(lambda n: n + 1).batch(2),
        "cached": lambda: from_arrays(np.arange(8)).cache().batch(2),
        "of padded elements": lambda: from_arrays(np.arange(8)).padded_batch(2),
        "not of arrays": lambda: tf.data.Dataset.from_tensors(np.arange(8)).batch(2),
        "shuffled for two": shuffled_for_two,
        "no batches": lambda: from_arrays(np.arange(8)),
    }

    @pytest.mark.parametrize("maker", MAKERS)
    def test_it_is_read_as_before(self, maker):
        make = self.MAKERS[maker]
        was_gathered, found = made_here(make, gathers=True)
        assert not was_gathered
        assert found == made_here(make, gathers=False)[1]

    # Of a dataset that there is, the length is known; and its graph has a shuffle for each reader.
    @pytest.mark.parametrize(
        "maker", sorted(MAKERS.keys() - {"of unknown length", "shuffled for two"})
    )
    def test_its_graph_stays_the_same(self, maker):
        graph_def = dataset_graph(self.MAKERS[maker]())
        assert with_gathered_batches(graph_def) is graph_def

    def test_so_are_arrays_that_take_long_to_copy(self, monkeypatch):
        monkeypatch.setattr(array_batches, "_MAX_GRAPH_BYTES", 2**12)
        for length, is_same in ((2**8, False), (2**9, True)):
            graph_def = dataset_graph(from_arrays(np.zeros(length)).batch(2))
            assert (with_gathered_batches(graph_def) is graph_def) is is_same


def batches_of_workers(data, num_workers):
    found = as_input(data, num_workers)
    found.start_pass(0, must_end=True)
    datasets = [split.make(found._key)[0] for split in found._splits]
    return found, [[batch.tolist() for batch in shard.as_numpy_iterator()] for shard in datasets]


def test_workers_of_a_creator_gather_their_batches():
    outside = from_arrays(np.arange(11))

    def dataset_fn(context, source=None):
        dataset = source or from_arrays(np.arange(11))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(2)

    expected = [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8]]]
    for make in (dataset_fn, lambda context: dataset_fn(context, outside)):
        found, batches = batches_of_workers(kerasps.DatasetCreator(make), 3)
        assert batches == expected
        graphs = [split.function.graph.as_graph_def() for split in found._splits]
        assert all(b"GatherV2" in graph_def.SerializeToString() for graph_def in graphs)


def test_all_workers_and_later_calls_share_the_function_that_gathers():
    array_batches._rows_function.cache_clear()
    for step in (1, 2):

        def dataset_fn(context, step=step):
            del context
            return from_arrays((np.arange(33).reshape(11, 3), np.arange(11) * step)).batch(2)

        found = as_input(kerasps.DatasetCreator(dataset_fn), 3)
        found.start_pass(0, must_end=True)
        for split in found._splits:
            rows, numbers = next(iter(split.make(found._key)[0]))
            # Each dataset has its arrays: the function has none.
            np.testing.assert_array_equal(rows, [[0, 1, 2], [3, 4, 5]])
            np.testing.assert_array_equal(numbers, [0, step])
    assert array_batches._rows_function.cache_info().misses == 1


def test_workers_of_a_whole_dataset_gather_batches_in_one_order():
    dataset = from_arrays(np.arange(40)).shuffle(40).batch(4)
    orders = []
    for _ in range(2):
        _, batches = batches_of_workers(dataset, 2)
        assert sorted(number for worker in batches for batch in worker for number in batch) == [
            *range(40)
        ]
        orders.append(batches)
    assert orders[0] != orders[1]
