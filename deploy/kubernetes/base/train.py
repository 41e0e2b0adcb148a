"""A training to try a cluster with: put your script in its place.

The classes are the signs of sums, so the accuracy rises towards 1.
"""

from __future__ import annotations

import os

import keras
import numpy as np
import tensorflow as tf

import kerasps

EPOCHS = int(os.environ.get("EPOCHS", "5"))
STEPS = int(os.environ.get("STEPS", "200"))
BACKUPS = os.environ.get("BACKUPS", "/checkpoints/backup")

strategy = kerasps.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, "relu"),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])

x = np.random.default_rng(0).normal(size=(8192, 16)).astype("float32")
y = (x.sum(1) > 0).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(8192, seed=1).repeat().batch(64)

history = model.fit(
    dataset,
    epochs=EPOCHS,
    steps_per_epoch=STEPS,
    # After the loss of a ps or of the chief the script runs again, and goes on from here.
    callbacks=[keras.callbacks.BackupAndRestore(BACKUPS)],
    verbose=2,
)
print(f"accuracy {history.history['accuracy'][-1]:.3f}", flush=True)
