"""Kills a worker for good while `fit` validates; run as a process of its own by test_faults.py.

Prints one JSON line: the history, and what an `evaluate` after it counted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
from scenario import print_report

import kerasps

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.models import counting_model, ids_data

NUM_EXAMPLES = 803


class Kill(keras.callbacks.Callback):
    """Kills worker 1 at its tenth batch of validation data."""

    num_batches = 0

    def on_test_batch_end(self, batch, logs=None):
        self.num_batches += 1
        if self.num_batches == 10:
            cluster.kill("worker", 1)


cluster = kerasps.LocalCluster(num_workers=2, num_ps=1)
strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
model = counting_model(strategy, 2)
x, y = ids_data(NUM_EXAMPLES)
data = {"x": x, "y": y, "batch_size": 4}
history = model.fit(**data, epochs=3, validation_data=(x, y), callbacks=[Kill()], verbose=0).history
report = {
    "ids": [float(value) for value in np.ravel([history["ids"], history["val_ids"]])],
    "iterations": int(model.optimizer.iterations.numpy()),
    "evaluated": float(model.evaluate(**data, verbose=0, return_dict=True)["ids"]),
}
print_report(report)
cluster.close()
