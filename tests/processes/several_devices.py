"""Trains on workers with several devices, which are logical CPU devices; run as a process of its
own by test_several_devices.py.

Takes a scenario, and prints one JSON line.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from kerasps.cluster.description import worker_devices
from kerasps.cluster.server import CPU_DEVICES
from support.compare import SummedApply
from support.unit_gradients import compiled_unit_model

NUM_IDS = 40
BATCH = 16
DEVICES = ["CPU:0", "CPU:1"]


class LocalCluster(kerasps.LocalCluster):
    """One whose workers have so many CPU devices, by the index of the worker."""

    cpu_devices = (2, 2)

    def _environment_of(self, task_type, task_index):
        env = super()._environment_of(task_type, task_index)
        if task_type == "worker":
            env[CPU_DEVICES] = str(self.cpu_devices[task_index])
        return env


def data(num_batches=10, size=2 * BATCH):
    generator = np.random.default_rng(0)
    ids = generator.integers(0, NUM_IDS, (num_batches * size, 3)).astype("int32")
    x = generator.normal(size=(num_batches * size, 4)).astype("float32")
    return (ids, x), (np.tanh(x[:, :1]) + ids.sum(1, keepdims=True) / 50).astype("float32")


def made(optimizer, **compile_arguments):
    """Return a model with a table, dense layers and regularizers."""
    keras.utils.set_random_seed(3)
    ids, x = keras.Input((3,), dtype="int32"), keras.Input((4,))
    rows = keras.layers.Flatten()(
        keras.layers.Embedding(NUM_IDS, 4, embeddings_initializer="uniform")(ids)
    )
    hidden = keras.layers.Dense(8, "tanh", kernel_regularizer="l2")(
        keras.layers.Concatenate()([rows, x])
    )
    model = keras.Model([ids, x], keras.layers.Dense(1)(hidden))
    model.compile(optimizer(), "mse", metrics=["mae"], **compile_arguments)
    return model


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


def differences(strategy, name, steps_per_execution, num_replicas=2):
    """Train with two replicas of 16 here, and plain Keras with 32; return how far they differ."""
    size = 2 * BATCH // num_replicas
    (ids, x), y = data()
    plain = made(OPTIMIZERS[name])
    plain.optimizer.build(plain.trainable_variables)
    # As kerasps does with rows, and Keras on its other backends.
    lazy = name not in ("accumulation", "loss_scale")
    plain.optimizer.apply = SummedApply(plain.optimizer, lazy=lazy)
    with strategy.scope():
        ours = made(OPTIMIZERS[name], steps_per_execution=steps_per_execution)
    before = [np.array(w) for w in plain.get_weights()]
    of_plain = plain.fit([ids, x], y, batch_size=2 * BATCH, shuffle=False, verbose=0, epochs=2)
    of_ours = ours.fit([ids, x], y, batch_size=size, shuffle=False, verbose=0, epochs=2)
    pairs = [*zip(plain.get_weights(), ours.get_weights(), strict=True)]
    return {
        "weights": max(float(np.abs(a - b).max()) for a, b in pairs),
        "moved": max(float(np.abs(a - b).max()) for a, (b, _) in zip(before, pairs, strict=True)),
        "logs": max(
            float(np.abs(np.subtract(of_plain.history[key], of_ours.history[key])).max())
            for key in of_plain.history
        ),
        "iterations": [int(m.optimizer.iterations.numpy()) for m in (plain, ours)],
    }


def rows_read(strategy):
    """Return the rows that a step of two replicas reads where both look up the same ids."""
    ids = np.tile(np.arange(6, dtype="int32").reshape(2, 3), (2 * BATCH, 1))
    x, y = np.zeros((len(ids), 4), "float32"), np.zeros((len(ids), 1), "float32")
    with strategy.scope():
        model = made(OPTIMIZERS["sgd"])
    model.fit([ids, x], y, batch_size=BATCH, epochs=3, verbose=0)
    report = strategy.load_report()
    return sum(round(task.rows_read_per_second * report.seconds) for task in report), report.steps


class Recorder(keras.callbacks.Callback):
    """Notes the batches that it hears of."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)


def weights_of(model):
    table, *weights = model.trainable_variables
    return (
        sorted({float(v) for v in table.numpy().ravel()}),
        sorted({float(v) for w in weights for v in w.numpy().ravel()}),
    )


