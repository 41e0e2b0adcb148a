"""Learns a language by filling gaps: the mask is a sample weight, and the model makes a classifier
afterwards.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(34)
rng = np.random.default_rng(34)
WORDS, LENGTH, MASK = 12, 10, 1
starts = rng.integers(0, WORDS, (640, 1))
tokens = (starts + np.arange(LENGTH)) % WORDS + 2
gaps = rng.random(tokens.shape) < 0.2
masked = np.where(gaps, MASK, tokens)
loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
loss_tracker = keras.metrics.Mean(name="loss")


class MaskedLanguageModel(keras.Model):
    def train_step(self, inputs):
        if len(inputs) == 3:
            features, labels, sample_weight = inputs
        else:
            features, labels = inputs
            sample_weight = None
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = loss_fn(labels, predictions, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        loss_tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": loss_tracker.result()}

    @property
    def metrics(self):
        return [loss_tracker]


def make_model(width=16):
    inputs = layers.Input((LENGTH,), dtype="int64")
    positions = layers.Embedding(LENGTH, width)(ops.arange(LENGTH))
    x = layers.Embedding(WORDS + 2, width, name="words")(inputs) + positions
    attended = layers.MultiHeadAttention(2, width // 2)(x, x, x)
    x = layers.LayerNormalization(name="encoded")(x + layers.Dropout(0.1)(attended))
    x = layers.Dense(32, activation="relu")(x)
    return MaskedLanguageModel(
        inputs, layers.Dense(WORDS + 2, activation="softmax")(x), name="masked"
    )


# Under the scope:
model = make_model()
model.compile(optimizer=keras.optimizers.Adam(0.01))

dataset = (
    tf.data.Dataset.from_tensor_slices((masked, tokens, gaps.astype("float32")))
    .shuffle(1000)
    .batch(32)
)
history = model.fit(dataset, epochs=6, verbose=0)
predicted = model.predict(masked, verbose=0)
filled = np.mean(predicted.argmax(-1)[gaps] == tokens[gaps])

pretrained = keras.Model(model.input, model.get_layer("encoded").output)
pretrained.trainable = False
inputs = layers.Input((LENGTH,), dtype="int64")
x = layers.GlobalMaxPooling1D()(pretrained(inputs))
classifier = keras.Model(inputs, layers.Dense(WORDS)(x))
classifier.compile(
    keras.optimizers.Adam(0.05),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
classified = classifier.fit(tokens, starts[:, 0], epochs=3, verbose=0)

counts = {
    "iterations": (int(model.optimizer.iterations), int(classifier.optimizer.iterations)),
    "shape": predicted.shape,
}
figures = {"filled": (float(filled), 0.25), "loss": (history.history["loss"][-1], 0.4)}
