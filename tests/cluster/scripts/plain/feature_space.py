"""Structured data through a `FeatureSpace`: crosses, hashes and one-hot codes, in tf.data or inside
the model.
"""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(5)
rng = np.random.default_rng(5)
SIZE = 640
columns = {
    "pressure": rng.normal(120, 15, SIZE).astype("float32"),
    "age": rng.integers(20, 80, SIZE).astype("float32"),
    "thal": rng.choice(["fixed", "normal", "reversible"], SIZE).astype(object),
    "sex": rng.integers(0, 2, SIZE),
    "code": rng.choice([f"c{i}" for i in range(40)], SIZE).astype(object),
}
target = ((columns["thal"] == "normal") == (columns["sex"] == 1)).astype("float32")
everything = tf.data.Dataset.from_tensor_slices((columns, target))
train, validation = everything.take(512), everything.skip(512)

space = keras.utils.FeatureSpace(
    {
        "pressure": "float_normalized",
        "age": keras.utils.FeatureSpace.float_discretized(num_bins=8),
        "thal": "string_categorical",
        "sex": "integer_categorical",
        "code": keras.utils.FeatureSpace.string_hashed(num_bins=16),
    },
    crosses=[keras.utils.FeatureSpace.cross(("sex", "thal"), crossing_dim=16)],
    output_mode="concat",
)

# Under the scope:
space.adapt(train.map(lambda features, target: features).batch(32))
encoded = space.get_encoded_features()
hidden = keras.layers.Dense(32, activation="relu")(encoded)
output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dropout(0.1)(hidden))
training_model = keras.Model(encoded, output)
training_model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
inference_model = keras.Model(space.get_inputs(), output)

training_model.fit(
    train.batch(32).map(lambda features, target: (space(features), target)),
    validation_data=validation.batch(32).map(lambda features, target: (space(features), target)),
    epochs=6,
    verbose=0,
)
inference_model.compile(loss="binary_crossentropy", metrics=["accuracy"])
_, accuracy = inference_model.evaluate(validation.batch(32), verbose=0)
_, same = training_model.evaluate(
    validation.batch(32).map(lambda f, target: (space(f), target)), verbose=0
)
assert abs(accuracy - same) < 1e-5
one = {name: tf.convert_to_tensor([column[0]]) for name, column in columns.items()}
assert inference_model.predict(one, verbose=0).shape == (1, 1)

counts = {"iterations": int(training_model.optimizer.iterations), "width": encoded.shape[1]}
figures = {"accuracy": (accuracy, 0.06)}
