"""A functional model with two inputs and two outputs, each with its loss, weight and metrics; class
and sample weights.
"""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(21)
rng = np.random.default_rng(21)
SIZE = 640
titles = rng.integers(0, 30, (SIZE, 6))
tags = rng.integers(0, 2, (SIZE, 5)).astype("float32")
priority = ((titles < 6).any(axis=1) & (tags[:, 0] > 0)).astype("float32")[:, None]
department = (titles[:, 0] % 3).astype("int32")


def make_model():
    title = keras.Input((None,), name="title", dtype="int32")
    tag = keras.Input((5,), name="tags")
    x = layers.GRU(12)(layers.Embedding(30, 12)(title))
    x = layers.concatenate([x, tag])
    first = layers.Dense(1, name="priority")(x)
    second = layers.Dense(3, name="department")(x)
    return keras.Model(
        inputs={"title": title, "tags": tag}, outputs={"priority": first, "department": second}
    )


# Under the scope:
model = make_model()
model.compile(
    optimizer=keras.optimizers.RMSprop(5e-3),
    loss={
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"priority": 1.0, "department": 0.5},
    metrics={"priority": [keras.metrics.BinaryAccuracy(threshold=0.0)], "department": ["accuracy"]},
    weighted_metrics={"department": ["accuracy"]},
)

inputs, targets = {"title": titles, "tags": tags}, {"priority": priority, "department": department}
history = model.fit(inputs, targets, epochs=5, batch_size=32, verbose=0)
weights = {"priority": rng.uniform(0.5, 1.5, SIZE), "department": rng.uniform(0.5, 1.5, SIZE)}
weighted = model.fit(inputs, targets, sample_weight=weights, epochs=1, batch_size=32, verbose=0)
result = model.evaluate(inputs, targets, return_dict=True, verbose=0)
predicted = model.predict(inputs, verbose=0)

single = keras.Model(model.inputs, ops.sigmoid(model.output["priority"]))
single.compile("sgd", "binary_crossentropy")
balanced = single.fit(inputs, priority, class_weight={0: 1.0, 1: 4.0}, epochs=1, verbose=0)

counts = {
    "iterations": (int(model.optimizer.iterations), int(single.optimizer.iterations)),
    "logs": sorted(history.history),
    "shapes": {name: value.shape for name, value in predicted.items()},
}
figures = {
    "loss": (result["loss"], 0.15),
    "department": (result["department_accuracy"], 0.15),
    "weighted": (weighted.history["loss"][-1], 0.15),
    "balanced": (balanced.history["loss"][-1], 0.2),
}
