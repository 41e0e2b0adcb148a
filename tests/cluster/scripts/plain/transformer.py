"""Classifies sequences of tokens with a transformer block written as layers of its own."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(8)
VOCABULARY, LENGTH = 40, 12


class TransformerBlock(layers.Layer):
    def __init__(self, width, heads, inner, rate=0.1):
        super().__init__()
        self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=width // heads)
        self.feed_forward = keras.Sequential(
            [layers.Dense(inner, activation="relu"), layers.Dense(width)]
        )
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [layers.Dropout(rate) for _ in range(2)]

    def call(self, inputs, training=None):
        attended = self.dropouts[0](self.attention(inputs, inputs), training=training)
        hidden = self.norms[0](inputs + attended)
        return self.norms[1](
            hidden + self.dropouts[1](self.feed_forward(hidden), training=training)
        )


class TokenAndPosition(layers.Layer):
    def __init__(self, length, vocabulary, width):
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, width)
        self.positions = layers.Embedding(length, width)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[-1]))


rng = np.random.default_rng(8)
tokens = rng.integers(0, VOCABULARY, (960, LENGTH))
labels = np.where((tokens < 4).sum(axis=1) >= 2, 1, 0)

# Under the scope:
inputs = keras.Input((LENGTH,), dtype="int32")
x = TokenAndPosition(LENGTH, VOCABULARY, 16)(inputs)
x = TransformerBlock(16, heads=2, inner=32)(x)
x = layers.GlobalAveragePooling1D()(x)
model = keras.Model(inputs, layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(x)))
model.compile(keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy", metrics=["accuracy"])

history = model.fit(
    tokens[:800],
    labels[:800],
    batch_size=32,
    epochs=6,
    validation_data=(tokens[800:], labels[800:]),
    verbose=0,
)

counts = {"iterations": int(model.optimizer.iterations), "weights": len(model.weights)}
figures = {"accuracy": (history.history["val_accuracy"][-1], 0.12)}
