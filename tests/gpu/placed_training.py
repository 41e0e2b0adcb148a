"""Trains on one worker and one ps and tells what ran where; run as a process of its own by
test_gpu.py.

Prints one JSON line. Every task says in its log on which device it placed each operation.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

import kerasps

# As TensorFlow prints an operation that it placed: "path/of/MatMul: (MatMul):
# /job:worker/replica:0/task:0/device:GPU:0".
PLACED = re.compile(r"^\S+: \((\w+)\): (/job:\S+)$", re.MULTILINE)


def gpu_memory():
    """MiB used and MiB there are, of all GPUs together; None without `nvidia-smi`."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    rows = subprocess.run(
        query, capture_output=True, text=True, timeout=30, check=True
    ).stdout.splitlines()
    used, total = zip(*[[int(number) for number in row.split(",")] for row in rows], strict=True)
    return sum(used), sum(total)


def placed(log_file):
    """The devices of each kind of operation that a task placed."""
    devices = {}
    for operation, device in PLACED.findall(log_file.read_text(errors="replace")):
        devices.setdefault(operation, set()).add(device)
    return {operation: sorted(found) for operation, found in devices.items()}


def make_model():
    model = keras.Sequential(
        [keras.Input((16,)), keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=5, jit_compile=False)
    return model


x = np.random.default_rng(0).normal(size=(256, 16)).astype("float32")
data = {
    "x": x,
    "y": np.tanh(x[:, :1]),
    "batch_size": 32,
    "epochs": 5,
    "shuffle": False,
    "verbose": 0,
}
memory_before = gpu_memory()
tf.debugging.set_log_device_placement(True)  # before the strategy: tasks are told when it connects
with kerasps.LocalCluster(num_workers=1, num_ps=1, log_dir=sys.argv[1]) as cluster:
    strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
    keras.utils.set_random_seed(7)
    plain = make_model()
    plain.fit(**data)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = make_model()
    before = model.get_weights()
    model.fit(**data)
    memory_after = gpu_memory()
    pairs = list(zip(plain.get_weights(), model.get_weights(), strict=True))
    # Where a callback listens to batches, the steps are what the worker is called with; else a
    # function inside, whose operations TensorFlow places alike and does not log.
    model.fit(
        **{**data, "epochs": 1},
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)],
    )
    report = {
        "devices": [device.name for device in tf.config.list_logical_devices()],
        "worker": placed(cluster.processes["worker", 0].log_file),
        "ps": placed(cluster.processes["ps", 0].log_file),
        "variables": sorted({v.device for v in [*model.weights, *model.optimizer.variables]}),
        "learned": max(
            float(np.abs(new - old).max()) for (_, new), old in zip(pairs, before, strict=True)
        ),
        "difference": max(float(np.abs(theirs - ours).max()) for theirs, ours in pairs),
        "memory": None if memory_before is None else [*memory_before, memory_after[0]],
    }
print("REPORT " + json.dumps(report), flush=True)
