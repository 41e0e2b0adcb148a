"""A layer, a loss and a metric with which weights count their updates: each gradient is one."""

from __future__ import annotations

import keras
import tensorflow as tf


class Sum(keras.layers.Layer):
    """Adds up its weights, which lie on both ps, and gives each a gradient of 1."""

    def build(self, input_shape):
        self.parts = [
            self.add_weight(shape=shape, initializer="zeros") for shape in [(3,), (2, 4), (), (5,)]
        ]

    def call(self, rows):
        weights = tf.add_n([tf.reduce_sum(part) for part in self.parts])
        return tf.reduce_sum(rows, [1, 2])[:, None] + weights / tf.cast(
            tf.shape(rows)[0], tf.float32
        )


class Outputs(keras.losses.Loss):
    """The outputs themselves."""

    def call(self, y_true, y_pred):
        return tf.reduce_sum(y_pred, -1)


class Ids(keras.metrics.Metric):
    """Counts batches and examples, and adds up ids and their squares."""

    def __init__(self):
        super().__init__(name="ids", dtype="int64")
        self.sums = [
            self.add_weight(shape=(), initializer="zeros", dtype="int64", name=name)
            for name in ("batches", "examples", "ids", "squares")
        ]

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(y_true, tf.int64)
        size = tf.cast(tf.size(ids), tf.int64)
        values = [1, size, tf.reduce_sum(ids), tf.reduce_sum(ids * ids)]
        for total, value in zip(self.sums, values, strict=True):
            total.assign_add(tf.cast(value, tf.int64))

    def result(self):
        return {total.name: total.value * 1 for total in self.sums}
