"""What `fit` takes as input with two workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.models import counting_model, endless, ids_data


def creator(num_examples, batch_size=10, transform=lambda dataset: dataset):
    def dataset_fn(context):
        assert type(context.input_pipeline_id) is int
        dataset = tf.data.Dataset.from_tensor_slices(ids_data(num_examples))
        return transform(
            dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        ).batch(batch_size)

    return kerasps.DatasetCreator(dataset_fn)


FINITE = {
    "arrays": lambda n: {"x": ids_data(n)[0], "y": ids_data(n)[1], "batch_size": 10},
    "dataset": lambda n: {"x": tf.data.Dataset.from_tensor_slices(ids_data(n)).batch(10)},
    "creator_of_unknown_length": lambda n: {
        "x": creator(n, transform=lambda d: d.filter(lambda *_: True))
    },
}


@pytest.mark.parametrize("name", FINITE)
def test_an_epoch_is_one_pass(strategy, name):
    model = counting_model(strategy, steps_per_execution=4)
    history = model.fit(**FINITE[name](1003), epochs=3, verbose=0)
    assert history.history["examples"] == [1003.0] * 3
    assert history.history["ids"] == [sum(range(1003))] * 3
    assert int(model.optimizer.iterations.numpy()) == sum(history.history["batches"])


def test_arrays_are_shuffled_anew_each_epoch(strategy):
    class Order(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.epochs = []

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs.append([])

        def on_train_batch_end(self, batch, logs=None):
            self.epochs[-1].append(logs["ids"])

    def orders(**arguments):
        order = Order()
        x, y = ids_data(100)
        counting_model(strategy).fit(
            x, y, batch_size=10, epochs=2, verbose=0, callbacks=[order], **arguments
        )
        return [sorted(np.diff([0, *epoch])) for epoch in order.epochs]

    first, second = orders(shuffle=False)
    assert first == second == [sum(range(10 * i, 10 * i + 10)) for i in range(10)]
    first, second = orders()
    assert first != second


def test_input_that_runs_out_ends_the_epoch_with_a_warning(strategy):
    model = counting_model(strategy, 4)
    with pytest.warns(UserWarning, match="ran out of data"):
        history = model.fit(creator(100), epochs=1, steps_per_epoch=1000, verbose=0)
    assert history.history["examples"] == [100.0]


def test_steps_per_epoch_beyond_one_workers_share(strategy):
    model = counting_model(strategy, 4)
    history = model.fit(creator(100, batch_size=5), epochs=1, steps_per_epoch=18, verbose=0)
    assert history.history["batches"] == [18.0]


def test_an_error_in_dataset_fn_reaches_the_user(strategy):
    class Mine(Exception):
        pass

    def broken(context):
        if context.input_pipeline_id == 1:
            raise Mine("one of mine")
        return endless(context)

    model = counting_model(strategy)
    with pytest.raises(Mine, match="one of mine") as raised:
        model.fit(kerasps.DatasetCreator(broken), steps_per_epoch=2, verbose=0)
    assert raised.value.__notes__ == [
        "Raised by the `dataset_fn` of a `DatasetCreator` for worker 1 of 2."
    ]
    with pytest.raises(TypeError, match=r"must return a batched `tf.data.Dataset`.*42"):
        model.fit(kerasps.DatasetCreator(lambda context: 42), steps_per_epoch=2, verbose=0)


def test_an_error_in_a_map_function_reaches_the_user_and_leaves_the_strategy_usable(strategy):
    def check(x, y):
        tf.debugging.assert_none_equal(y, 31.0, message="not that id")  # which is on worker 1
        return x, y

    model = counting_model(strategy)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not that id") as raised:
        model.fit(creator(100, transform=lambda d: d.map(check)), verbose=0)
    assert raised.value.__notes__ == [
        f"Raised on worker 1 at {strategy.description.jobs['worker'][1]}."
    ]
    assert model.fit(creator(100), verbose=0).history["examples"] == [100.0]


def test_python_functions_in_dataset_fn_are_refused(strategy):
    def generated(context):
        return tf.data.Dataset.from_generator(
            lambda: iter([1.0]), output_signature=tf.TensorSpec([], tf.float32)
        ).batch(1)

    made_before = generated(None)
    model = counting_model(strategy)
    for dataset_fn in (generated, lambda context: made_before):
        with pytest.raises(
            kerasps.InputError, match=r"`dataset_fn` returned calls Python functions.*PyFunc"
        ):
            model.fit(kerasps.DatasetCreator(dataset_fn), steps_per_epoch=2, verbose=0)


def test_preprocessing_and_lookup_layers_in_dataset_fn(strategy):
    words = np.array(["red", "green", "blue", "green"] * 8)
    values = np.arange(32, dtype="float32")[:, None]
    lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"])
    normalization = keras.layers.Normalization()
    normalization.adapt(values)
    buckets = keras.layers.Discretization(bin_boundaries=[10.0, 20.0])

    def dataset_fn(context):
        inside = keras.layers.StringLookup(
            vocabulary=["red", "green", "blue"], output_mode="one_hot"
        )

        def preprocess(word, value):
            features = tf.concat(
                [
                    tf.cast(lookup(word), tf.float32)[:, None],
                    tf.cast(inside(word), tf.float32),
                    normalization(value),
                    tf.cast(buckets(value), tf.float32),
                ],
                1,
            )
            return features, tf.cast(lookup(word), tf.float32)[:, None]

        dataset = tf.data.Dataset.from_tensor_slices((words, values)).batch(4)
        return (
            dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
            .map(preprocess)
            .repeat()
        )

    with strategy.scope():
        model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(kerasps.DatasetCreator(dataset_fn), steps_per_epoch=8, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
