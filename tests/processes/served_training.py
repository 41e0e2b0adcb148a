"""Trains on the served tasks that TF_CONFIG names, for as long as it is left alone; run by
test_renewal.py.
"""

from __future__ import annotations

import keras
import numpy as np

import kerasps

ROWS, WIDTH = 1_000_000, 64  # 256 MB

strategy = kerasps.ParameterServerStrategy(table_min_bytes=0)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Embedding(ROWS, WIDTH, "zeros"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
x, y = np.arange(64).reshape(64, 1), np.ones((64, 1), "float32")
print("TRAINS", flush=True)
while True:
    model.fit(x, y, batch_size=4, verbose=0)
    print("STEPS", int(model.optimizer.iterations), flush=True)
