"""The metrics of recommenders over two workers, and in plain Keras over the same examples."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from support.matrix import with_matrix
from support.rankers import NAMES, compiled_ranker, impressions


def bits(logs):
    return {name: np.float64(logs[name]).tobytes() for name in NAMES}


# 45 batches: of 3 steps in an execution, the workers have 8 and 7 executions.
@pytest.mark.parametrize(
    ("method", "steps_per_execution"),
    with_matrix(
        [("fit", 1), ("fit", 3), ("evaluate", 1), ("evaluate", 3)],
        at_length=[("fit", 1), ("evaluate", 3)],
    ),
)
def test_metrics_of_two_workers_are_those_of_all_examples(strategy, method, steps_per_execution):
    """Bit for bit: the sums have no rounding error, so the order of workers does not matter.

    The learning rate is zero: with two workers, a prediction of `fit` would depend on whose update
    came first.
    """
    dataset = tf.data.Dataset.from_tensor_slices(impressions(355)).batch(8)
    keras.utils.set_random_seed(7)
    plain = compiled_ranker(learning_rate=0.0, jit_compile=False)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        ours = compiled_ranker(learning_rate=0.0, steps_per_execution=steps_per_execution)
    if method == "evaluate":
        expected = plain.evaluate(dataset, verbose=0, return_dict=True)
        for _ in range(2):
            assert bits(ours.evaluate(dataset, verbose=0, return_dict=True)) == bits(expected)
    else:
        history = plain.fit(dataset, epochs=2, shuffle=False, verbose=0).history
        expected = {name: values[0] for name, values in history.items()}
        found = ours.fit(dataset, epochs=2, shuffle=False, verbose=0).history
        for epoch in range(2):
            assert bits({name: found[name][epoch] for name in NAMES}) == bits(expected)
    assert all(np.isfinite(expected[name]) for name in NAMES)
    # Half of the examples, which one of the workers has, give other values.
    half = plain.evaluate(dataset.shard(2, 0), verbose=0, return_dict=True)
    assert all(half[name] != expected[name] for name in NAMES)


def test_an_id_that_is_out_of_range_ends_evaluate_with_an_error_that_says_so(strategy):
    x, *rest = impressions(64)
    x["user"][x["user"] == 49] = 48
    x["user"][40] = 49  # it has a row in the model's table, and none in the metric
    with strategy.scope():
        model = compiled_ranker(num_groups=49)
    dataset = tf.data.Dataset.from_tensor_slices((x, *rest)).batch(8)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"`GroupedAUC` are out of range. Expected: 0 to 48"
    ):
        model.evaluate(dataset, verbose=0)
    x["user"][40] = 48
    dataset = tf.data.Dataset.from_tensor_slices((x, *rest)).batch(8)
    logs = model.evaluate(dataset, verbose=0, return_dict=True)
    assert all(np.isfinite(logs[name]) for name in NAMES)
