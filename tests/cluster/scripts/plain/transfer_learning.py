"""Trains a network on five digits, and its frozen features on the other five; then fine-tunes all
of it.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(2)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
low, high = labels < 5, labels >= 5


def make_base():
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(32, activation="relu"),
        ],
        name="base",
    )


# Under the scope:
base = make_base()
model = keras.Sequential([base, keras.layers.Dense(5)])
inputs = keras.Input((64,))
transferred = keras.Model(inputs, keras.layers.Dense(5, name="head")(base(inputs, training=False)))

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
model.fit(images[low], labels[low], epochs=4, verbose=0)
features_before = base.predict(images[:10], verbose=0)

base.trainable = False
assert len(transferred.trainable_weights) == 2
assert len(transferred.non_trainable_weights) == 8
transferred.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
frozen = transferred.fit(images[high], labels[high] - 5, epochs=4, verbose=0)
np.testing.assert_allclose(
    base.predict(images[:10], verbose=0), features_before, rtol=1e-5, atol=1e-6
)
frozen_steps = int(transferred.optimizer.iterations)

base.trainable = True
assert len(transferred.trainable_weights) == 8
transferred.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
tuned = transferred.fit(images[high], labels[high] - 5, epochs=4, verbose=0)
assert np.abs(base.predict(images[:10], verbose=0) - features_before).max() > 1e-3

counts = {
    "frozen": frozen_steps,
    "tuned": int(transferred.optimizer.iterations),
    "first": int(model.optimizer.iterations),
}
figures = {
    "frozen": (frozen.history["accuracy"][-1], 0.08),
    "tuned": (tuned.history["accuracy"][-1], 0.08),
}
