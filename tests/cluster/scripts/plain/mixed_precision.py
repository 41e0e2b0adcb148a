"""Computes in float16 and keeps float32 weights; the optimizer scales the loss."""

import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(27)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
keras.mixed_precision.set_global_policy("mixed_float16")

# Under the scope:
inputs = keras.Input(shape=(64,), name="digits")
x = keras.layers.Dense(64, activation="relu", name="dense_1")(inputs)
x = keras.layers.Dense(32, activation="relu", name="dense_2")(x)
x = keras.layers.Dense(10, name="dense_logits")(x)
outputs = keras.layers.Activation("softmax", dtype="float32", name="predictions")(x)
model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(
    keras.optimizers.RMSprop(0.003), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
)

assert model.layers[1].kernel.dtype == "float32"
assert model.layers[1].compute_dtype == "float16"
history = model.fit(
    images[:1440], labels[:1440], batch_size=48, epochs=4, validation_split=0.2, verbose=0
)
_, accuracy = model.evaluate(images[1440:], labels[1440:], verbose=0)
keras.mixed_precision.set_global_policy("float32")
assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)

counts = {
    "iterations": int(model.optimizer.iterations),
    "inner iterations": int(model.optimizer.inner_optimizer.iterations),
    "output": model.predict(images[:3], verbose=0).dtype == np.float32,
}
figures = {"accuracy": (accuracy, 0.08), "loss": (history.history["loss"][-1], 0.15)}
