"""Runs what TensorFlow's documentation of `ParameterServerStrategy` and `ClusterCoordinator` shows,
with Keras 3, on one cluster; run as a process of its own by test_documentation.py.

Prints a line per example. What the documentation leaves out (`...`) is filled in.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy

DIRECTORY = Path(sys.argv[1])
EXAMPLES = {}


def example(function):
    EXAMPLES[function.__name__] = function
    return function


def features_and_labels():
    random = np.random.default_rng(0)
    x = random.integers(0, 3, size=(200, 3)).astype("float32")
    return x, (x[:, :1] == 1).astype("int64")


@example
def the_custom_training_loop(strategy):
    coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy=strategy)

    def dataset_fn():
        data = tf.data.Dataset.from_tensor_slices(features_and_labels())
        return data.shuffle(200).repeat().batch(20)

    distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn=dataset_fn)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
        optimizer = keras.optimizers.RMSprop(learning_rate=0.1)
        metrics = keras.metrics.BinaryAccuracy()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        checkpoint_manager = tf.train.CheckpointManager(
            checkpoint, str(DIRECTORY / "checkpoints"), max_to_keep=2
        )

    @tf.function
    def worker_fn(iterator):
        def replica_fn(inputs):
            batch_data, labels = inputs
            with tf.GradientTape() as tape:
                predicted = model(batch_data, training=True)
                per_example = keras.losses.binary_crossentropy(labels, predicted)
                loss = tf.nn.compute_average_loss(per_example)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            metrics.update_state(labels, predicted)
            return loss

        losses = strategy.run(replica_fn, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    for epoch in range(2):
        distributed_iterator = iter(distributed_dataset)  # Reset iterator state.
        for _ in range(10):
            coordinator.schedule(worker_fn, args=(distributed_iterator,))
        coordinator.join()
        logging.info("Metric result: %r", metrics.result())
        assert int(metrics.count.numpy()) == 200
        metrics.reset_state()
        checkpoint_manager.save()
        assert int(optimizer.iterations.numpy()) == 10 * (epoch + 1)
    weights = model.get_weights()
    model.set_weights([0 * value for value in weights])
    checkpoint.restore(checkpoint_manager.latest_checkpoint).assert_consumed()
    assert all(map(np.array_equal, weights, model.get_weights()))
    loss = coordinator.schedule(worker_fn, args=(distributed_iterator,))
    assert np.isfinite(loss.fetch())


@example
def preprocessing_layers_in_the_dataset(strategy):
    """The tutorial's, which reads words."""
    vocabulary = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
    with strategy.scope():
        lookup = keras.layers.StringLookup(
            vocabulary=vocabulary, num_oov_indices=0, mask_token=None
        )
        label_lookup = keras.layers.StringLookup(
            vocabulary=["yes", "no"], num_oov_indices=0, mask_token=None
        )
        model_input = keras.layers.Input(shape=(3,), dtype="int64")
        embedded = keras.layers.Embedding(input_dim=len(vocabulary), output_dim=16)(model_input)
        dense = keras.layers.Dense(1, activation="sigmoid")(keras.ops.mean(embedded, axis=1))
        model = keras.Model({"features": model_input}, dense)
        optimizer = keras.optimizers.RMSprop(learning_rate=0.1)
        accuracy = keras.metrics.Accuracy()
    random = np.random.default_rng(1)
    features = random.choice(vocabulary, size=(200, 3))
    labels = np.where((features == "avenger").any(1, keepdims=True), "yes", "no")

    def dataset_fn(_):
        raw = tf.data.Dataset.from_tensor_slices({"features": features, "label": labels})
        dataset = raw.map(
            lambda x: (
                {"features": lookup(x["features"])},
                tf.cast(label_lookup(x["label"]), "int64"),
            )
        )
        return dataset.shuffle(200).batch(32).repeat()

    @tf.function
    def step_fn(iterator):
        def replica_fn(batch_data, labels):
            with tf.GradientTape() as tape:
                pred = model(batch_data, training=True)
                per_example_loss = keras.losses.BinaryCrossentropy(reduction="none")(labels, pred)
                loss = tf.nn.compute_average_loss(per_example_loss)
                gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
            accuracy.update_state(labels, actual_pred)
            return loss

        batch_data, labels = next(iterator)
        losses = strategy.run(replica_fn, args=(batch_data, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(dataset_fn)

    per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
    per_worker_iterator = iter(per_worker_dataset)
    for _ in range(4):
        accuracy.reset_state()
        for _ in range(10):
            coordinator.schedule(step_fn, args=(per_worker_iterator,))
        # Wait at epoch boundaries.
        coordinator.join()
    assert float(accuracy.result()) > 0.7
    loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
    assert np.isfinite(loss.fetch())


@example
def a_module_with_variables_in_shards(strategy):
    class Dense(tf.Module):
        def __init__(self, name=None):
            super().__init__(name=name)
            self.w = tf.Variable(tf.random.normal([100, 10]), name="w")

        def __call__(self, x):
            return x * self.w

    with strategy.scope():
        dense = Dense()
    assert len(dense.variables) == 2
    assert isinstance(dense.variables[0], tf.Variable)
    assert isinstance(dense.variables[1], tf.Variable)
    assert [tuple(variable.shape) for variable in dense.variables] == [(50, 10), (50, 10)]
    assert len({variable.device for variable in dense.variables}) == 2
    assert dense(tf.ones([100, 10])).shape == (100, 10)


@example
def the_index_of_a_worker(strategy):
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def dataset_fn(context):
        dataset = tf.data.Dataset.range(10)
        worker_index = tf.distribute.coordinator.experimental_get_current_worker_index()
        return dataset.shard(num_shards=2, index=worker_index)

    @tf.function
    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(dataset_fn)

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
    first = coordinator.schedule(tf.function(lambda elements: next(elements)), args=(iterator,))
    assert first.fetch() in (0, 1)


def main():
    with local_strategy(
        partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(num_shards=2)
    ) as (_, strategy):
        for name, function in EXAMPLES.items():
            function(strategy)
            print("ran", name, flush=True)


if __name__ == "__main__":
    main()
