"""Reads CSV files of unknown length with tf.data, and looks strings up inside the model."""

import csv
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(6)
rng = np.random.default_rng(6)
species = ["ash", "beech", "cedar", "oak", "pine"]
folder = pathlib.Path(tempfile.mkdtemp())
for number in range(3):
    with open(folder / f"trees-{number}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["species", "height", "age"])
        for _ in range(203):
            kind, height = rng.integers(5), rng.uniform(1, 10)
            writer.writerow([species[kind], f"{height:.4f}", f"{(kind + 1) * height:.4f}"])

dataset = tf.data.experimental.make_csv_dataset(
    str(folder / "trees-*.csv"),
    batch_size=32,
    label_name="age",
    num_epochs=1,
    shuffle=False,
    column_defaults=["", 0.0, 0.0],
).map(lambda features, label: (dict(features), label))

# Under the scope:
inputs = {
    "species": keras.Input((), dtype="string", name="species"),
    "height": keras.Input((), name="height"),
}
lookup = keras.layers.StringLookup(vocabulary=species)
kind = keras.layers.Embedding(lookup.vocabulary_size(), 8)(lookup(inputs["species"]))
height = keras.layers.Reshape((1,))(inputs["height"])
x = keras.layers.Dense(32, activation="relu")(keras.layers.Concatenate()([kind, height]))
model = keras.Model(inputs, keras.layers.Dense(1)(x))
model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])

steps = []
count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
history = model.fit(dataset, epochs=5, callbacks=[count], verbose=0)
result = model.evaluate(dataset, return_dict=True, verbose=0)
predictions = model.predict(dataset.map(lambda features, label: features), verbose=0)

# Not the optimizer's iterations: plain Keras counts one more where it finds the data at their end.
counts = {"steps": len(steps), "predictions": predictions.shape, "epochs": len(history.epoch)}
figures = {
    "error": (result["mae"], 1.2),
    "improvement": (history.history["mae"][0] - result["mae"], 2.0),
}
