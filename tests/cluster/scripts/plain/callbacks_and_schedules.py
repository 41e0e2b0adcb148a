"""Callbacks that stop, slow down, write and count, a learning-rate schedule of one's own, and a fit
that goes on.
"""

import pathlib

import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(25)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
x_train, y_train, x_test, y_test = images[:1440], labels[:1440], images[1440:], labels[1440:]


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Rises for some steps, then falls with their square root."""

    def __init__(self, peak, steps):
        self.peak, self.steps = peak, steps

    def __call__(self, step):
        step = keras.ops.cast(step, "float32") + 1
        return self.peak * keras.ops.minimum(step / self.steps, keras.ops.sqrt(self.steps / step))


class BatchLosses(keras.callbacks.Callback):
    """Keeps what each batch reports."""

    def on_train_begin(self, logs=None):
        self.batches, self.losses, self.epochs = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        self.losses.append(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(float(self.model.optimizer.learning_rate))


def make_model(rate):
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


# Under the scope:
model, plateau, warm = make_model(0.05), make_model(1e-7), make_model(WarmUp(0.1, 20.0))

data = {
    "x": x_train,
    "y": y_train,
    "batch_size": 48,
    "verbose": 0,
    "validation_data": (x_test, y_test),
}
losses = BatchLosses()
callbacks = [
    keras.callbacks.ModelCheckpoint("best.keras", monitor="val_accuracy", save_best_only=True),
    keras.callbacks.ModelCheckpoint("{epoch:02d}.weights.h5", save_weights_only=True),
    keras.callbacks.BackupAndRestore("backup"),
    keras.callbacks.CSVLogger("log.csv"),
    keras.callbacks.TerminateOnNaN(),
    keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: None),
    losses,
]
history = model.fit(epochs=4, callbacks=callbacks, **data)
best = keras.models.load_model("best.keras")
_, accuracy = best.evaluate(x_test, y_test, verbose=0)
assert abs(accuracy - max(history.history["val_accuracy"])) < 1e-5
assert sorted(path.name for path in pathlib.Path().glob("*.weights.h5")) == [
    f"0{n}.weights.h5" for n in range(1, 5)
]
assert len(pathlib.Path("log.csv").read_text().splitlines()) == 5

stopping = keras.callbacks.EarlyStopping(
    "val_accuracy", min_delta=0.9, patience=1, restore_best_weights=True
)
slower = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=0, min_delta=10.0)
stopped = plateau.fit(epochs=10, callbacks=[stopping, slower], **data)
rates = [round(rate * 1e9) for rate in stopped.history["learning_rate"]]
step_rates = keras.callbacks.LearningRateScheduler(
    lambda epoch, rate: 0.1 if epoch < 2 else rate / 10
)
scheduled = plateau.fit(epochs=4, callbacks=[step_rates], **data)
rates += [round(rate * 1e4) for rate in scheduled.history["learning_rate"]]
warmed = warm.fit(epochs=3, initial_epoch=1, **data)

counts = {
    "iterations": (
        int(model.optimizer.iterations),
        int(plateau.optimizer.iterations),
        int(warm.optimizer.iterations),
    ),
    "batches": (len(losses.batches), max(losses.batches), len(losses.epochs)),
    "stopped after": len(stopped.epoch),
    "rates": rates,
    "warmed": warmed.epoch,
}
figures = {
    "accuracy": (accuracy, 0.05),
    "warmed": (warmed.history["val_accuracy"][-1], 0.08),
    "last batches": (float(np.mean(losses.losses[-10:])), 0.15),
}