def counted(strategy, steps_per_execution, kind, num_batches):
    """Train on each example once; return all that says how often something was done."""
    ids = np.arange(4 * num_batches, dtype="int32")[:, None]
    dataset = tf.data.Dataset.from_tensor_slices((ids, ids))
    if kind == "unknown":
        dataset = dataset.filter(lambda *_: True)
    dataset = dataset.batch(4)
    if kind == "generator":
        dataset = ((ids[i : i + 4], ids[i : i + 4]) for i in range(0, len(ids), 4))
    model = compiled_unit_model(
        strategy, 1000, lambda: keras.optimizers.SGD(1.0), steps_per_execution
    )
    recorder = Recorder()
    history = model.fit(dataset, verbose=0, callbacks=[recorder]).history
    rows, weights = weights_of(model)
    return {
        "batches": history["batches"],
        "examples": history["examples"],
        "ids": history["ids"],
        "heard": recorder.batches[-1],
        "rows": rows,
        "weights": weights,
        "iterations": int(model.optimizer.iterations.numpy()),
    }


class Exposed(keras.layers.Layer):
    """Counts, in variables that replicas assign, and gives each replica another mask."""

    def build(self, input_shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        kinds = {"mean": "mean", "sum": "sum", "first": "only_first_replica", "unset": "none"}
        self.kinds = {
            name: self.add_weight(
                shape=(), initializer="zeros", trainable=False, aggregation=kind, name=name
            )
            for name, kind in kinds.items()
        }

    def call(self, x):
        self.calls.assign_add(1)
        for variable in self.kinds.values():
            variable.assign_add(tf.reduce_mean(x))
        return x


class Masks(keras.metrics.Metric):
    """Adds up what the outputs are, by the number of the batch, which is y."""

    def __init__(self):
        super().__init__(name="masks")
        self.sums = self.add_weight(shape=(8, 64), initializer="zeros", name="sums")

    def update_state(self, y_true, y_pred, sample_weight=None):
        number = tf.cast(y_true[0, 0], tf.int32)
        self.sums.assign_add(tf.one_hot(number, 8)[:, None] * y_pred[0][None])

    def result(self):
        return tf.reduce_sum(self.sums)


def states(strategy):
    """Return what replicas make of variables that they assign themselves, and of seeds."""
    x = np.repeat(np.arange(1.0, 9.0, dtype="float32"), 4)[:, None]
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), Exposed(), keras.layers.BatchNormalization(momentum=0.5)]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    layer = model.layers[0]
    # A replica sees a batch of four equal numbers: 1 and 2, then 3 and 4, and so on.
    mean = 0.0
    for low in (1, 3, 5, 7):
        mean = (0.5 * mean + 0.5 * low) / 2 + (0.5 * mean + 0.5 * (low + 1)) / 2
    with strategy.scope():
        dropping = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=5)])
        dropping.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Masks()])
    numbers = np.repeat(np.arange(8.0, dtype="float32"), 4)[:, None]
    masks = []
    for _ in range(2):
        dropping.fit(np.ones((32, 64), "float32"), numbers, batch_size=4, shuffle=False, verbose=0)
        masks.append(dropping.metrics[-1].metrics[0].sums.numpy())
    plain = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=5)])
    one = plain(np.ones((4, 64), "float32"), training=True).numpy()[0]
    return {
        "calls": int(layer.calls.numpy()),
        **{name: float(variable.numpy()) for name, variable in layer.kinds.items()},
        "moving_mean": float(model.layers[1].moving_mean.numpy()[0]),
        "expected_mean": mean,
        "different_masks": len({mask.tobytes() for epoch in masks for mask in epoch}),
        "first_as_plain": bool(np.array_equal(masks[0][0], one)),
        "different_numbers": len(set(numbers_drawn(strategy))),
        "seeds_drawn": int(dropping.layers[0].seed_generator.state.numpy()[1]),
    }


class Drawing(keras.Model):
    """Predicts a number that TensorFlow draws."""

    def call(self, x):
        return x + tf.random.uniform([], seed=3)


def numbers_drawn(strategy):
    """Return what two passes draw, each of 11 batches, of which one is left over."""
    with strategy.scope():
        model = Drawing()
        model.compile("sgd")
    x = np.zeros((11, 1), "float32")
    passes = [model.predict(x, batch_size=1, verbose=0) for _ in range(2)]
    return np.concatenate(passes).ravel().tolist()


