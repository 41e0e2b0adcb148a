"""Classifies handwritten digits with a small convolutional network that augments its images."""

import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")

augmentation = [
    keras.layers.RandomTranslation(0.1, 0.1),
    keras.layers.RandomRotation(0.02),
    keras.layers.RandomContrast(0.1),
]


def make_model():
    inputs = keras.Input((8, 8, 1))
    x = inputs
    for layer in augmentation:
        x = layer(x)
    for filters in (16, 32):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        x = keras.layers.Activation("relu")(x)
        x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Dropout(0.2)(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))


# Under the scope:
model = make_model()
model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])

history = model.fit(
    images[:1500], labels[:1500], batch_size=50, epochs=5, validation_split=0.1, verbose=0
)
loss, accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)
probabilities = model.predict(images[1500:], verbose=0)
assert abs(np.mean(np.argmax(probabilities, axis=1) == labels[1500:]) - accuracy) < 1e-5

counts = {
    "iterations": int(model.optimizer.iterations),
    "epochs": len(history.history["val_accuracy"]),
    "predictions": probabilities.shape,
    "parameters": model.count_params(),
}
figures = {"accuracy": (accuracy, 0.1), "training accuracy": (history.history["accuracy"][-1], 0.1)}
