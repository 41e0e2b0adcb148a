"""WGAN-GP: several discriminator steps for each of the generator, and a penalty on gradients of
gradients.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

keras.utils.set_random_seed(13)
images = (load_digits().images / 8 - 1).reshape(-1, 8, 8, 1).astype("float32")
LATENT = 16


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, discriminator_steps=3, penalty_weight=10.0):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.discriminator_steps = discriminator_steps
        self.penalty_weight = penalty_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def gradient_penalty(self, size, real, fake):
        alpha = tf.random.uniform([size, 1, 1, 1], 0.0, 1.0)
        between = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.discriminator(between, training=True)
        gradients = tape.gradient(judged, [between])[0]
        norm = ops.sqrt(ops.sum(ops.square(gradients), axis=[1, 2, 3]) + 1e-8)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, real):
        if isinstance(real, tuple):
            real = real[0]
        size = tf.shape(real)[0]
        for _ in range(self.discriminator_steps):
            noise = tf.random.normal(shape=(size, LATENT))
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                cost = self.d_loss_fn(
                    real=self.discriminator(real, training=True),
                    fake=self.discriminator(fake, training=True),
                )
                d_loss = cost + self.penalty_weight * self.gradient_penalty(size, real, fake)
            gradients = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_variables))
        noise = tf.random.normal(shape=(size, LATENT))
        with tf.GradientTape() as tape:
            g_loss = self.g_loss_fn(
                self.discriminator(self.generator(noise, training=True), training=True)
            )
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


# Under the scope:
discriminator = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(8, 3, strides=2, padding="same"),
        layers.LeakyReLU(0.2),
        layers.Flatten(),
        layers.Dense(1),
    ]
)
generator = keras.Sequential(
    [
        keras.Input((LATENT,)),
        layers.Dense(4 * 4 * 8, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.LeakyReLU(0.2),
        layers.Reshape((4, 4, 8)),
        layers.UpSampling2D(),
        layers.Conv2D(1, 3, padding="same", activation="tanh"),
    ]
)
wgan = WGAN(discriminator, generator)
wgan.compile(
    d_optimizer=keras.optimizers.Adam(learning_rate=2e-3, beta_1=0.5, beta_2=0.9),
    g_optimizer=keras.optimizers.Adam(learning_rate=2e-4, beta_1=0.5, beta_2=0.9),
    g_loss_fn=lambda fake: -tf.reduce_mean(fake),
    d_loss_fn=lambda real, fake: tf.reduce_mean(fake) - tf.reduce_mean(real),
)

history = wgan.fit(images, batch_size=128, epochs=2, verbose=0)
drawn = wgan.generator.predict(np.zeros((4, LATENT), "float32"), verbose=0)
judged = float(np.mean(discriminator.predict(images, verbose=0)))
noise = np.random.default_rng(0).normal(size=(256, LATENT)).astype("float32")
judged_fake = float(np.mean(discriminator.predict(generator.predict(noise, verbose=0), verbose=0)))
assert judged > judged_fake

counts = {
    "discriminator": int(wgan.d_optimizer.iterations),
    "generator": int(wgan.g_optimizer.iterations),
    "drawn": drawn.shape,
    "logs": sorted(history.history),
}
figures = {"judged apart by": (judged - judged_fake, 2.0)}
