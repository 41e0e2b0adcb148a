"""Trains on a cluster whose processes share one processor; run as a process of its own by
test_local_cluster.py.

    python tests/processes/one_processor.py
"""

from __future__ import annotations

import os

# Before TensorFlow counts them.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import keras  # noqa: E402
import numpy as np  # noqa: E402

import kerasps  # noqa: E402

EXAMPLES, BATCH_SIZE = 640, 16

with kerasps.LocalCluster(num_workers=2, num_ps=2) as cluster:
    strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse", steps_per_execution=5)
    x = np.random.default_rng(0).random((EXAMPLES, 4), np.float32)
    model.fit(x, x.sum(1), batch_size=BATCH_SIZE, epochs=2, verbose=0)
    loss = model.evaluate(x, x.sum(1), verbose=0)
    print(int(model.optimizer.iterations.numpy()), np.isfinite(loss))
