"""Data of known length that workers read to the end at different times, and steps after that."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.matrix import with_matrix
from support.models import counting_model, ids_data

NUM_EXAMPLES = 203
BATCHES_OF_FIRST, NUM_BATCHES, BATCH_SIZE = 3, 26, 8


class ReadsWeights(keras.callbacks.Callback):
    """Reads a weight after each batch, for which all that is in flight ends first."""

    def on_train_batch_end(self, batch, logs=None):
        np.sum(self.model.get_weights()[0])


@pytest.mark.parametrize("steps_per_execution", with_matrix([1, 4], at_length=[1]))
def test_a_callback_that_reads_weights_sees_a_finite_pass_to_its_end(strategy, steps_per_execution):
    model = counting_model(strategy, steps_per_execution)
    x, y = ids_data(NUM_EXAMPLES)
    history = model.fit(x, y, batch_size=8, epochs=2, callbacks=[ReadsWeights()], verbose=0)
    assert history.history["examples"] == [NUM_EXAMPLES] * 2
    assert history.history["ids"] == [sum(range(NUM_EXAMPLES))] * 2
    assert int(model.optimizer.iterations.numpy()) == 52


def uneven(context):
    """Few batches for the first worker, the others for the others."""
    dataset = tf.data.Dataset.from_tensor_slices(ids_data(NUM_BATCHES * BATCH_SIZE))
    dataset = dataset.batch(BATCH_SIZE)
    if context.input_pipeline_id == 0:
        return dataset.take(BATCHES_OF_FIRST)
    rest = dataset.skip(BATCHES_OF_FIRST)
    return rest.shard(context.num_input_pipelines - 1, context.input_pipeline_id - 1)


@pytest.mark.parametrize("steps_per_execution", with_matrix([1, 2], at_length=[1]))
def test_an_epoch_goes_on_though_one_worker_has_read_its_data_before(strategy, steps_per_execution):
    model = counting_model(strategy, steps_per_execution)
    history = model.fit(
        kerasps.DatasetCreator(uneven), epochs=2, steps_per_epoch=NUM_BATCHES // 2, verbose=0
    )
    assert history.history["batches"] == [NUM_BATCHES // 2] * 2
    assert sum(history.history["ids"]) == sum(range(NUM_BATCHES * BATCH_SIZE))
