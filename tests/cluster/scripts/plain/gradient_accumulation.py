"""Adds up the gradients of four batches before each update, with clipping, weight decay and
averaged weights.
"""

import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(28)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")

# Under the scope:
model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(48, "relu"), keras.layers.Dense(10)]
)
optimizer = keras.optimizers.AdamW(
    0.01,
    weight_decay=1e-4,
    gradient_accumulation_steps=4,
    global_clipnorm=1.0,
    use_ema=True,
    ema_momentum=0.8,
)
model.compile(
    optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)

history = model.fit(images[:1440], labels[:1440], batch_size=12, epochs=3, verbose=0)
_, accuracy = model.evaluate(images[1440:], labels[1440:], verbose=0)

counts = {
    "iterations": int(model.optimizer.iterations),
    "variables": len(model.optimizer.variables),
}
figures = {"accuracy": (accuracy, 0.08), "loss": (history.history["loss"][-1], 0.2)}
