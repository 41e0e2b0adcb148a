"""One model is trained, tested, looked into, changed by hand and trained again."""

import contextlib
import io

import keras
import numpy as np

keras.utils.set_random_seed(32)
x = np.random.normal(size=(803, 10)).astype("float32")
y = x @ np.linspace(-1, 1, 10, dtype="float32")[:, None]


class Batches(keras.metrics.Metric):
    def __init__(self, name="batches", **kwargs):
        super().__init__(name=name, **kwargs)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1)

    def result(self):
        return self.count


# Under the scope:
encoder = keras.Sequential([keras.Input((10,)), keras.layers.Dense(8, "tanh")], name="encoder")
model = keras.Sequential([encoder, keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse", metrics=[Batches(), "mae"])

text = io.StringIO()
with contextlib.redirect_stdout(text):
    model.summary()
assert "encoder" in text.getvalue()
first = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
tested = model.evaluate(x, y, batch_size=100, return_dict=True, verbose=0)
second = model.fit(x, y, batch_size=50, epochs=1, verbose=0)
codes = encoder.predict(x, batch_size=64, verbose=0)
np.testing.assert_allclose(codes, encoder(x), rtol=1e-5, atol=1e-6)

weights = model.get_weights()
model.set_weights([np.zeros_like(weight) for weight in weights])
assert not model.predict(x, verbose=0).any()
model.set_weights(weights)
model.layers[-1].bias.assign(model.layers[-1].bias + 1.0)
np.testing.assert_allclose(
    model.predict(x, verbose=0),
    np.tanh(x @ weights[0] + weights[1]) @ weights[2] + weights[3] + 1,
    1e-4,
    1e-5,
)
model.set_weights(weights)
third = model.fit(x, y, batch_size=16, epochs=3, initial_epoch=2, verbose=0, steps_per_epoch=20)
again = model.evaluate(x, y, verbose=0, steps=5)
one = model.train_on_batch(x[:32], y[:32], return_dict=True)
assert np.isfinite(one["loss"])

counts = {
    "iterations": int(model.optimizer.iterations),
    "batches": (
        first.history["batches"],
        tested["batches"],
        second.history["batches"],
        third.history["batches"],
    ),
    "tested": again[1],
    "codes": codes.shape,
}
figures = {"mae": (tested["mae"], 0.06), "loss": (third.history["loss"][-1], 0.05)}
