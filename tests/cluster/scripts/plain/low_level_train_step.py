"""A `train_step` without `compute_loss`: the model keeps its own trackers of loss and error."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(19)
x = np.random.random((1000, 32)).astype("float32")
y = x[:, :4].sum(axis=1, keepdims=True)


class CustomModel(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        if len(data) == 3:
            x, y, sample_weight = data
        else:
            (x, y), sample_weight = data, None
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred, sample_weight=sample_weight)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.loss_fn(y, y_pred))
        self.mae_metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


# Under the scope:
inputs = keras.Input(shape=(32,))
outputs = keras.layers.Dense(1)(inputs)
model = CustomModel(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(0.02))

history = model.fit(x, y, epochs=10, verbose=0)
batches = float(model.loss_tracker.count)
weighted = model.fit(
    x, y, sample_weight=np.linspace(0, 1, 1000, dtype="float32"), epochs=1, verbose=0
)
result = model.evaluate(x, y, return_dict=True, verbose=0)

counts = {
    "iterations": int(model.optimizer.iterations),
    "batches": batches,
    "tested": (float(model.loss_tracker.count), float(model.mae_metric.count)),
}
figures = {"mae": (result["mae"], 0.08), "loss": (weighted.history["loss"][-1], 0.04)}
