"""Trains under a cluster that is around it, and says where it stands; run by test_restarts.py.

    python restarted_training.py FOLDER [EPOCHS [STEPS]]

With a gradient of 1 and a learning rate of 1, the weight is minus the number of its updates. In the
middle of epoch 3, for example, it waits while there is a file `held-3` in the folder, so that
something can be killed in that epoch. What happens is written to the file `events`, one JSON record
a line, with the time of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

folder = pathlib.Path(sys.argv[1])
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 4
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 20


def tell(what, **details):
    record = {"what": what, "time": time.monotonic(), "pid": os.getpid(), **details}
    with (folder / "events").open("a") as events:
        events.write(json.dumps(record) + "\n")


tell("started", tf_config=os.environ["TF_CONFIG"])

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import kerasps  # noqa: E402

tell("imported")


class Weight(keras.layers.Layer):
    """Gives its weight, which has a gradient of 1."""

    def build(self, input_shape):
        self.weight = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return tf.reduce_sum(x, -1, keepdims=True) * 0.0 + self.weight


class Output(keras.losses.Loss):
    """The output itself."""

    def call(self, y_true, y_pred):
        return tf.reduce_mean(y_pred, -1)


class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            tell("step")
        while batch == STEPS // 2 and self.held.exists():
            time.sleep(0.01)

    def on_epoch_begin(self, epoch, logs=None):
        self.held = folder / f"held-{epoch}"
        tell("epoch", epoch=epoch)


strategy = kerasps.ParameterServerStrategy()
tell("connected")
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), Weight()])
    model.compile(keras.optimizers.SGD(1.0), Output())
backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
dataset = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat()
model.fit(dataset, epochs=EPOCHS, steps_per_epoch=STEPS, callbacks=[backup, Tell()], verbose=0)
tell("done", updates=-float(model.get_weights()[0]), iterations=int(model.optimizer.iterations))
