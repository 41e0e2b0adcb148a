"""A generative adversarial network: a model without `call`, with two optimizers and a `train_step`
of its own.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

keras.utils.set_random_seed(11)
images = (load_digits().images / 16).reshape(-1, 8, 8, 1).astype("float32")
LATENT = 16


def make_discriminator():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(1, activation="sigmoid"),
        ],
        name="discriminator",
    )


def make_generator():
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(4 * 4 * 16),
            layers.Reshape((4, 4, 16)),
            layers.Conv2DTranspose(16, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent = latent
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real):
        size = keras.ops.shape(real)[0]
        noise = keras.random.normal((size, self.latent), seed=self.seed_generator)
        fakes = self.generator(noise)
        both = keras.ops.concatenate([fakes, real], axis=0)
        labels = keras.ops.concatenate(
            [keras.ops.ones((size, 1)), keras.ops.zeros((size, 1))], axis=0
        )
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights))

        noise = keras.random.normal((size, self.latent), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(
                keras.ops.zeros((size, 1)), self.discriminator(self.generator(noise))
            )
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class Sketches(keras.callbacks.Callback):
    """Draws digits after each epoch."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def on_epoch_end(self, epoch, logs=None):
        noise = np.random.default_rng(epoch).normal(size=(3, LATENT)).astype("float32")
        self.drawn.append(np.asarray(self.model.generator(noise)))


# Under the scope:
gan = GAN(make_discriminator(), make_generator(), LATENT)
gan.compile(
    keras.optimizers.Adam(3e-4), keras.optimizers.Adam(3e-4), keras.losses.BinaryCrossentropy()
)

sketches = Sketches()
dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(1024).batch(64)
history = gan.fit(dataset, epochs=3, callbacks=[sketches], verbose=0)
drawn = gan.generator.predict(np.random.default_rng(0).normal(size=(5, LATENT)), verbose=0)
assert np.abs(sketches.drawn[0] - sketches.drawn[-1]).max() > 1e-3

counts = {
    "discriminator": int(gan.d_optimizer.iterations),
    "generator": int(gan.g_optimizer.iterations),
    "batches": float(gan.d_loss_metric.count),
    "drawn": (drawn.shape, len(sketches.drawn)),
}
figures = {name: (history.history[name][-1], 0.15) for name in ("d_loss", "g_loss")}
