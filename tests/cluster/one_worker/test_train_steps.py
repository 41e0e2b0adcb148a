"""Models whose `train_step` takes its batch apart: without `call`, with several optimizers, with
weights read after an update.

One worker must train them as plain Keras does.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from support.compare import FirstStep, assert_equal, assert_learned
from support.matrix import with_matrix

DATA = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")


def dense(*units: int, name: str) -> keras.Sequential:
    return keras.Sequential(
        [*(layers.Dense(u, activation="tanh") for u in units[:-1]), layers.Dense(units[-1])],
        name=name,
    )


class VAE(keras.Model):
    """No `call`, parts that are built by the first step, trackers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = dense(8, 4, name="encoder"), dense(8, 6, name="decoder")
        self.seeds = keras.random.SeedGenerator(3)
        self.total, self.kl = keras.metrics.Mean(name="total"), keras.metrics.Mean(name="kl")

    @property
    def metrics(self):
        return [self.total, self.kl]

    def losses_of(self, data):
        mean, log_var = ops.split(self.encoder(data), 2, axis=-1)
        z = mean + ops.exp(0.5 * log_var) * keras.random.normal(ops.shape(mean), seed=self.seeds)
        kl = ops.mean(ops.sum(-0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var)), axis=1))
        return ops.mean(ops.square(data - self.decoder(z))) + kl, kl

    def train_step(self, data):
        with tf.GradientTape() as tape:
            total, kl = self.losses_of(data)
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(total)
        self.kl.update_state(kl)
        return {"total": self.total.result(), "kl": self.kl.result()}

    def test_step(self, data):
        total, kl = self.losses_of(data)
        self.total.update_state(total)
        self.kl.update_state(kl)
        return {"total": self.total.result(), "kl": self.kl.result()}

    def predict_step(self, data):
        return self.encoder(data)


class GAN(keras.Model):
    """The generator's loss is of the discriminator as its own update has left it."""

    critic_steps = 1
    clips_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.discriminator, self.generator = (
            dense(8, 1, name="discriminator"),
            dense(8, 6, name="generator"),
        )
        self.seeds = keras.random.SeedGenerator(5)
        self.d_loss, self.g_loss = (
            keras.metrics.Mean(name="d_loss"),
            keras.metrics.Mean(name="g_loss"),
        )

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def noise(self, data):
        return keras.random.normal((ops.shape(data)[0], 3), seed=self.seeds)

    def train_step(self, data):
        for _ in range(self.critic_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(self.noise(data))
                d_loss = (
                    ops.mean(self.discriminator(fake))
                    - ops.mean(self.discriminator(data))
                    + self.penalty(data, fake)
                )
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(
                zip(tape.gradient(d_loss, weights), weights, strict=True)
            )
            if self.clips_weights:
                for weight in weights:
                    weight.assign(ops.clip(weight, -0.2, 0.2))
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.discriminator(self.generator(self.noise(data))))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def penalty(self, real, fake):
        return 0.0


class WassersteinGAN(GAN):
    critic_steps = 3

    def penalty(self, real, fake):
        between = 0.5 * (real + fake)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.discriminator(between)
        norm = ops.sqrt(ops.sum(ops.square(tape.gradient(scores, between)), axis=1) + 1e-6)
        return ops.mean(ops.square(norm - 1.0))


class ClippedGAN(GAN):
    critic_steps = 2
    clips_weights = True


