"""A GAN that is told which digit to draw: labels are laid over the images as channels."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

keras.utils.set_random_seed(12)
images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
one_hot = keras.utils.to_categorical(labels, 10).astype("float32")
LATENT, CLASSES = 16, 10

discriminator = keras.Sequential(
    [
        keras.layers.InputLayer((8, 8, 1 + CLASSES)),
        layers.Conv2D(16, 3, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.GlobalMaxPooling2D(),
        layers.Dense(1),
    ],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.layers.InputLayer((LATENT + CLASSES,)),
        layers.Dense(4 * 4 * (LATENT + CLASSES)),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Reshape((4, 4, LATENT + CLASSES)),
        layers.Conv2DTranspose(16, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
    ],
    name="generator",
)


class ConditionalGAN(keras.Model):
    def __init__(self, discriminator, generator, latent):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent = latent
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.gen_loss_tracker = keras.metrics.Mean(name="generator_loss")
        self.disc_loss_tracker = keras.metrics.Mean(name="discriminator_loss")

    @property
    def metrics(self):
        return [self.gen_loss_tracker, self.disc_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, data):
        real, one_hot = data
        planes = ops.tile(one_hot[:, None, None, :], (1, 8, 8, 1))
        size = ops.shape(real)[0]

        def fakes():
            noise = keras.random.normal((size, self.latent), seed=self.seed_generator)
            return ops.concatenate(
                [self.generator(ops.concatenate([noise, one_hot], axis=1)), planes], axis=-1
            )

        both = ops.concatenate([fakes(), ops.concatenate([real, planes], -1)], axis=0)
        is_fake = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(is_fake, self.discriminator(both))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((size, 1)), self.discriminator(fakes()))
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights))
        self.gen_loss_tracker.update_state(g_loss)
        self.disc_loss_tracker.update_state(d_loss)
        return {metric.name: metric.result() for metric in self.metrics}


# Under the scope:
gan = ConditionalGAN(discriminator, generator, LATENT)
gan.compile(
    d_optimizer=keras.optimizers.Adam(3e-4),
    g_optimizer=keras.optimizers.Adam(3e-4),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)

before = generator.get_weights()
dataset = tf.data.Dataset.from_tensor_slices((images, one_hot)).shuffle(1024).batch(64)
history = gan.fit(dataset, epochs=3, verbose=0)
assert max(np.abs(new - old).max() for new, old in zip(generator.get_weights(), before)) > 1e-3
asked = np.concatenate([np.zeros((10, LATENT), "float32"), np.eye(10, dtype="float32")], axis=1)
drawn = gan.generator.predict(asked, verbose=0)

counts = {
    "discriminator": int(gan.d_optimizer.iterations),
    "generator": int(gan.g_optimizer.iterations),
    "batches": float(gan.gen_loss_tracker.count),
    "drawn": drawn.shape,
}
figures = {
    name: (history.history[name][-1], 0.15) for name in ("generator_loss", "discriminator_loss")
}
