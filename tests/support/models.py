"""Models whose metrics count what they saw."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf


class Batches(keras.metrics.Metric):
    """Counts the batches."""

    def __init__(self, name="batches", **kwargs):
        super().__init__(name=name, **kwargs)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1.0)

    def result(self):
        return self.count.value * 1


class Examples(keras.metrics.Metric):
    """Counts the examples, and adds up their targets, which the tests use as ids, and the squares
    of these.
    """

    def __init__(self, name="examples", **kwargs):
        super().__init__(name=name, **kwargs)
        self.count = self.add_variable((), "zeros", dtype="int64", name="count")
        self.sum = self.add_variable((), "zeros", dtype="int64", name="sum")
        self.squares = self.add_variable((), "zeros", dtype="int64", name="squares")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "int64"))
        ids = keras.ops.cast(keras.ops.round(y_true), "int64")
        self.sum.assign_add(keras.ops.sum(ids))
        self.squares.assign_add(keras.ops.sum(ids * ids))

    def result(self):
        return {
            "examples": self.count.value * 1,
            "ids": self.sum.value * 1,
            "squares": self.squares.value * 1,
        }


def counting_model(strategy, steps_per_execution=1, **compile_arguments):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        )
        model.compile(
            compile_arguments.pop("optimizer", "sgd"),
            "mae",
            metrics=[Batches(), Examples()],
            steps_per_execution=steps_per_execution,
            **compile_arguments,
        )
    return model


def ids_data(num_examples):
    """Features and targets; the target of an example is its id."""
    ids = np.arange(num_examples, dtype="float32")
    return np.stack([np.sin(ids), np.cos(ids)], 1), ids[:, None]


def endless(context: tf.distribute.InputContext) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(ids_data(96))
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).repeat().batch(8)


NUM_ROWS, WIDTH = 1000, 32
TOUCHED = [0, 1, 2, 997]


def touches(ids=TOUCHED) -> tf.data.Dataset:
    """Endless batches of one example, which looks up the rows `ids`."""
    return tf.data.Dataset.from_tensors(
        (np.array([ids], "int32"), np.zeros([1], "float32"))
    ).repeat()


def descending_model(
    optimizer, steps_per_execution, num_rows=NUM_ROWS, width=WIDTH, **compile_arguments
):
    """Its loss has the same gradient at each step: one, in each element of the rows that are
    touched.
    """
    layers = [keras.Input((None,), dtype="int32"), keras.layers.Embedding(num_rows, width, "zeros")]
    model = keras.Sequential(
        [*layers, keras.layers.Lambda(lambda rows: keras.ops.sum(rows, axis=(1, 2)))]
    )
    model.compile(
        optimizer, prediction_itself, steps_per_execution=steps_per_execution, **compile_arguments
    )
    return model


def prediction_itself(target, prediction):
    """A loss whose gradient is one."""
    return prediction
