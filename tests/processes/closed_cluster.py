"""Closes the cluster of a process that goes on: see test_closed_cluster.py."""

from __future__ import annotations

import sys

# As in a notebook, where TensorFlow logs from INFO on.
sys.ps1 = ">>> "
# ruff: noqa: E402

import gc
import json
import os
import signal
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps

DIRECTORY = Path(sys.argv[2])
REPORT = {"errors": {}, "wrong": []}
WORDS = [f"word {i}" for i in range(50)]
X = tf.constant([[WORDS[i % 50]] for i in range(640)])
Y = np.ones((640, 1), "float32")


def note(name, call):
    """Note the error that a call ends in."""
    try:
        REPORT["errors"][name] = ["no error", repr(call())[:200]]
    except Exception as exc:
        kind = "kerasps" if isinstance(exc, kerasps.ClusterClosedError) else type(exc).__name__
        REPORT["errors"][name] = [kind, str(exc)]


def check(name, is_right):
    if not is_right:
        REPORT["wrong"].append(name)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def run_cell(source, names):
    exec(compile(source, "<cell>", "exec"), names)


@tf.function
def doubled(x):
    return 2 * x


@tf.function
def takes_long():
    x = tf.random.normal([1000, 1000])
    for _ in tf.range(2000):
        x = tf.matmul(x, x) * 1e-3
    return tf.reduce_sum(x)


