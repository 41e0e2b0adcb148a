"""Trains on the served tasks that TF_CONFIG names; run by test_serve.py. The argument is how often,
or it trains for as long as it is left alone.
"""

from __future__ import annotations

import itertools
import sys

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
for _ in range(int(sys.argv[1])) if len(sys.argv) > 1 else itertools.count():
    model.fit(x, y, batch_size=4, verbose=0)
    print("STEPS", int(model.optimizer.iterations), flush=True)
