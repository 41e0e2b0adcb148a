"""A dataset given whole, read by each worker: whatever it leaves to chance, an epoch visits each
example once.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.matrix import with_matrix
from support.models import counting_model, ids_data

NUM_EXAMPLES = 1003
EACH_ONCE = (NUM_EXAMPLES, sum(range(NUM_EXAMPLES)), sum(i * i for i in range(NUM_EXAMPLES)))


def examples():
    return tf.data.Dataset.from_tensor_slices(ids_data(NUM_EXAMPLES))


def halves():
    return [examples().shard(2, 0), examples().shard(2, 1)]


def part(index):
    """One of 17 parts of the examples;

    `index` may be a tensor, as in the function of an `interleave`.
    """
    return tf.data.Dataset.range(index, NUM_EXAMPLES, 17).map(
        example, num_parallel_calls=3, deterministic=False
    )


def example(index):
    value = tf.cast(index, tf.float32)
    return tf.stack([tf.sin(value), tf.cos(value)]), value[None]


def not_deterministic(dataset):
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def noisy(x, y):
    return x + tf.random.normal([2]), y


PARTS = tf.data.Dataset.range(17)
PIPELINES = {
    "shuffle": lambda: examples().shuffle(NUM_EXAMPLES).batch(10),
    "small shuffle after batch": lambda: examples().batch(10).shuffle(20),
    "several": lambda: examples().shuffle(100).batch(10).shuffle(20),
    "seeded": lambda: examples().shuffle(NUM_EXAMPLES, seed=3).batch(10),
    "one order": lambda: examples().shuffle(NUM_EXAMPLES, reshuffle_each_iteration=False).batch(10),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        halves(), [0.3, 0.7], rerandomize_each_iteration=True
    ).batch(10),
    "chosen": lambda: tf.data.Dataset.choose_from_datasets(
        halves(),
        tf.data.Dataset.random().map(lambda number: number % 2),
        stop_on_empty_dataset=False,
    ).batch(10),
    "interleave": lambda: PARTS.interleave(part, num_parallel_calls=4, deterministic=False).batch(
        10
    ),
    "options": lambda: not_deterministic(
        tf.data.Dataset.range(NUM_EXAMPLES).map(example, num_parallel_calls=4).batch(10)
    ),
    "cached": lambda: examples().shuffle(NUM_EXAMPLES).cache().batch(10),
    "nested": lambda: (
        PARTS.shuffle(17).interleave(lambda i: part(i).shuffle(9), 3).shuffle(99).batch(10)
    ),
    "taken and skipped": lambda: (
        examples()
        .shuffle(NUM_EXAMPLES, reshuffle_each_iteration=False)
        .take(300)
        .concatenate(examples().shuffle(NUM_EXAMPLES, reshuffle_each_iteration=False).skip(300))
        .batch(10)
    ),
    "random map": lambda: examples().shuffle(99).map(noisy, num_parallel_calls=2).batch(10),
    "random map inside": lambda: PARTS.interleave(lambda i: part(i).map(noisy)).batch(10),
}


@pytest.fixture(scope="module")
def model(strategy):
    return counting_model(strategy, 4)


def seen(history):
    """Examples, sum of ids and sum of their squares, of each epoch."""
    logs = history.history
    return [
        tuple(map(int, epoch))
        for epoch in zip(logs["examples"], logs["ids"], logs["squares"], strict=True)
    ]


def batches_of_epochs(strategy, *fits):
    """Of each epoch of several calls of `fit`, the sums of ids in its batches, in any order."""
    model = counting_model(strategy)

    class Order(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epochs.append([])

        def on_train_batch_end(self, batch, logs=None):
            epochs[-1].append(logs["ids"])

    epochs = []
    for arguments in fits:
        model.fit(**arguments, verbose=0, callbacks=[Order()])
    return [sorted(np.diff([0, *epoch])) for epoch in epochs]


@pytest.mark.parametrize(
    "name",
    with_matrix(
        PIPELINES,
        # Parts of "several", "nested" and "random map inside".
        at_length=["shuffle", "small shuffle after batch", "interleave", "random map", "chosen"],
    ),
)
def test_an_epoch_visits_each_example_once(model, name):
    assert seen(model.fit(PIPELINES[name](), epochs=3, verbose=0)) == [EACH_ONCE] * 3


def test_repeated_data_are_each_example_as_often(model):
    for dataset in (examples().shuffle(300).repeat(2), examples().repeat(2).shuffle(300)):
        assert seen(model.fit(dataset.batch(10), verbose=0)) == [
            tuple(2 * value for value in EACH_ONCE)
        ]


def test_where_a_random_number_decides_on_examples_one_process_reads(model):
    some = examples().filter(lambda x, y: tf.random.uniform([]) < 0.5)
    parts = PARTS.interleave(lambda i: part(i + 0 * tf.random.uniform([], 0, 17, tf.int64)))
    skewed = examples().rejection_resample(
        lambda x, y: tf.cast(y[0], tf.int32) % 2, [0.5, 0.5], [0.1, 0.9]
    )
    for dataset, kind in (
        (some, "Filter"),
        (skewed.map(lambda label, pair: pair), "Filter"),
        (parts, "Interleave"),
    ):
        with pytest.warns(
            UserWarning, match=f"draws numbers at random by which {kind}Dataset decides"
        ):
            history = model.fit(dataset.batch(10), epochs=2, verbose=0)
    assert seen(history) == [EACH_ONCE] * 2


def test_the_order_changes_from_epoch_to_epoch_where_the_dataset_says_so(strategy):
    data = examples()
    for options, changes in (
        ({}, True),
        ({"seed": 3}, True),
        ({"reshuffle_each_iteration": False}, False),
    ):
        dataset = data.shuffle(NUM_EXAMPLES, **options).batch(100)
        twice = {"x": dataset, "epochs": 2}
        epochs = batches_of_epochs(strategy, twice, twice)
        assert len({tuple(epoch) for epoch in epochs}) == (4 if changes else 1), options
    kept = batches_of_epochs(
        strategy, {"x": data.shuffle(NUM_EXAMPLES).cache().batch(100), "epochs": 3}
    )
    assert kept[0] == kept[1] == kept[2]


def test_a_seed_makes_the_order_reproducible(strategy):
    def epochs():
        keras.utils.set_random_seed(7)
        return batches_of_epochs(
            strategy, {"x": examples().shuffle(NUM_EXAMPLES).batch(100), "epochs": 2}
        )

    try:
        assert epochs() == epochs()
    finally:
        tf.random.set_seed(None)
    # The first epoch is in the order in which TensorFlow reads the dataset first.
    seeded = examples().shuffle(NUM_EXAMPLES, seed=5).batch(100)
    expected = sorted(
        float(tf.reduce_sum(y)) for _, y in examples().shuffle(NUM_EXAMPLES, seed=5).batch(100)
    )
    assert batches_of_epochs(strategy, {"x": seeded}) == [expected]


def test_data_that_are_split_by_take_and_skip_stay_apart(model):
    shuffled = examples().shuffle(NUM_EXAMPLES, reshuffle_each_iteration=False)
    train, test = shuffled.skip(300).batch(10), shuffled.take(300).batch(10)
    history = model.fit(train, epochs=2, validation_data=test, verbose=0).history
    for epoch in range(2):
        both = [
            history[name][epoch] + history[f"val_{name}"][epoch]
            for name in ("examples", "ids", "squares")
        ]
        assert tuple(both) == EACH_ONCE


def test_two_caches_do_not_meet_on_a_worker(model):
    """A graph names the caches of this process, whose names may be those of other caches on a
    worker.
    """
    validation, train = examples().take(300).cache(), examples().skip(300).cache()
    for dataset in (validation, train):  # which makes the caches, in this order
        assert len(list(dataset)) > 0
    history = model.fit(
        train.batch(10), epochs=2, validation_data=validation.batch(10), verbose=0
    ).history
    assert history["ids"] == [sum(range(300, NUM_EXAMPLES))] * 2
    assert history["val_ids"] == [sum(range(300))] * 2


def test_evaluate_and_predict_of_shuffled_data(model):
    logs = model.evaluate(PIPELINES["several"](), verbose=0, return_dict=True)
    assert (logs["examples"], logs["ids"], logs["squares"]) == EACH_ONCE
    expected = np.sort(model.predict(ids_data(NUM_EXAMPLES)[0], verbose=0), axis=0)

    def dataset_fn(context):
        return examples().shuffle(NUM_EXAMPLES).batch(10)

    for data in (PIPELINES["several"](), kerasps.DatasetCreator(dataset_fn)):
        actual = np.sort(model.predict(data, verbose=0), axis=0)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
