"""A variational autoencoder whose model has no `call`: its `train_step` puts encoder and decoder
together.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

keras.utils.set_random_seed(10)
images = (load_digits().images / 16).reshape(-1, 8, 8, 1).astype("float32")
LATENT = 2


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def make_encoder():
    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(32, activation="relu")(layers.Flatten()(inputs))
    mean, log_variance = layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)
    return keras.Model(
        inputs, [mean, log_variance, Sampling()([mean, log_variance])], name="encoder"
    )


def make_decoder():
    inputs = keras.Input((LATENT,))
    x = layers.Dense(64, activation="sigmoid")(layers.Dense(32, activation="relu")(inputs))
    return keras.Model(inputs, layers.Reshape((8, 8, 1))(x), name="decoder")


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, z = self.encoder(data)
            decoded = self.decoder(z)
            reconstruction = ops.mean(
                ops.sum(keras.losses.binary_crossentropy(data, decoded), axis=(1, 2))
            )
            kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl = ops.mean(ops.sum(kl, axis=1))
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.total_loss_tracker.update_state(total)
        self.reconstruction_loss_tracker.update_state(reconstruction)
        self.kl_loss_tracker.update_state(kl)
        return {metric.name: metric.result() for metric in self.metrics}


# Under the scope:
vae = VAE(make_encoder(), make_decoder())
vae.compile(optimizer=keras.optimizers.Adam(0.005))

history = vae.fit(images, epochs=4, batch_size=64, verbose=0)
mean, log_variance, z = vae.encoder.predict(images[:100], verbose=0)
digit = vae.decoder.predict(np.zeros((1, LATENT)), verbose=0)
assert history.history["total_loss"][-1] < history.history["total_loss"][0]

counts = {
    "iterations": int(vae.optimizer.iterations),
    "trackers": sorted(history.history),
    "batches": float(vae.total_loss_tracker.count),
    "shapes": (mean.shape, z.shape, digit.shape),
}
figures = {"loss": (history.history["reconstruction_loss"][-1], 2.0)}
