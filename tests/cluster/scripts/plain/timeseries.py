"""Forecasts a noisy wave with an LSTM over windows of it."""

import keras
import numpy as np

keras.utils.set_random_seed(7)
rng = np.random.default_rng(7)
steps = np.arange(1200)
series = (np.sin(steps / 8) + 0.3 * np.sin(steps / 3) + rng.normal(0, 0.05, len(steps))).astype(
    "float32"
)
PAST = 16


def windows(part, shuffle):
    return keras.utils.timeseries_dataset_from_array(
        part[:-PAST, None],
        part[PAST:],
        sequence_length=PAST,
        batch_size=32,
        shuffle=shuffle,
        seed=1 if shuffle else None,
    )


train, validation = windows(series[:1000], shuffle=True), windows(series[1000:], shuffle=False)

# Under the scope:
model = keras.Sequential([keras.Input((PAST, 1)), keras.layers.LSTM(16), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse")

history = model.fit(
    train,
    epochs=6,
    validation_data=validation,
    verbose=0,
    callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True)],
)
loss = model.evaluate(validation, verbose=0)
forecast = model.predict(validation, verbose=0)
assert loss < 0.5 * np.var(series[1000:])
assert abs(loss - min(history.history["val_loss"])) < 1e-5

counts = {"iterations": int(model.optimizer.iterations), "forecast": forecast.shape}
figures = {"loss": (loss, 0.05)}
