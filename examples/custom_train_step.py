"""A model with a custom `train_step`: it also trains on digits that were changed to fool it.

    python examples/custom_train_step.py          # starts a cluster on this machine
    kerasps launch examples/custom_train_step.py  # the same, with the cluster around it

The method follows Goodfellow et al., "Explaining and Harnessing Adversarial Examples", 2015.
The class has nothing specific to parameter servers: it is the same as for plain Keras.
"""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf

import digits
import kerasps
from clusters import strategy

PIXEL_CHANGE = 0.1


class AdversarialModel(keras.Model):
    """Maps digits to logits; a step uses a batch twice, the second time with the worst change."""

    def __init__(self) -> None:
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )

    def call(self, images: tf.Tensor) -> tf.Tensor:
        """Return the logits of a batch of digits."""
        return self.network(images)

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Find the worst change, then take one optimizer step on both versions of the batch."""
        images, labels = data
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = self.compute_loss(images, labels, self(images, training=True))
        fooling = images + PIXEL_CHANGE * tf.sign(tape.gradient(loss, images))
        with tf.GradientTape() as tape:
            logits = self(images, training=True)
            loss = self.compute_loss(images, labels, logits)
            loss += self.compute_loss(fooling, labels, self(fooling, training=True))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return self.compute_metrics(images, labels, logits)


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

    with strategy(num_workers=2, num_ps=1) as parameter_servers:
        with parameter_servers.scope():
            model = AdversarialModel()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(
                keras.optimizers.Adam(0.003), loss, metrics=["accuracy"], steps_per_execution=10
            )
        creator = kerasps.DatasetCreator(
            lambda context: digits.training_dataset(train_images, train_labels, context)
        )
        model.fit(creator, epochs=options.epochs, steps_per_epoch=options.max_steps)
        result = model.evaluate(
            test_images, test_labels, batch_size=120, verbose=0, return_dict=True
        )
    print(f"test accuracy: {result['accuracy']:.3f} on {len(test_labels)} digits")


if __name__ == "__main__":
    main()
