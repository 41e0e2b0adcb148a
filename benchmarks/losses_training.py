"""The training of losses.py: small steps, and a line in a file for each event.

python losses_training.py FOLDER SECONDS
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import kerasps

STEPS_PER_EXECUTION, BATCH = 10, 64
_POLL_S = 0.01


class Record(keras.callbacks.Callback):
    """Records the times at which executions end, and stops the training at its time limit."""

    def __init__(self, file, until):
        super().__init__()
        self.file, self.until = file, until

    def tell(self, what, **details):
        record = {"what": what, "time": time.monotonic(), **details}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def on_train_batch_end(self, batch, logs=None):
        self.tell("steps")
        if time.monotonic() > self.until:
            self.model.stop_training = True

    def watch(self, strategy):
        """Record every change of a worker's status."""
        before = {}
        while True:
            for worker in strategy.workers():
                if before.get(worker.index) != worker.status:
                    before[worker.index] = worker.status
                    self.tell("status", worker=worker.index, status=worker.status)
            time.sleep(_POLL_S)


def main():
    folder = Path(sys.argv[1])
    until = float((folder / "until").read_text())
    with (folder / "events").open("a") as file:
        record = Record(file, until)
        record.tell("started")
        strategy = kerasps.ParameterServerStrategy()
        record.tell("connected")
        with strategy.scope():
            model = keras.Sequential([keras.Input((32,))])
            for _ in range(2):
                model.add(keras.layers.Dense(64, activation="relu"))
            model.add(keras.layers.Dense(1))
            model.compile("adam", "mse", steps_per_execution=STEPS_PER_EXECUTION)
        random = np.random.default_rng(0)
        x, y = random.normal(size=(BATCH, 32)), random.normal(size=(BATCH, 1))
        data = tf.data.Dataset.from_tensors((x.astype("float32"), y.astype("float32"))).repeat()
        threading.Thread(target=record.watch, args=[strategy], daemon=True).start()
        backup = kerasps.BackupAndRestore(str(folder / "backup"), save_freq=500)
        model.fit(data, epochs=10_000, steps_per_epoch=1000, verbose=0, callbacks=[backup, record])


if __name__ == "__main__":
    main()
