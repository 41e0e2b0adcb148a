"""Readers that follow a table while two workers train have its rows in the end, bit for bit."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.layers import DynamicEmbedding, Eviction
from support.row_readers import Reader

STEPS, BATCH_SIZE, ANSWERS = 400, 16, 10


def batches(context):
    draw = np.random.default_rng(context.input_pipeline_id)
    late = np.arange(STEPS * BATCH_SIZE)[:, None] // 8
    ids = late + draw.zipf(1.4, (STEPS * BATCH_SIZE, 2)) % 300
    return tf.data.Dataset.from_tensor_slices((ids, np.ones(len(ids)))).batch(BATCH_SIZE).repeat()


class Follow(keras.callbacks.Callback):
    """Follows the table in a thread, and in the callback; the training ends after some answers."""

    def __init__(self, table):
        super().__init__()
        self.in_thread, self.in_callback = Reader(table), Reader(table)
        self.errors, self.enough, self.over = [], threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def _follow(self):
        try:
            answers = 0
            while not self.over.is_set():
                self.in_thread.read()
                answers += 1
                if answers == ANSWERS:
                    self.enough.set()
        except Exception as exc:
            self.errors.append(exc)
        finally:
            self.enough.set()

    def on_train_begin(self, logs=None):
        self._thread.start()

    def on_train_batch_end(self, batch, logs=None):
        if batch % 100 == 99:
            self.in_callback.read().assert_equals()  # no step is in flight

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self.enough.is_set()

    def on_train_end(self, logs=None):
        self.over.set()
        self._thread.join()


@pytest.mark.parametrize("eviction", [None, Eviction("lru", low=0.7)], ids=["kept", "evicted"])
def test_readers_beside_two_workers(strategy, eviction):
    with strategy.scope():
        ids = keras.Input((2,), dtype="int64")
        table = DynamicEmbedding(8, max_rows=300, eviction=eviction)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
        model.compile("adam", "mse")
    follow = Follow(table)
    model.fit(
        kerasps.DatasetCreator(batches),
        epochs=1000,
        steps_per_epoch=STEPS,
        verbose=0,
        callbacks=[follow],
    )
    assert not follow.errors
    for reader in (follow.in_thread, follow.in_callback):
        reader.read().assert_equals()
        assert reader.wholes == 1
    if eviction is not None:
        assert table.figures()["evicted"] > 0