class Adversarial(keras.Model):
    """Updates twice in a step, and reads in between what it has updated."""

    def build(self, input_shape):
        self.one = self.add_weight(shape=(), initializer="ones", name="one")
        self.two = self.add_weight(shape=(), initializer="ones", name="two")

    def call(self, x):
        return x * self.one * self.two

    def train_step(self, batch):
        x, y = batch
        for variable in (self.one, self.two):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2) / tf.cast(
                    tf.distribute.get_strategy().num_replicas_in_sync, tf.float32
                )
            self.optimizer.apply(tape.gradient(loss, [variable]), [variable])
        return {"product": self.one * self.two}


def two_updates(strategy):
    x = np.linspace(-1, 1, 64, dtype="float32")[:, None]

    def make():
        model = Adversarial()
        model.compile(keras.optimizers.SGD(0.1))
        model.build((None, 1))
        model.optimizer.build(model.trainable_variables)
        return model

    plain = make()
    with strategy.scope():
        ours = make()
    found = []
    for model, size in ((plain, 32), (ours, 16)):
        model.fit(x, 2 * x, batch_size=size, epochs=3, shuffle=False, verbose=0)
        found.append([float(v) for v in model.get_weights()])
    return found


def evaluated(strategy):
    """Evaluate and predict data of an odd number of batches, with an odd last one."""
    (ids, x), y = data(num_batches=7, size=BATCH)
    ids, x, y = ids[:-5], x[:-5], y[:-5]
    plain = made(OPTIMIZERS["sgd"])
    with strategy.scope():
        ours = made(OPTIMIZERS["sgd"], steps_per_execution=2)
    unknown = tf.data.Dataset.from_tensor_slices(((ids, x), y)).filter(lambda *_: True).batch(BATCH)
    expected = plain.predict([ids, x], verbose=0)
    logs = plain.evaluate([ids, x], y, batch_size=BATCH, verbose=0)
    return {
        "logs": max(
            float(np.abs(np.subtract(logs, found)).max())
            for found in (
                ours.evaluate([ids, x], y, batch_size=BATCH, verbose=0),
                ours.evaluate(unknown, verbose=0),
            )
        ),
        "outputs": [
            float(np.abs(expected - ours.predict(*arguments, verbose=0)).max())
            for arguments in (([ids, x], BATCH), (unknown,), ([ids, x], BATCH * 7))
        ],
    }


def refusal(call):
    try:
        call()
    except (TypeError, ValueError, kerasps.KeraspsError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return None


def refusals(strategy):
    x = np.ones((64, 4), "float32")

    def fit(*layers, **compile_arguments):
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse", **compile_arguments)
        model.fit(x, x[:, :1], batch_size=BATCH, verbose=0)

    def run():
        with strategy.scope():
            variable = keras.Variable(1.0)

        @tf.function
        def function():
            return strategy.run(lambda: variable * 2.0)

        strategy.coordinator.schedule(function)
        strategy.coordinator.join()

    return {
        "xla": refusal(lambda: fit(jit_compile=True)),
        "synchronized": refusal(
            lambda: fit(keras.layers.BatchNormalization(synchronized=True), jit_compile=False)
        ),
        "custom loop": refusal(run),
        "other devices": refusal(
            lambda: kerasps.ParameterServerStrategy(
                strategy._cluster_resolver,
                PARTITIONER,
                table_min_bytes=1,
                worker_devices=["CPU:1"],
            )
        ),
    }


PARTITIONER = kerasps.FixedShardsPartitioner(2)


def on_one_worker(**measures):
    """Return what functions of a strategy with two devices find, by name."""
    with LocalCluster(num_workers=1, num_ps=2) as cluster:
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, PARTITIONER, table_min_bytes=1, worker_devices=DEVICES
        )
        return {name: measure(strategy) for name, measure in measures.items()}


def equal_plain_keras(*cases):
    """What compares these, each an optimizer and the steps per execution."""
    return lambda strategy: {
        f"{name} {steps}": differences(strategy, name, steps) for name, steps in cases
    }


def ends_of_data(*cases):
    """What counts in these, each the steps per execution and the kind of data."""
    return lambda strategy: {
        f"{steps} {kind}": counted(strategy, steps, kind, 23) for steps, kind in cases
    }


def devices(strategy):
    return [strategy.devices_of(0), strategy.options.worker_devices, strategy.num_replicas_in_sync]


