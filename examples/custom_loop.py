"""Trains on digits by a custom loop, as TensorFlow documents it for parameter servers.

python examples/custom_loop.py                 # starts a cluster on this machine
kerasps launch examples/custom_loop.py         # the same, with the cluster around it
"""

from __future__ import annotations

import keras
import tensorflow as tf

import digits
from clusters import strategy

EPOCHS, STEPS_PER_EPOCH = 6, 60


def build_model() -> keras.Model:
    """Build a dense layer with dropout."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    """Train, evaluate, print the test accuracy."""
    keras.utils.set_random_seed(1)
    train_images, train_labels, test_images, test_labels = digits.load()
    with strategy(num_workers=2, num_ps=1) as parameter_servers:
        coordinator = tf.distribute.coordinator.ClusterCoordinator(parameter_servers)
        with parameter_servers.scope():
            model = build_model()
            optimizer = keras.optimizers.Adam(0.003)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            accuracy = keras.metrics.SparseCategoricalAccuracy()

        def dataset_fn() -> tf.data.Dataset:
            dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
            return dataset.shuffle(len(train_labels)).repeat().batch(digits.BATCH_SIZE)

        def replica_fn(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                value = loss(labels, logits)
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(labels, logits)
            return value

        @tf.function
        def worker_fn(iterator: tf.data.Iterator) -> tf.Tensor:
            return parameter_servers.run(replica_fn, args=next(iterator))

        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        for epoch in range(EPOCHS):
            accuracy.reset_state()
            for _ in range(STEPS_PER_EPOCH):
                last = coordinator.schedule(worker_fn, args=(iterator,))
            coordinator.join()
            print(
                f"epoch {epoch + 1}: accuracy {float(accuracy.result()):.3f} on "
                f"{int(accuracy.count.numpy()):,} digits, last loss {last.fetch():.3f}"
            )
        model.compile(loss=loss, metrics=["accuracy"])
        result = model.evaluate(test_images, test_labels, verbose=0, return_dict=True)
    print(f"test accuracy: {result['accuracy']:.3f} on {len(test_labels)} digits")


if __name__ == "__main__":
    main()
