"""Wide and deep: hashed crosses beside embeddings of hashed strings and discretised numbers, on
data of unknown length.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(23)
rng = np.random.default_rng(23)
SIZE = 1200
table = {
    "job": rng.choice([f"job {number}" for number in range(12)], SIZE).astype(object),
    "place": rng.choice([f"place {number}" for number in range(12)], SIZE).astype(object),
    "hours": rng.uniform(0, 60, SIZE).astype("float32"),
}
target = ((np.char.str_len(table["job"].astype(str)) == 6) ^ (table["hours"] > 30)).astype(
    "float32"
)


def wide_and_deep():
    inputs = {
        "job": keras.Input((), name="job", dtype="string"),
        "place": keras.Input((), name="place", dtype="string"),
        "hours": keras.Input((), name="hours"),
    }
    wide = layers.HashedCrossing(64, output_mode="one_hot")((inputs["job"], inputs["place"]))
    deep = [layers.Embedding(32, 6)(layers.Hashing(32)(inputs[name])) for name in ("job", "place")]
    deep.append(
        layers.Embedding(7, 6)(layers.Discretization([10, 20, 30, 40, 50])(inputs["hours"]))
    )
    deep = layers.BatchNormalization()(layers.concatenate(deep))
    deep = layers.Dropout(0.1)(layers.Dense(32, "relu")(deep))
    return keras.Model(
        inputs, layers.Dense(1, activation="sigmoid")(layers.concatenate([wide, deep]))
    )


dataset = tf.data.Dataset.from_tensor_slices((table, target)).filter(
    lambda row, target: row["hours"] > 1.0
)
train, test = dataset.skip(200).shuffle(500, seed=1).batch(32), dataset.take(200).batch(32)

# Under the scope:
model = wide_and_deep()
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])

steps = []
count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
history = model.fit(train, epochs=5, callbacks=[count], verbose=0)
_, accuracy = model.evaluate(test, verbose=0)

# Not the optimizer's iterations: plain Keras counts one more where it finds the data at their end.
counts = {"steps": len(steps), "predictions": model.predict(test, verbose=0).shape}
figures = {"accuracy": (accuracy, 0.1), "loss": (history.history["loss"][-1], 0.12)}