class Averaged(keras.Model):
    """A second network follows the first, as its update has left it (diffusion models, BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.average = dense(8, 6, name="network"), dense(8, 6, name="average")
        self.average.trainable = False

    def build(self, shape):
        self.network.build(shape)
        self.average.build(shape)
        self.average.set_weights(self.network.get_weights())

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.network.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for weight, average in zip(self.network.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


class Decorated(keras.Sequential):
    """`tf.function`s as in many a tutorial: one around the step, one within it, with Python's
    control flow.
    """

    def __init__(self) -> None:
        super().__init__([layers.Dense(8, activation="tanh"), layers.Dense(6)])

    @tf.function
    def weighted(self, x, y):
        total = tf.zeros([])
        for column in tf.range(3):
            total += tf.cast(column + 1, tf.float32) * tf.reduce_mean(
                tf.square(self(x)[:, column] - y[:, column])
            )
        if total > 2.0:
            total = total / 2.0
        return total

    @tf.function
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.weighted(*data)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


def compiled_gan(kind: type[GAN], **arguments) -> GAN:
    model = kind()
    model.compile(keras.optimizers.Adam(0.01, **arguments), keras.optimizers.RMSprop(0.01))
    return model


def compiled(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, loss: str | None = None
) -> keras.Model:
    if isinstance(model, Averaged):
        model.build((None, 6))
    model.compile(optimizer, loss)
    return model


MODELS = {
    "vae": lambda: compiled(VAE(), keras.optimizers.Adam(0.01)),
    "gan": lambda: compiled_gan(GAN),
    "wgan": lambda: compiled_gan(WassersteinGAN),
    "clipped gan": lambda: compiled_gan(ClippedGAN),
    "gan, accumulated": lambda: compiled_gan(GAN, gradient_accumulation_steps=2, clipnorm=0.1),
    "gan, averages and decay": lambda: compiled_gan(
        WassersteinGAN, use_ema=True, ema_overwrite_frequency=3, weight_decay=0.1
    ),
    "decorated, averaged": lambda: compiled(Decorated(), keras.optimizers.Adam(0.01), "mse"),
    "averaged": lambda: compiled(Averaged(), keras.optimizers.AdamW(0.01), "mse"),
    "averaged, scaled": lambda: compiled(
        Averaged(), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse"
    ),
    "averaged, nadam": lambda: compiled(Averaged(), keras.optimizers.Nadam(0.01), "mse"),
}


# In shards one step at a time; whole and several steps in one go where what goes from step to step
# is of another kind.
# Accumulation with `clipnorm` is refused in shards.
CASES = [(kind, 1, 2) for kind in MODELS if kind != "gan, accumulated"] + [
    (kind, 4, 1) for kind in ("vae", "wgan", "gan, accumulated", "averaged, scaled")
]


@pytest.mark.parametrize(
    ("kind", "steps_per_execution", "num_shards"),
    with_matrix(
        CASES,
        at_length=[
            *(("clipped gan", 1, 2), ("gan, averages and decay", 1, 2), ("averaged, nadam", 1, 2)),
            *(("gan", 1, 2), ("averaged", 1, 2), ("vae", 1, 2)),
            *(("wgan", 4, 1), ("averaged, scaled", 4, 1)),
        ],
    ),
)
def test_training_equals_plain_keras(strategy, sharded, kind, steps_per_execution, num_shards):
    sharded(num_shards, min_bytes=64)
    data = tf.data.Dataset.from_tensor_slices((DATA, DATA) if "averaged" in kind else DATA).batch(8)
    histories, models = [], []
    for scope in (None, strategy):
        keras.utils.set_random_seed(7)
        model = MODELS[kind]()
        if scope is not None:
            model.steps_per_execution = steps_per_execution
            with scope.scope():
                histories.append(model.fit(data, epochs=2, verbose=0, shuffle=False).history)
        else:
            first = FirstStep()
            histories.append(
                model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[first]).history
            )
            assert_learned(model, first.weights)
        models.append(model)
    plain, ours = models
    assert_equal(plain, ours, relative=2e-5, optimizer=False)
    assert histories[0].keys() == histories[1].keys()
    if steps_per_execution == 1 or "averaged" not in kind:
        for name, values in histories[0].items():
            np.testing.assert_allclose(histories[1][name], values, rtol=1e-4, atol=1e-5)


def test_methods_of_a_model_without_call(strategy):
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = VAE()
        model.compile("adam")
    assert set(model.evaluate(DATA, batch_size=8, verbose=0, return_dict=True)) == {
        "total",
        "kl",
    }  # builds it
    assert len(model.variables) == 9
    model.fit(DATA, batch_size=8, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 16
    np.testing.assert_allclose(
        model.predict(DATA, batch_size=8, verbose=0), model.encoder(DATA), rtol=1e-5, atol=1e-6
    )
    assert len(model.train_on_batch(DATA[:8])) == 2
    assert model.predict_on_batch(DATA[:8]).shape == (8, 4)
