"""A variational autoencoder of digits: a model without `call`, whose steps use its two halves.

    python examples/vae.py                        # starts a cluster on this machine
    kerasps launch examples/vae.py                # the same, with the cluster around it

The method is that of Kingma and Welling, "Auto-Encoding Variational Bayes", 2013.
"""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf
from keras import ops

import digits
from clusters import strategy

PIXELS, LATENT = 64, 4


class VAE(keras.Model):
    """Learns to draw its images from a few normally distributed numbers each."""

    def __init__(self) -> None:
        super().__init__()
        inputs, hidden = keras.Input((8, 8, 1)), keras.layers.Dense(64, activation="relu")
        self.encoder = keras.Sequential(
            [inputs, keras.layers.Flatten(), hidden, keras.layers.Dense(2 * LATENT)]
        )
        inputs, hidden = keras.Input((LATENT,)), keras.layers.Dense(64, activation="relu")
        self.decoder = keras.Sequential(
            [inputs, hidden, keras.layers.Dense(PIXELS, activation="sigmoid")]
        )
        self.noise = keras.random.SeedGenerator(1)
        self.trackers = [
            keras.metrics.Mean(name="reconstruction"),
            keras.metrics.Mean(name="divergence"),
        ]

    def losses_of(self, images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the reconstruction loss, and the distance of the code from the normal one."""
        mean, log_variance = ops.split(self.encoder(images), 2, axis=1)
        code = mean + ops.exp(0.5 * log_variance) * keras.random.normal(
            ops.shape(mean), seed=self.noise
        )
        pixels = ops.reshape(images, (-1, PIXELS))
        reconstruction = PIXELS * ops.mean(
            keras.losses.binary_crossentropy(pixels, self.decoder(code))
        )
        divergence = -0.5 * ops.sum(1 + log_variance - mean**2 - ops.exp(log_variance), axis=1)
        for tracker, value in zip(self.trackers, (reconstruction, divergence), strict=True):
            tracker.update_state(value)
        return reconstruction, ops.mean(divergence)

    def train_step(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        """Take one optimizer step."""
        with tf.GradientTape() as tape:
            loss = sum(self.losses_of(images))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {tracker.name: tracker.result() for tracker in self.trackers}

    def test_step(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        """Compute the losses."""
        self.losses_of(images)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def main() -> None:
    """Train, evaluate, print the loss on test digits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    train_images, _, test_images, _ = digits.load()
    with strategy(num_workers=2, num_ps=1) as parameter_servers:
        with parameter_servers.scope():
            model = VAE()
            model.compile(keras.optimizers.Adam(0.005), steps_per_execution=5)
        model.fit(train_images, batch_size=digits.BATCH_SIZE, epochs=options.epochs)
        result = model.evaluate(test_images, batch_size=120, verbose=0, return_dict=True)
        drawn = model.decoder.predict(keras.random.normal((5, LATENT), seed=1), verbose=0)
    print(
        "\n".join(
            "".join(" .:*#"[round(4 * pixel)] for pixel in row) for row in drawn.reshape(5, 8, 8)[0]
        )
    )
    print(f"test reconstruction: {result['reconstruction']:.2f} on {len(test_images)} digits")


if __name__ == "__main__":
    main()
