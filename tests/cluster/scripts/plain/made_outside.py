"""Metric, loss, optimizer and a layer are objects that are made first and handed to the model
later.
"""

import keras
import numpy as np

keras.utils.set_random_seed(30)
x = np.random.normal(size=(1280, 8)).astype("float32")
y = (x[:, :1] * x[:, 1:2] > 0).astype("float32")


class BinaryTruePositives(keras.metrics.Metric):
    """Counts true positives, and in passing the batches."""

    def __init__(self, name="binary_true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_weight(shape=(), initializer="zeros", name="true_positives")
        self.batches = self.add_weight(shape=(), initializer="zeros", name="batches")

    def update_state(self, y_true, y_pred, sample_weight=None):
        hits = keras.ops.logical_and(keras.ops.equal(y_true, 1), keras.ops.greater(y_pred, 0.5))
        self.true_positives.assign_add(keras.ops.sum(keras.ops.cast(hits, self.dtype)))
        self.batches.assign(self.batches + 1)

    def result(self):
        return self.true_positives


class WeightedLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.losses.binary_crossentropy(y_true, y_pred) * (
            1 + keras.ops.squeeze(y_true, -1)
        )


optimizer = keras.optimizers.Adam(0.02)
positives = BinaryTruePositives()
area = keras.metrics.AUC(name="auc")
schedule = keras.optimizers.schedules.ExponentialDecay(0.02, decay_steps=40, decay_rate=0.9)
second_optimizer = keras.optimizers.RMSprop(schedule)
normalize = keras.layers.Normalization()
normalize.adapt(x)
hidden = keras.layers.Dense(16, activation="relu")
hidden.build((None, 8))


def make_model(*first):
    return keras.Sequential(
        [keras.Input((8,)), *first, keras.layers.Dense(1, activation="sigmoid")]
    )


# Under the scope:
model = make_model(normalize, hidden)
model.compile(optimizer, WeightedLoss(), metrics=[positives, area, "accuracy"])
second = make_model(keras.layers.Dense(16, activation="tanh"))
second.compile(second_optimizer, "binary_crossentropy", metrics=[keras.metrics.BinaryAccuracy()])

history = model.fit(x, y, epochs=4, verbose=0)
batches = float(positives.batches.numpy())
result = model.evaluate(x, y, return_dict=True, verbose=0)
predicted = model.predict(x, verbose=0) > 0.5
assert result["binary_true_positives"] == np.sum(predicted * y)
assert model.optimizer is optimizer
second.fit(x, y, epochs=2, verbose=0)

counts = {
    "iterations": (int(optimizer.iterations), int(second_optimizer.iterations)),
    "batches": (batches, float(positives.batches.numpy())),
    "rate": round(float(second_optimizer.learning_rate), 7),
}
figures = {"accuracy": (result["accuracy"], 0.06), "auc": (history.history["auc"][-1], 0.06)}
