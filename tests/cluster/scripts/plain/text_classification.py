"""Classifies raw strings: the vectorisation is part of the model."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
words = {
    1: ["great", "lovely", "superb", "moving", "funny", "warm"],
    0: ["dull", "awful", "tedious", "clumsy", "empty", "cold"],
}
common = [
    "the",
    "film",
    "was",
    "a",
    "story",
    "of",
    "people",
    "and",
    "places",
    "in",
    "time",
    "with",
    "some",
    "actors",
]


def review(label):
    chosen = (
        list(rng.choice(common, 12))
        + list(rng.choice(words[label], 3))
        + list(rng.choice(words[1 - label], 1))
    )
    rng.shuffle(chosen)
    return " ".join(chosen).capitalize() + "!"


labels = rng.integers(0, 2, 800)
texts = np.array([review(label) for label in labels], dtype=object)
train = tf.data.Dataset.from_tensor_slices((texts[:640], labels[:640])).batch(32)
test = tf.data.Dataset.from_tensor_slices((texts[640:], labels[640:])).batch(32)

# Under the scope:
vectorize = keras.layers.TextVectorization(max_tokens=50, output_sequence_length=20)
vectorize.adapt(train.map(lambda text, label: text))
model = keras.Sequential(
    [
        keras.Input((), dtype="string"),
        vectorize,
        keras.layers.Embedding(50, 16, mask_zero=True),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])

history = model.fit(train, epochs=4, validation_data=test, verbose=0)
_, accuracy = model.evaluate(test, verbose=0)
scores = model.predict(
    tf.constant(["A great and superb film", "the film was dull and tedious"]), verbose=0
)
assert scores[0, 0] > 0.5 > scores[1, 0]

counts = {
    "iterations": int(model.optimizer.iterations),
    "vocabulary": [str(word) for word in vectorize.get_vocabulary()],
    "scores": scores.shape,
}
figures = {"accuracy": (accuracy, 0.05), "loss": (history.history["loss"][-1], 0.1)}
