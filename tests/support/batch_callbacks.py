"""Models that tell the learning rate of each step, and callbacks that are told of batches."""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf

NUM_BATCHES = 18
# Exact in binary, and so is their sum with others.
RATES = [(step + 1) / 64 for step in range(NUM_BATCHES + 1)]


class Outputs(keras.losses.Loss):
    """The outputs themselves: a row that is looked up has a gradient of 1."""

    def call(self, y_true, y_pred):
        return tf.reduce_sum(y_pred, -1)


def rows_model(strategy, steps_per_execution=1):
    """A model with a row for each batch, which goes down by the learning rate of its step."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="int32"),
                keras.layers.Embedding(NUM_BATCHES, 1, embeddings_initializer="zeros"),
                keras.layers.Flatten(),
            ]
        )
        model.compile(
            keras.optimizers.SGD(RATES[0]),
            Outputs(reduction="sum"),
            steps_per_execution=steps_per_execution,
        )
    return model


def arrays():
    """Batches of one row each, in their order."""
    x = np.arange(NUM_BATCHES, dtype="int32")[:, None]
    return {"x": x, "y": np.zeros((NUM_BATCHES, 1), "float32"), "batch_size": 1, "shuffle": False}


def generator():
    """The same, read in this process."""

    def batches():
        for row in range(NUM_BATCHES):
            yield np.array([[row]], "int32"), np.zeros((1, 1), "float32")

    return {"x": batches()}


def rates_used(model, *, scale=1):
    """Return which of `RATES` the step of each row had; -1 where there was none.

    Args:
        model: one of `rows_model`.
        scale: by what a step has its row move less.
    """
    rows = -scale * model.layers[0].get_weights()[0][:, 0]
    return [round(float(row) * 64) - 1 for row in rows]


class Scheduled(keras.callbacks.Callback):
    """Sets the rate of each batch, when it is told of the batch's begin, or of the end before."""

    def __init__(self, moment):
        super().__init__()
        self.moment = moment

    def on_train_batch_begin(self, batch, logs=None):
        if self.moment == "begin":
            self.model.optimizer.learning_rate = RATES[batch]

    def on_train_batch_end(self, batch, logs=None):
        if self.moment == "end":
            # The last execution counts as if it were whole: its end may be behind all batches.
            self.model.optimizer.learning_rate = RATES[min(batch + 1, NUM_BATCHES)]


class Told(keras.callbacks.Callback):
    """Notes what it is told, is slow or reads the model, and stops at a batch.

    Args:
        seconds: how long each end takes.
        reads: whether the learning rate is read at each end.
        stop_at: the batch at whose end, or begin, it stops.
        moment: which.
    """

    def __init__(self, *, seconds=0.0, reads=False, stop_at=None, moment="end"):
        super().__init__()
        self.seconds, self.reads, self.stop_at, self.moment = seconds, reads, stop_at, moment
        self.calls = []

    def _note(self, moment, batch):
        self.calls.append((moment, batch))
        if (moment, batch) == (self.moment, self.stop_at):
            for mode in ("training", "evaluating", "predicting"):
                setattr(self.model, f"stop_{mode}", True)

    def on_train_batch_begin(self, batch, logs=None):
        self._note("begin", batch)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)
        if self.reads:
            float(self.model.optimizer.learning_rate)
        self._note("end", batch)

    on_test_batch_begin = on_predict_batch_begin = on_train_batch_begin
    on_test_batch_end = on_predict_batch_end = on_train_batch_end


def in_turn(num_batches):
    """Return the calls of so many batches, one after the other."""
    return [(moment, batch) for batch in range(num_batches) for moment in ("begin", "end")]