def changed():
    """A worker comes back without the device that it has computed on."""
    # The second CPU stands for a GPU.
    worker_devices.compute_devices = lambda names, wanted: tuple(names[-1:])

    def takes_device(worker):
        cluster.processes["worker", worker]._env[CPU_DEVICES] = "1"

    LocalCluster.cpu_devices = (2, 2)
    with LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, PARTITIONER, table_min_bytes=1
        )
        before = strategy.extended.host.devices_of_workers()
        killed = fit_killed(cluster, strategy, steps_per_execution=4, before_restart=takes_device)
        # The first training may be over before the worker is back.
        while strategy.workers()[1].status != "connected":
            time.sleep(0.05)
        kinds = fit_killed(cluster, strategy, steps_per_execution=4, kills=False)["kinds"]
        after = strategy.extended.host.devices_of_workers()
        return {"devices": [before, after], **killed, "kinds": kinds}


def fit_killed(
    cluster, strategy, *, steps_per_execution, kills=True, before_restart=lambda worker: None
):
    """Train while worker 1 is killed, and comes back; return what says how often all was done."""
    num_batches = 301
    ids = (np.arange(4 * num_batches, dtype="int32") % 1000)[:, None]
    model = compiled_unit_model(
        strategy, 1000, lambda: keras.optimizers.SGD(1.0), steps_per_execution
    )
    dataset = tf.data.Dataset.from_tensor_slices((ids, ids)).batch(4)

    def kill():
        while int(model.optimizer.iterations.storage.read_value()) < 60:
            pass
        cluster.kill("worker", 1)
        before_restart(1)
        cluster.restart("worker", 1)

    thread = threading.Thread(target=kill if kills else int, daemon=True)
    thread.start()
    history = model.fit(dataset, verbose=0, epochs=2).history
    thread.join()
    _, weights = weights_of(model)
    return {
        "kinds": sorted(model.train_function.plans._plans),
        "batches": history["batches"],
        "examples": history["examples"],
        "weights": weights,
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def two_workers(cpu_devices, **arguments):
    LocalCluster.cpu_devices = cpu_devices
    if len(set(cpu_devices)) > 1:  # each stands for a GPU
        worker_devices.compute_devices = lambda names, wanted: tuple(names)
    with LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, PARTITIONER, table_min_bytes=1, **arguments
        )
        return {
            "devices": strategy.extended.host.devices_of_workers(),
            "unharmed": fit_killed(cluster, strategy, steps_per_execution=4, kills=False),
            "killed": [
                fit_killed(cluster, strategy, steps_per_execution=steps) for steps in (1, 4)
            ],
        }


def missing():
    LocalCluster.cpu_devices = (2, 1)
    with LocalCluster(num_workers=2, num_ps=1) as cluster:
        refused = refusal(
            lambda: kerasps.ParameterServerStrategy(
                cluster.cluster_resolver, worker_devices=DEVICES
            )
        )
        # With what is there it goes on in the same process.
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, worker_devices=["CPU:0"]
        )
        found = fit_killed(cluster, strategy, steps_per_execution=4, kills=False)
        return {"refused": refused, "devices": strategy.extended.host.devices_of_workers(), **found}


def gpus():
    with local_strategy(1, 1) as (_, strategy):
        devices = strategy.devices_of(0)
        return {"devices": devices, "sgd": differences(strategy, "sgd", 1, len(devices))}


SCENARIOS = {
    "changed": changed,
    "gpus": gpus,
    "one worker": lambda: on_one_worker(
        devices=devices,
        equal_plain_keras=equal_plain_keras(
            *(("global_clipnorm", 1), ("accumulation", 1), ("adam", 4))
        ),
        rows_read=rows_read,
        ends_of_data=ends_of_data((3, "generator")),
        states=states,
        two_updates=two_updates,
        evaluated=evaluated,
        refusals=refusals,
    ),
    "one worker at length": lambda: on_one_worker(
        equal_plain_keras=equal_plain_keras(
            *(("sgd", 1), ("averages", 1), ("momentum", 1), ("adam", 1), ("adagrad", 1)),
            *(("clipnorm", 1), ("accumulation", 4), ("nadam", 1), ("loss_scale", 1)),
        ),
        ends_of_data=ends_of_data(
            *((1, "unknown"), (1, "known"), (3, "unknown"), (25, "unknown"), (25, "known"))
        ),
    ),
    "equal": lambda: two_workers((2, 2), worker_devices=DEVICES),
    "unequal": lambda: two_workers((1, 2)),
    "paced": lambda: two_workers((2, 2), worker_devices=DEVICES, max_staleness=1),
    "overlapping": lambda: two_workers((2, 2), worker_devices=DEVICES, overlap=True),
    "missing": missing,
}

if __name__ == "__main__":
    os.environ.pop(CPU_DEVICES, None)
    print_report(SCENARIOS[sys.argv[1]]())
