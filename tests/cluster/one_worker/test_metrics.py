"""The metrics of recommenders with one worker equal those of plain Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from support.compare import assert_identical
from support.matrix import with_matrix
from support.rankers import NAMES, compiled_ranker, impressions


@pytest.mark.parametrize("steps_per_execution", with_matrix([1, 3], at_length=[1]))
def test_metrics_equal_those_of_plain_keras_bit_for_bit(strategy, steps_per_execution):
    dataset = tf.data.Dataset.from_tensor_slices(impressions(355)).batch(8)
    histories, models = [], []
    for scope, options in (
        (tf.distribute.get_strategy(), {"jit_compile": False}),
        (strategy, {"steps_per_execution": steps_per_execution}),
    ):
        keras.utils.set_random_seed(7)
        with scope.scope():
            model = compiled_ranker(learning_rate=0.1, **options)
        fit = model.fit(dataset, validation_data=dataset, epochs=3, shuffle=False, verbose=0)
        histories.append(fit.history)
        models.append(model)
    assert_identical(*models)
    plain, ours = histories
    for name in [*NAMES, *(f"val_{name}" for name in NAMES)]:
        assert np.isfinite(plain[name]).all()
        assert len(set(plain[name])) == 3
        assert ours[name] == plain[name], name
