"""Removes noise from digits; the encoder is a model of its own that shares the layers."""

import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(9)
images = (load_digits().images / 16).reshape(-1, 8, 8, 1).astype("float32")
noisy = np.clip(images + np.random.default_rng(9).normal(0, 0.3, images.shape), 0, 1).astype(
    "float32"
)

# Under the scope:
inputs = keras.Input((8, 8, 1))
x = keras.layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(inputs)
code = keras.layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
x = keras.layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu")(code)
x = keras.layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu")(x)
autoencoder = keras.Model(
    inputs, keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x)
)
encoder = keras.Model(inputs, code)
autoencoder.compile(keras.optimizers.Adam(0.005), "binary_crossentropy")

history = autoencoder.fit(noisy[:1500], images[:1500], batch_size=50, epochs=4, verbose=0)
loss = autoencoder.evaluate(noisy[1500:], images[1500:], verbose=0)
codes = encoder.predict(noisy[1500:], verbose=0)
assert np.std(codes) > 0
assert loss < history.history["loss"][0]

counts = {"iterations": int(autoencoder.optimizer.iterations), "codes": codes.shape}
figures = {"loss": (loss, 0.04)}
