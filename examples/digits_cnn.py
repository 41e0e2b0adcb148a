"""A small convolutional network with batch normalisation and dropout reads handwritten digits.

python examples/digits_cnn.py                 # starts a cluster on this machine
kerasps launch examples/digits_cnn.py         # the same, with the cluster around it
"""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf

import digits
import kerasps
from clusters import strategy


def build_model() -> keras.Model:
    """Build two convolutions with batch normalisation, then one dense layer with dropout."""
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (16, 32):
        model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization(momentum=0.9))
        model.add(keras.layers.Activation("relu"))
        model.add(keras.layers.MaxPooling2D())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dropout(0.3))
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.002), loss, metrics=["accuracy"], steps_per_execution=10)
    return model


def main() -> None:
    """Train, evaluate, print the test accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--max-steps", type=int, default=50, help="steps per epoch")
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    train_images, train_labels, test_images, test_labels = digits.load()

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return digits.training_dataset(train_images, train_labels, context)

    with strategy(num_workers=2, num_ps=1) as parameter_servers:
        with parameter_servers.scope():
            model = build_model()
        model.fit(
            kerasps.DatasetCreator(dataset_fn),
            epochs=options.epochs,
            steps_per_epoch=options.max_steps,
        )
        result = model.evaluate(
            test_images, test_labels, batch_size=120, verbose=0, return_dict=True
        )
    print(f"test accuracy: {result['accuracy']:.3f} on {len(test_labels)} digits")


if __name__ == "__main__":
    main()
