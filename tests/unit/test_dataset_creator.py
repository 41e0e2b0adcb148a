"""`DatasetCreator`, without a cluster."""

from __future__ import annotations

import pytest
import tensorflow as tf

import kerasps


def dataset_fn(input_context):
    return (
        tf.data.Dataset.range(10)
        .shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        .batch(2)
    )


def test_dataset_creator_rejects_what_it_cannot_call():
    with pytest.raises(
        TypeError, match=r"`dataset_fn` must be a callable.*Received: dataset_fn=.*Wrap a dataset"
    ):
        kerasps.DatasetCreator(tf.data.Dataset.range(3))
    with pytest.raises(
        TypeError,
        match=r"`input_options` must be a `tf.distribute.InputOptions` or None.*input_options=3",
    ):
        kerasps.DatasetCreator(dataset_fn, input_options=3)


def test_dataset_fn_is_called_when_a_worker_asks_and_not_before():
    calls = []

    def counting(input_context):
        calls.append(input_context.input_pipeline_id)
        return dataset_fn(input_context)

    creator = kerasps.DatasetCreator(counting)
    assert calls == []
    creator(tf.distribute.InputContext(4, 3))
    assert calls == [3]


def test_input_options_are_kept():
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    assert kerasps.DatasetCreator(dataset_fn, options).input_options is options
    assert kerasps.DatasetCreator(dataset_fn).input_options is None


ARITIES = {
    "none": lambda: None,
    "two": lambda one, two: None,
    "by name": lambda *, context: None,
}


@pytest.mark.parametrize("name", ARITIES)
def test_a_function_that_does_not_take_one_argument_is_refused(name):
    with pytest.raises(
        TypeError, match=r"cannot be called with one argument.*Received: dataset_fn=.*parameters \("
    ):
        kerasps.DatasetCreator(ARITIES[name])


@pytest.mark.parametrize("dataset_fn", [lambda *args: None, lambda context, seed=3: None, dict])
def test_a_function_that_can_take_one_argument_is_taken(dataset_fn):
    kerasps.DatasetCreator(dataset_fn)
