"""The number of shards is TensorFlow's, but for the limits that differ from it on purpose."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.variables.placing.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)

tensorflow = tf.distribute.experimental.partitioners
SHAPES = [
    tf.TensorShape(shape)
    for shape in [(1,), (3,), (1000,), (7, 5), (4096, 32), (3, 70_000), (100_000, 2, 9), (1, 9)]
]
DTYPES = [tf.float16, tf.float32, tf.float64, tf.int64]
GRID = list(itertools.product(SHAPES, DTYPES))
ALL = [FixedShardsPartitioner(3, min_bytes=0), MinSizePartitioner(4, 3), MaxSizePartitioner(4, 3)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5000])
def test_fixed_shards_without_a_floor_are_tensorflows(num_shards):
    ours, theirs = (
        FixedShardsPartitioner(num_shards, min_bytes=0),
        tensorflow.FixedShardsPartitioner(num_shards),
    )
    for shape, dtype in GRID:
        assert ours(shape, dtype) == theirs(shape, dtype)


@pytest.mark.parametrize("max_shards", [1, 2, 16, 5000])
@pytest.mark.parametrize("min_shard_bytes", [1, 1000, 256 << 10])
def test_shards_of_a_least_size_are_tensorflows(min_shard_bytes, max_shards):
    ours = MinSizePartitioner(min_shard_bytes, max_shards)
    theirs = tensorflow.MinSizePartitioner(min_shard_bytes, max_shards)
    for shape, dtype in GRID:
        assert ours(shape, dtype) == theirs(shape, dtype)


@pytest.mark.parametrize("max_shards", [None, 1, 2, 16])
@pytest.mark.parametrize("max_shard_bytes", [1, 1000, 256 << 10])
def test_shards_of_a_largest_size_are_tensorflows(max_shard_bytes, max_shards):
    ours = MaxSizePartitioner(max_shard_bytes, max_shards)
    theirs = tensorflow.MaxSizePartitioner(max_shard_bytes, max_shards)
    for shape, dtype in GRID:
        assert ours(shape, dtype) == theirs(shape, dtype)


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_another_axis_can_be_split(partitioner):
    assert partitioner(tf.TensorShape([5, 6]), tf.float32, axis=1) == [1, 3]
    assert partitioner(tf.TensorShape([5, 6]), tf.float32, axis=-1) == [1, 3]


def test_a_variable_below_the_floor_stays_whole():
    partitioner = FixedShardsPartitioner(2)
    assert partitioner.min_bytes == 64 << 10
    assert partitioner(tf.TensorShape([128, 128]), tf.float32) == [2, 1]
    assert partitioner(tf.TensorShape([127, 128]), tf.float32) == [1, 1]
    assert partitioner(tf.TensorShape([128, 128]), tf.float16) == [1, 1]
    assert FixedShardsPartitioner(2, min_bytes=1000)(tf.TensorShape([250]), tf.float32) == [2]
    assert FixedShardsPartitioner(2, min_bytes=1001)(tf.TensorShape([250]), tf.float32) == [1]


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_scalars_and_variables_without_values_stay_whole(partitioner):
    assert partitioner(tf.TensorShape([]), tf.float32) == []
    assert partitioner(tf.TensorShape([0]), tf.float32) == [1]
    assert partitioner(tf.TensorShape([0, 9]), tf.float32) == [1, 1]
    assert partitioner(tf.TensorShape([9, 0]), tf.float32) == [1, 1]


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_shapes_and_dtypes_may_be_those_of_keras(partitioner):
    assert partitioner((6, 5), "float32") == [3, 1]


def test_the_most_shards_are_one_per_ps():
    partitioner = MinSizePartitioner(1024)
    three = partitioner.for_num_ps(3)
    assert (three.min_shard_bytes, three.max_shards, partitioner.max_shards) == (1024, 3, None)
    assert three(tf.TensorShape([4096, 32]), tf.float32) == [3, 1]
    assert three(tf.TensorShape([512]), tf.float32) == [2]
    assert tensorflow.MinSizePartitioner(1024)(tf.TensorShape([4096, 32]), tf.float32) == [1, 1]


@pytest.mark.parametrize(
    "partitioner",
    [MinSizePartitioner(max_shards=5), MaxSizePartitioner(10), MaxSizePartitioner(10, 5), *ALL],
    ids=repr,
)
def test_a_limit_that_was_given_is_kept(partitioner):
    assert partitioner.for_num_ps(3) is partitioner


def test_the_number_of_ps_must_be_known():
    expected = (
        r"Received: MinSizePartitioner\(min_shard_bytes=262144, max_shards=None\)\. "
        r"Pass `max_shards`\."
    )
    with pytest.raises(ValueError, match=expected):
        MinSizePartitioner()(tf.TensorShape([4]), tf.float32)


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda value: FixedShardsPartitioner(value), "num_shards"),
        (lambda value: FixedShardsPartitioner(2, min_bytes=value), "min_bytes"),
        (lambda value: MinSizePartitioner(value), "min_shard_bytes"),
        (lambda value: MinSizePartitioner(max_shards=value), "max_shards"),
        (lambda value: MinSizePartitioner().for_num_ps(value), "num_ps"),
        (lambda value: MaxSizePartitioner(value), "max_shard_bytes"),
        (lambda value: MaxSizePartitioner(8, max_shards=value), "max_shards"),
    ],
)
def test_arguments_are_positive_integers(make, received):
    least = 0 if received == "min_bytes" else 1
    for value in (1.5, "2", True):
        with pytest.raises(
            TypeError,
            match=rf"Expected: {received} >= {least}\. Received: {received}={value!r}\. Pass ",
        ):
            make(value)
    with pytest.raises(
        ValueError,
        match=rf"Expected: {received} >= {least}\. Received: {received}={least - 1}\. Pass ",
    ):
        make(least - 1)
    make(np.int64(7))


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_a_shape_that_is_not_known_is_an_error(partitioner):
    with pytest.raises(
        ValueError, match=r"Expected: a fully defined shape\. Received: shape=\(None, 3\)"
    ):
        partitioner(tf.TensorShape([None, 3]), tf.float32)


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_an_axis_that_is_not_there_is_an_error(partitioner):
    with pytest.raises(ValueError, match=r"Expected: an axis of shape \(4, 3\)\. Received: axis=2"):
        partitioner(tf.TensorShape([4, 3]), tf.float32, axis=2)


@pytest.mark.parametrize("cls", [FixedShardsPartitioner, MinSizePartitioner, MaxSizePartitioner])
def test_the_example_in_the_docstring_is_true(cls):
    code = inspect.cleandoc(cls.__doc__).split("```python\n")[1].split("```")[0]
    setup, *calls = code.strip().splitlines()
    names = {"tf": tf, "kerasps": kerasps}
    exec(setup, names)
    assert len(calls) == 2
    for call in calls:
        expression, comment = call.split("  # ")
        assert str(eval(expression, names)) == comment.split(":")[0]
