"""A function makes the model; what is trained with is decided later, by name."""

import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(31)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
targets = keras.utils.to_categorical(labels)


def get_model():
    inputs = keras.Input((64,))
    x = keras.layers.Dense(48, activation="gelu", kernel_regularizer="l2")(inputs)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))


# Under the scope:
model = get_model()

model.compile(
    "adam",
    "categorical_crossentropy",
    metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(3, name="top3")],
)
first = model.fit(images[:1440], targets[:1440], epochs=3, verbose=0)
adam_steps = int(model.optimizer.iterations)
model.compile(
    keras.optimizers.SGD(0.01, momentum=0.8),
    keras.losses.CategoricalCrossentropy(),
    metrics=["accuracy"],
)
second = model.fit(images[:1440], targets[:1440], epochs=2, verbose=0)
_, accuracy = model.evaluate(images[1440:], targets[1440:], verbose=0)

counts = {
    "iterations": (adam_steps, int(model.optimizer.iterations)),
    "slots": len(model.optimizer.variables),
}
figures = {
    "accuracy": (accuracy, 0.1),
    "top3": (first.history["top3"][-1], 0.03),
    "loss": (second.history["loss"][-1], 0.15),
}
