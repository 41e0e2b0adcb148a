"""Trains with a second CPU device in the place of a GPU, and tells what is where; run by
test_placed_steps.py.

The first argument is the mode, the second a folder for the graphs that tasks run.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps
import kerasps.worker_driven.host as driven
from kerasps.cluster.description.worker_devices import compute_devices
from support.partitioner import Partitioner
from support.placed import ACCELERATOR, CPU, placed_graphs, placed_kinds, writing_graphs

MODE, FOLDER = sys.argv[1:]
OPTIONS = {
    "async": {},
    "sync": {"update_mode": "sync"},
    "overlap": {"overlap": True, "max_staleness": 8},
    "wire": {"wire_dtype": "bfloat16"},
    "several": {"worker_devices": ["CPU:1", "CPU:2"]},
}
X = np.random.default_rng(0).normal(size=(256, 16)).astype("float32")
IDS = np.random.default_rng(0).integers(0, 1000, size=(256, 4))


def wide_model(**options):
    """A table, dense layers that are fused, one that is not, dropout, and a schedule."""
    numbers, ids = keras.Input((16,)), keras.Input((4,), dtype="int64")
    rows = keras.layers.Flatten()(keras.layers.Embedding(1000, 8)(ids))
    hidden = keras.layers.Concatenate()([numbers, rows])
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(32, activation="tanh")(hidden))
    model = keras.Model([numbers, ids], keras.layers.Dense(1)(hidden))
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    model.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"], **options)
    return model


def data():
    y = X[:, :1]
    return tf.data.Dataset.from_tensor_slices(((X, IDS), y)).batch(32, drop_remainder=True)


def train_large_model(strategy):
    """Train a model whose kernels travel by themselves."""
    with strategy.scope():
        layers = [keras.layers.Dense(512) for _ in range(2)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile("adam", "mse", steps_per_execution=4)
    model.fit(X, np.zeros((256, 512), "float32"), verbose=0)


def use_all_methods(strategy):
    with strategy.scope():
        model = wide_model(steps_per_execution=4)
    model.fit(data(), epochs=2, verbose=0, validation_data=data())
    model.evaluate(data(), verbose=0)
    model.predict(data(), verbose=0)
    if MODE not in ("async", "driven"):
        return
    model.train_on_batch([X[:32], IDS[:32]], X[:32, :1])
    with strategy.scope():
        recurrent = keras.Sequential([keras.Input((4, 4)), keras.layers.LSTM(8)])
        recurrent.add(keras.layers.Dense(1))
        recurrent.compile("sgd", "mse", steps_per_execution=2)
        compiled = keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(24), keras.layers.Dense(1)]
        )
        compiled.compile("sgd", "mse", steps_per_execution=2, jit_compile=True)
    recurrent.fit(X.reshape(256, 4, 4), X[:, :1], epochs=1, verbose=0)
    compiled.fit(X, X[:, :1], epochs=1, verbose=0)
    if MODE == "async":
        run_custom_loop(strategy)


def run_custom_loop(strategy):
    coordinator = strategy.coordinator
    with strategy.scope():
        model = wide_model()

    @tf.function
    def scheduled_step(iterator):
        def replica_fn(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        return strategy.run(replica_fn, args=(next(iterator),))

    dataset = coordinator.create_per_worker_dataset(lambda: data().repeat())
    iterator = iter(dataset)
    for _ in range(3):
        coordinator.schedule(scheduled_step, args=(iterator,))
    coordinator.join()


def with_coordinator():
    # A GPU needs no name to be taken.
    names = None if ACCELERATOR.startswith("GPU:") else [ACCELERATOR]
    options = {"worker_devices": names, **OPTIONS[MODE]}
    with writing_graphs(FOLDER):
        cluster = kerasps.LocalCluster(num_workers=1, num_ps=2)
    with cluster:
        partitioner = Partitioner()
        if MODE != "wire":
            partitioner.chosen = kerasps.FixedShardsPartitioner(2, min_bytes=4096)
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, partitioner, table_min_bytes=0, **options
        )
        (train_large_model if MODE == "wire" else use_all_methods)(strategy)
    return {"devices": strategy.devices_of(0), "graphs": placed_graphs(FOLDER, "worker")}


def without_coordinator():
    """A worker that drives its own steps, as TF_CONFIG says."""
    have_two_devices()

    def with_accelerator(names, wanted):
        """The rule, where the second CPU counts as a GPU."""
        chosen = compute_devices([name.replace(ACCELERATOR, "GPU:0") for name in names], wanted)
        return tuple(name.replace("GPU:0", ACCELERATOR) for name in chosen)

    driven.compute_devices = with_accelerator
    strategy = kerasps.WorkerDrivenStrategy(table_min_bytes=0)
    use_all_methods(strategy)
    return {
        "devices": strategy.devices_of(strategy.worker_index),
        "graphs": placed_graphs(FOLDER, "localhost"),
    }


def on_one_machine():
    """A strategy without a cluster."""
    have_two_devices()
    strategy = kerasps.CentralStorageStrategy([ACCELERATOR], CPU)
    with strategy.scope():
        model = wide_model(steps_per_execution=4)
    model.fit(data(), epochs=1, verbose=0, validation_data=data())
    model.predict(data(), verbose=0)
    kinds = ("MatMul", "_FusedMatMul", "TanhGrad", "AssignSubVariableOp")
    return {"kinds": placed_kinds(FOLDER, kinds)}


def have_two_devices():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


if __name__ == "__main__":
    modes = {"driven": without_coordinator, "central": on_one_machine}
    report = modes.get(MODE, with_coordinator)()
    print_report(report)
