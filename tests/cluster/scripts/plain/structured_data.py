"""Predicts from a table with numbers, strings and codes, each through a preprocessing layer of the
model.
"""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(4)
rng = np.random.default_rng(4)
SIZE = 1000
data = {
    "age": rng.normal(50, 12, SIZE).astype("float32"),
    "city": rng.choice(["Oslo", "Lima", "Pune", "Kyiv"], SIZE).astype(object),
    "code": rng.choice([11, 22, 33, 44, 55], SIZE),
}
target = (
    (data["age"] > 50) ^ np.isin(data["city"], ["Oslo", "Lima"]) | (data["code"] == 33)
).astype("float32")
train, test = [
    {name: column[part, None] for name, column in data.items()}
    for part in (slice(800), slice(800, None))
]


def dataset(part, target):
    return tf.data.Dataset.from_tensor_slices((part, target)).shuffle(1000).batch(40)


normalize = keras.layers.Normalization(axis=None)
normalize.adapt(train["age"])


def make_model():
    inputs = {
        "age": keras.Input((1,), name="age"),
        "city": keras.Input((1,), name="city", dtype="string"),
        "code": keras.Input((1,), name="code", dtype="int64"),
    }
    city = keras.layers.StringLookup(output_mode="one_hot")
    city.adapt(train["city"])
    code = keras.layers.IntegerLookup()
    code.adapt(train["code"])
    embedded = keras.layers.Flatten()(
        keras.layers.Embedding(code.vocabulary_size(), 4)(code(inputs["code"]))
    )
    features = keras.layers.concatenate([normalize(inputs["age"]), city(inputs["city"]), embedded])
    hidden = keras.layers.Dense(32, activation="relu")(features)
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))


# Under the scope:
model = make_model()
model.compile(
    keras.optimizers.Adam(0.02),
    "binary_crossentropy",
    metrics=["accuracy", keras.metrics.AUC(name="auc")],
)

model.fit(dataset(train, target[:800]), epochs=8, verbose=0)
result = model.evaluate(dataset(test, target[800:]), return_dict=True, verbose=0)
sample = {
    "age": tf.constant([[60.0]]),
    "city": tf.constant([["Nowhere"]]),
    "code": tf.constant([[33]]),
}
assert model.predict(sample, verbose=0).shape == (1, 1)

counts = {"iterations": int(model.optimizer.iterations), "parameters": model.count_params()}
figures = {"accuracy": (result["accuracy"], 0.06), "auc": (result["auc"], 0.05)}
