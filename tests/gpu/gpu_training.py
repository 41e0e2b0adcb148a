"""Trains on workers with a GPU; run by test_processes.py. Takes a scenario, and prints one line.

With KERASPS_TEST_REHEARSAL=1 a second CPU device of each worker stands for the GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading

import keras
import numpy as np
import tensorflow as tf

import kerasps
from support.models import counting_model, endless
from support.unit_gradients import compiled_unit_model

IS_REHEARSAL = bool(os.environ.get("KERASPS_TEST_REHEARSAL"))
NUM_STEPS, BATCH = 400, 8


class LocalCluster(kerasps.LocalCluster):
    """One of whose workers only some have a GPU."""

    with_gpu = (0, 1)

    def _environment_of(self, task_type, task_index):
        env = super()._environment_of(task_type, task_index)
        has_gpu = task_type == "worker" and task_index in self.with_gpu
        env["KERASPS_CPU_DEVICES"] = "2" if has_gpu else "1"
        if not has_gpu:
            env["CUDA_VISIBLE_DEVICES"] = "-1"
        return env


def connected(cluster, **options):
    if IS_REHEARSAL:
        from kerasps.cluster.description import worker_devices

        worker_devices.compute_devices = lambda names, wanted: tuple(names[-1:])
    return kerasps.ParameterServerStrategy(cluster.cluster_resolver, **options)


def gpu_memory():
    """MiB used of all GPUs together; 0 without `nvidia-smi`."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    rows = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    return sum(int(row) for row in rows.split())


def recurrent_model(steps_per_execution=4):
    model = keras.Sequential([keras.Input((6, 4)), keras.layers.LSTM(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    return model


def sequences(num_examples=3200):
    x = np.random.default_rng(0).normal(size=(num_examples, 6, 4)).astype("float32")
    return x, x.sum((1, 2))[:, None]


def unlike_workers():
    """A worker with a GPU and one without take part, with a layer that cuDNN does on the GPU."""
    LocalCluster.with_gpu = (0,)
    with LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = connected(cluster)
        with strategy.scope():
            model = recurrent_model()
        before = model.evaluate(*sequences(), verbose=0)[0]
        history = model.fit(*sequences(), epochs=2, batch_size=16, verbose=0).history
        model.train_on_batch(*sequences(16))
        return {
            "devices": strategy.extended.host.devices_of_workers(),
            "iterations": int(model.optimizer.iterations.numpy()),
            "learned": history["loss"][-1] < before,
        }


def killed():
    """A killed worker gives its memory back; each update is applied once."""
    LocalCluster.with_gpu = (0, 1)
    with LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = connected(cluster, table_min_bytes=1)
        model = compiled_unit_model(strategy, 1000, lambda: keras.optimizers.SGD(1.0), 4)
        ids = (np.arange(BATCH * NUM_STEPS, dtype="int32") % 1000)[:, None]
        dataset = tf.data.Dataset.from_tensor_slices((ids, ids)).batch(BATCH)
        model.fit(dataset, verbose=0)
        memory = gpu_memory()

        def kill():
            while int(model.optimizer.iterations.storage.read_value()) < NUM_STEPS + 60:
                pass
            cluster.kill("worker", 1)
            cluster.restart("worker", 1)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        history = model.fit(dataset, epochs=2, verbose=0).history
        thread.join()
        model.fit(dataset, verbose=0)
        return {
            "devices": strategy.extended.host.devices_of_workers(),
            "examples": history["examples"],
            "iterations": int(model.optimizer.iterations.numpy()),
            "memory": [memory, gpu_memory()],
        }


def lasting():
    """Models in turn leave nothing on the GPU."""
    with LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = connected(cluster)
        memory = []
        for _ in range(20):
            keras.utils.clear_session()
            with strategy.scope():
                model = recurrent_model()
            model.fit(*sequences(320), batch_size=16, verbose=0)
            del model
            memory.append(gpu_memory())
        return {"memory": memory}


def compiled():
    """XLA compiles the step for the GPU."""
    x, y = sequences(1600)
    x = x.reshape(len(x), -1)

    def make_model():
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((24,)), keras.layers.Dense(32, "tanh")])
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse", jit_compile=True, steps_per_execution=10)
        return model

    data = {"x": x, "y": y, "batch_size": 16, "shuffle": False, "verbose": 0}
    plain = make_model()
    plain.fit(**data)
    with LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = connected(cluster)
        with strategy.scope():
            model = make_model()
        model.fit(**data)
        pairs = zip(plain.get_weights(), model.get_weights(), strict=True)
        return {"difference": max(float(np.abs(a - b).max()) for a, b in pairs)}


def driven():
    """A worker that drives its own steps computes on the GPU that it sees."""
    strategy = kerasps.WorkerDrivenStrategy()
    model = counting_model(strategy, steps_per_execution=4)
    history = model.fit(
        kerasps.DatasetCreator(endless), steps_per_epoch=40, epochs=2, verbose=0
    ).history
    return {
        "devices": strategy.devices_of(strategy.worker_index),
        "batches": history["batches"],
        "iterations": int(model.optimizer.iterations.numpy()),
    }


SCENARIOS = {
    scenario.__name__: scenario for scenario in (unlike_workers, killed, lasting, compiled, driven)
}

if __name__ == "__main__":
    print("REPORT " + json.dumps(SCENARIOS[sys.argv[1]]()), flush=True)
