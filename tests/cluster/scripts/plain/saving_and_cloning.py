"""Saves and loads models and weights, clones, moves weights between models, trains again."""

import keras
import numpy as np

keras.utils.set_random_seed(26)
x = np.random.random((640, 16)).astype("float32")
y = (x[:, :1] - 2 * x[:, 1:2] ** 2).astype("float32")


@keras.saving.register_keras_serializable(package="scripts")
class Scaled(keras.layers.Layer):
    def __init__(self, factor=2.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


@keras.saving.register_keras_serializable(package="scripts")
def smooth_loss(target, prediction):
    return keras.ops.mean(keras.ops.log(keras.ops.cosh(prediction - target)), axis=-1)


def make_model():
    inputs = keras.Input((16,))
    x = Scaled(0.5)(keras.layers.Dense(24, activation="relu")(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(x))


# Under the scope:
model = make_model()
model.compile(keras.optimizers.Adam(0.01), loss=smooth_loss, metrics=["mae"])

model.fit(x, y, epochs=2, verbose=0)
expected = model.predict(x, verbose=0)
model.save("whole.keras")
model.save_weights("some.weights.h5")
model.export("exported", verbose=False)

loaded = keras.saving.load_model("whole.keras")
np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)
assert int(loaded.optimizer.iterations) == 40
for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables):
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6)
goes_on = loaded.fit(x, y, epochs=6, initial_epoch=2, verbose=0)

cloned = keras.models.clone_model(model)
cloned.set_weights(model.get_weights())
np.testing.assert_allclose(cloned.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)
cloned.compile("sgd", "mse")
cloned.fit(x, y, epochs=1, verbose=0)

from_weights = make_model()
from_weights.load_weights("some.weights.h5")
np.testing.assert_allclose(from_weights.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)

from_config = keras.Model.from_config(model.get_config())
for new, old in zip(from_config.layers, model.layers):
    new.set_weights(old.get_weights())
assert keras.models.model_from_json(model.to_json()).count_params() == model.count_params()

part = keras.Model(model.inputs, model.layers[1].output)
assert part.predict(x[:5], verbose=0).shape == (5, 24)
served = keras.layers.TFSMLayer("exported", call_endpoint="serve")
np.testing.assert_allclose(served(x), expected, rtol=1e-5, atol=1e-5)

counts = {
    "iterations": (
        int(model.optimizer.iterations),
        int(loaded.optimizer.iterations),
        int(cloned.optimizer.iterations),
    ),
    "epochs": goes_on.epoch,
    "parameters": from_config.count_params(),
}
# Workers that do not wait for each other may be far apart in so few steps.
figures = {"mae": (goes_on.history["mae"][-1], 0.15)}
