"""Layers that make weights late, nest, add losses, count what they see, and a model that tracks a
metric of its own.
"""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(20)
x = np.random.normal(size=(960, 12)).astype("float32")
y = (np.abs(x[:, 0]) > 0.7).astype("int32")


class Linear(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.w = self.add_weight(
            shape=(input_shape[-1], self.units), initializer="random_normal", trainable=True
        )
        self.b = self.add_weight(shape=(self.units,), initializer="random_normal", trainable=True)

    def call(self, inputs):
        return ops.matmul(inputs, self.w) + self.b

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class ActivityRegularization(layers.Layer):
    def __init__(self, rate=1e-3, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * ops.mean(inputs**2))
        return inputs


class ComputeSum(layers.Layer):
    """Keeps the number of examples it has seen in a weight that does not train."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.total = self.add_weight(initializer="zeros", shape=(), trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.total.assign(self.total + ops.cast(ops.shape(inputs)[0], "float32"))
        return inputs


class Dropout(layers.Layer):
    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs, training=None):
        return (
            keras.random.dropout(inputs, rate=self.rate, seed=self.seed_generator)
            if training
            else inputs
        )


class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.counter = ComputeSum()
        self.blocks = [Linear(24), Linear(24)]
        self.regularize = ActivityRegularization()
        self.dropout = Dropout(0.1)
        self.classifier = Linear(2)
        self.size = keras.metrics.Mean(name="activity")

    def call(self, inputs, training=False):
        h = self.counter(inputs, training=training)
        for block in self.blocks:
            h = self.regularize(ops.relu(block(h)))
        return self.classifier(self.dropout(h, training=training))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.size.update_state(ops.abs(y_pred))
        return super().compute_metrics(x, y, y_pred, sample_weight)


# Under the scope:
model = Network()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])

history = model.fit(x, y, batch_size=32, epochs=6, verbose=0)
result = model.evaluate(x, y, return_dict=True, verbose=0)
assert result["activity"] > 0

counts = {
    "iterations": int(model.optimizer.iterations),
    "seen": float(model.counter.total.numpy()),
    "outputs": float(model.size.count),
    "trainable": len(model.trainable_weights),
}
figures = {"accuracy": (result["accuracy"], 0.08), "loss": (history.history["loss"][-1], 0.12)}
