"""Models whose weights count their updates, since each gradient is one, and data for them."""

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


class Listening(keras.callbacks.Callback):
    """Hears of batches, so that each execution returns its result."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def unit_model(num_examples, make_table=keras.layers.Embedding):
    """A model with a row for each example."""
    table = make_table(num_examples, 1, embeddings_initializer="zeros")
    return keras.Sequential([keras.Input((1,), dtype="int32"), table, Sum()])


def compiled_unit_model(strategy, num_examples, make_optimizer, steps_per_execution, **table):
    with strategy.scope():
        model = unit_model(num_examples, **table)
        model.compile(
            make_optimizer(),
            # The sum over the batch, so that each row and weight has a gradient of 1.
            Outputs(reduction="sum"),
            metrics=[Ids()],
            steps_per_execution=steps_per_execution,
        )
    return model


def endless(ids, batch_size):
    """A `dataset_fn` whose data never end."""

    def dataset_fn(context):
        dataset = tf.data.Dataset.from_tensor_slices((ids, ids)).repeat()
        shard = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return shard.batch(batch_size)

    return dataset_fn


def of_unknown_length(ids, batch_size):
    return tf.data.Dataset.from_tensor_slices((ids, ids)).filter(lambda *_: True).batch(batch_size)


def logs_of(ids, batch_size):
    """What `Ids` counts in an epoch with all examples, whose targets are these ids."""
    return {
        "batches": len(ids) // batch_size,
        "examples": len(ids),
        "ids": int(ids.sum(dtype="int64")),
        "squares": int((ids.astype("int64") ** 2).sum()),
    }
