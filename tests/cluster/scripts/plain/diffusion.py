"""A diffusion model: a normaliser, a network, and a second network that follows it as a moving
average.
"""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

keras.utils.set_random_seed(14)
images = (load_digits().images / 16).reshape(-1, 8, 8, 1).astype("float32")
EMA = 0.9


@keras.saving.register_keras_serializable()
def sinusoidal_embedding(x):
    frequencies = ops.exp(ops.linspace(ops.log(1.0), ops.log(100.0), 4))
    angles = ops.cast(2.0 * math.pi * frequencies, "float32")
    return ops.concatenate([ops.sin(angles * x), ops.cos(angles * x)], axis=3)


def make_network(width=12):
    noisy = keras.Input((8, 8, 1))
    variances = keras.Input((1, 1, 1))
    e = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, 8))(variances)
    e = layers.UpSampling2D(size=8, interpolation="nearest")(e)
    x = layers.Concatenate()([layers.Conv2D(width, 1)(noisy), e])
    x = layers.Conv2D(width, 3, padding="same", activation="swish")(x)
    skip = x = layers.BatchNormalization(center=False, scale=False)(x)
    x = layers.Conv2D(width, 3, padding="same", activation="swish")(x)
    x = layers.Add()([x, skip])
    return keras.Model(
        [noisy, variances], layers.Conv2D(1, 1, kernel_initializer="zeros")(x), name="unet"
    )


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = make_network()
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker, self.image_loss_tracker]

    def schedule(self, times):
        start, end = math.acos(0.95), math.acos(0.02)
        angles = start + times * (end - start)
        return ops.sin(angles), ops.cos(angles)

    def denoise(self, noisy, noise_rates, signal_rates, training):
        network = self.network if training else self.ema_network
        noises = network([noisy, noise_rates**2], training=training)
        return noises, (noisy - noise_rates * noises) / signal_rates

    def mix(self, images):
        images = self.normalizer(images, training=True)
        size = ops.shape(images)[0]
        noises = keras.random.normal(shape=(size, 8, 8, 1))
        noise_rates, signal_rates = self.schedule(keras.random.uniform(shape=(size, 1, 1, 1)))
        return (
            images,
            noises,
            signal_rates * images + noise_rates * noises,
            noise_rates,
            signal_rates,
        )

    def train_step(self, images):
        images, noises, noisy, noise_rates, signal_rates = self.mix(images)
        with tf.GradientTape() as tape:
            guessed_noises, guessed_images = self.denoise(
                noisy, noise_rates, signal_rates, training=True
            )
            noise_loss = self.loss(noises, guessed_noises)
            image_loss = self.loss(images, guessed_images)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights):
            ema_weight.assign(EMA * ema_weight + (1 - EMA) * weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, images):
        images, noises, noisy, noise_rates, signal_rates = self.mix(images)
        guessed_noises, guessed_images = self.denoise(
            noisy, noise_rates, signal_rates, training=False
        )
        self.noise_loss_tracker.update_state(self.loss(noises, guessed_noises))
        self.image_loss_tracker.update_state(self.loss(images, guessed_images))
        return {m.name: m.result() for m in self.metrics}


train = (
    tf.data.Dataset.from_tensor_slices(images[:1536])
    .cache()
    .shuffle(1536)
    .batch(64, drop_remainder=True)
)
validation = tf.data.Dataset.from_tensor_slices(images[1536:]).batch(64, drop_remainder=True)

# Under the scope:
model = DiffusionModel()
model.compile(
    optimizer=keras.optimizers.AdamW(3e-3, weight_decay=1e-4), loss=keras.losses.mean_absolute_error
)
model.normalizer.adapt(train)

history = model.fit(train, epochs=3, validation_data=validation, verbose=0)
result = model.evaluate(validation, return_dict=True, verbose=0)
followed = [
    np.abs(a - b).mean()
    for a, b in zip(model.network.get_weights(), model.ema_network.get_weights())
]
assert max(followed) > 0
assert history.history["val_n_loss"][-1] < history.history["val_n_loss"][0]

counts = {
    "iterations": int(model.optimizer.iterations),
    "batches": float(model.noise_loss_tracker.count),
    "logs": sorted(history.history),
}
figures = {"noise loss": (float(np.mean(result["n_loss"])), 0.1)}