def make_model():
    word = keras.Input((1,), dtype="string")
    rows = keras.layers.Embedding(60, 32)(keras.layers.StringLookup(vocabulary=WORDS)(word))
    model = keras.Model(word, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile("adam", "mse")
    return model


def small_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def about_to_close():
    sys.stdout.flush()
    os.write(2, b"CLOSING\n")


def cells():
    """What a notebook's cells are, each run twice; returns their names."""
    names = {"kerasps": kerasps}
    make = "cluster = kerasps.LocalCluster(2, 2)"
    connect = (
        "strategy = kerasps.ParameterServerStrategy(\n"
        "    cluster.cluster_resolver, kerasps.MinSizePartitioner(1 << 10)\n)"
    )
    run_cell(make, names)
    first = [process.pid for process in names["cluster"].processes.values()]
    run_cell(make, names)
    check("a cluster that nothing names any more ends", not any(map(is_alive, first)))
    run_cell(connect, names)
    before = names["cluster"], names["strategy"]
    for cell in (make, connect, make):
        run_cell(cell, names)
    check("the same cluster and strategy", (names["cluster"], names["strategy"]) == before)
    for source in ("3, 2", "2, 2, max_restarts=0", "2, 2, log_dir='elsewhere'"):
        note(source, lambda source=source: run_cell(f"kerasps.LocalCluster({source})", names))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(kerasps.LocalCluster(num_ps=2)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check("the same in threads", found == [before[0]] * 3)
    return names


def goes_on(path, expected):
    """What a process does without a cluster."""
    check("functions from before", float(doubled(tf.constant(2.0))) == 4.0)
    check("traced anew", doubled(tf.constant([1, 2])).numpy().tolist() == [2, 4])
    loaded = keras.models.load_model(path)
    check("predicts what was saved", np.allclose(loaded.predict(X, verbose=0), expected))
    check("trains what was saved", loaded.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1])
    loaded.save(DIRECTORY / "again.keras")
    model = small_model()
    backups = keras.callbacks.BackupAndRestore(DIRECTORY / "backups")
    model.fit(np.ones((64, 4)), np.ones(64), epochs=2, verbose=0, callbacks=[backups])
    model.train_on_batch(np.ones((8, 4)), np.ones(8))
    saved = tf.train.Checkpoint(model=model).save(DIRECTORY / "checkpoint")
    tf.train.Checkpoint(model=small_model()).restore(saved).expect_partial()
    dataset = tf.data.Dataset.range(30).map(lambda x: x + 1).shuffle(30).batch(7)
    check("datasets", sum(len(batch) for batch in dataset) == 30)
    keras.utils.clear_session()
    small_model().evaluate(np.ones((8, 4)), np.ones(8), verbose=0)
    # An error of one's own stays what it is.
    note("out of range", lambda: tf.gather([1.0], 7))
    note("no file", lambda: tf.train.Checkpoint(v=tf.Variable(1)).restore("/nowhere/x"))


def needs_cluster(strategy, cluster, model, bare, layer, values):
    coordinator = strategy.coordinator
    at = [X[:4], np.ones(4)]
    for name in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
        note(name, lambda name=name: getattr(model, name)(*at))
    note("predict", lambda: model.predict(at[0], verbose=0))
    note("predict_on_batch", lambda: model.predict_on_batch(at[0]))
    note("call", lambda: model(at[0]))
    note("compile", lambda: model.compile("sgd", "mse"))
    note("save", lambda: model.save(DIRECTORY / "late.keras"))
    note("save_weights", lambda: model.save_weights(DIRECTORY / "late.weights.h5"))
    note("load_weights", lambda: model.load_weights(DIRECTORY / "model.keras"))
    note("export", lambda: model.export(DIRECTORY / "late", verbose=False))
    note("saved_model", lambda: tf.saved_model.save(model, str(DIRECTORY / "later")))
    note("checkpoint", lambda: tf.train.Checkpoint(model=model).save(DIRECTORY / "late"))
    note("get_weights", model.get_weights)
    note("variable", lambda: layer.kernel.numpy())
    note("assign", lambda: layer.kernel.assign(np.zeros(layer.kernel.shape)))
    note("learning_rate", lambda: model.optimizer.learning_rate.numpy())
    note("bare", bare.numpy)
    note("bare + 1", lambda: bare + 1)
    note("function", tf.function(lambda: layer.kernel + 1.0))
    note("scope", lambda: strategy.scope().__enter__())
    note("placement", strategy.placement)
    note("workers", strategy.workers)
    note("schedule", lambda: coordinator.schedule(doubled, args=[1.0]))
    note("join", coordinator.join)
    note("done", coordinator.done)
    note("fetch", values[-1].fetch)
    note("fetch of the first", values[0].fetch)
    note("dataset", lambda: coordinator.create_per_worker_dataset(tf.data.Dataset.range(3)))
    note("strategy", lambda: kerasps.ParameterServerStrategy(cluster.cluster_resolver))
    note("LocalCluster", lambda: kerasps.LocalCluster(2, 2))
    note("add_worker", cluster.add_worker)
    note("with", cluster.__enter__)
    cluster.close()
    repr(strategy), repr(cluster), repr(layer.kernel), strategy.load_report(), strategy.staleness()


def used():
    plain = tf.Variable(1.0)
    iterator = iter(tf.data.Dataset.range(9).map(lambda x: 2 * x))
    next(iterator)
    doubled(tf.constant(1.0))
    names = cells()
    strategy = names["strategy"]
    with names["cluster"] as cluster:
        with kerasps.LocalCluster(2, 2) as inner:
            check("the same in a `with`", inner is cluster)
        check("open within the outer `with`", "open" in repr(cluster))
        with strategy.scope():
            model, bare = make_model(), tf.Variable([1.0, 2.0])
        model.fit(X, Y, verbose=0)
        expected = model.predict(X, verbose=0)
        model.save(DIRECTORY / "model.keras")
        layer = model.layers[-1]
        strategy.coordinator.schedule(doubled, args=[1.0])
        strategy.coordinator.join()
        values = [strategy.coordinator.schedule(takes_long) for _ in range(5)]
        joining = threading.Thread(target=note, args=["join in flight", strategy.coordinator.join])
        joining.start()
        about_to_close()
    joining.join()
    check("all processes ended", not any(p.is_running() for p in cluster.processes.values()))
    check("plain variable", float(plain.assign_add(1.0)) == 2.0)
    check("iterator", int(next(iterator)) == 2)
    goes_on(DIRECTORY / "model.keras", expected)
    needs_cluster(strategy, cluster, model, bare, layer, values)
    del model, bare, layer, values, strategy, iterator
    gc.collect()


def in_flight():
    """Close the cluster while `fit` runs in another thread and a worker is stopped."""
    cluster = kerasps.LocalCluster(2, 1)
    strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
    with strategy.scope():
        model = small_model()
    trains = threading.Event()

    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            trains.set()

    def fit():
        note(
            "fit",
            lambda: model.fit(
                np.ones((640, 4)), np.ones(640), epochs=100_000, verbose=0, callbacks=[Tell()]
            ),
        )

    thread = threading.Thread(target=fit)
    thread.start()
    trains.wait()
    stopped = cluster.processes["worker", 1]
    os.kill(stopped.pid, signal.SIGSTOP)
    kill = stopped.kill

    def kill_and_wait():
        """Kill the worker, and let the calls that wait for it fail before the close goes on."""
        kill()
        time.sleep(0.5)

    stopped.kill = kill_and_wait
    about_to_close()
    cluster.close()
    thread.join()
    note("predict", lambda: model.predict(np.ones((8, 4)), verbose=0))
    small_model().fit(np.ones((64, 4)), np.ones(64), verbose=0)


def failed_first():
    """Fail to make a strategy on one cluster, then use another that TF_CONFIG describes."""
    with kerasps.LocalCluster(1, 1) as cluster:
        note(
            "devices",
            lambda: kerasps.ParameterServerStrategy(
                cluster.cluster_resolver, worker_devices=["GPU:7"]
            ),
        )
        about_to_close()
    doubled(tf.constant(1.0))
    note("closed", lambda: kerasps.ParameterServerStrategy(cluster.cluster_resolver))
    with kerasps.LocalCluster(1, 1) as cluster:
        os.environ["TF_CONFIG"] = json.dumps(cluster.tf_config)
        strategy = kerasps.ParameterServerStrategy()
        with strategy.scope():
            model = small_model()
        model.fit(np.ones((64, 4)), np.ones(64), verbose=0)
        cluster.kill("worker", 0)
    note("predict", lambda: model.predict(np.ones((8, 4)), verbose=0))
    doubled(tf.constant([1.0]))


if __name__ == "__main__":
    {"used": used, "in_flight": in_flight, "failed_first": failed_first}[sys.argv[1]]()
    print_report(REPORT)
