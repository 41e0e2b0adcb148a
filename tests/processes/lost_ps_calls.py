"""Kills a ps when nothing runs, then calls whatever needs its variables; run as a process of its
own by test_faults.py.

Prints one JSON line: of each call, what it ended in, with the ps gone and then with another in
its place.
"""

from __future__ import annotations

import tempfile

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps
from support.spread import spread

# So that the ps that is killed holds some of them.
spread()
x, y = np.ones([32, 8], "float32"), np.ones([32, 1], "float32")


def build_optimizer():
    with strategy.scope():
        keras.optimizers.Adam().build(model.trainable_variables)


def make_variables():
    with strategy.scope():
        for _ in range(2):  # the ps take turns
            keras.Variable(np.zeros([64, 8], "float32"))


def apply():
    model.optimizer.apply(
        [tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables
    )


report = {}
with (
    kerasps.LocalCluster(num_workers=1, num_ps=2) as cluster,
    tempfile.TemporaryDirectory() as directory,
):
    partitioner = kerasps.FixedShardsPartitioner(2, min_bytes=1024)
    strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver, partitioner)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(64),
                keras.layers.Dense(16),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    weights = model.get_weights()
    model.save_weights(f"{directory}/before.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.save(f"{directory}/before")
    whole = next(v for v in model.weights if v.sharding is None and "task:1" in v.storage.device)
    sharded = next(v for v in model.weights if v.sharding is not None)
    calls = {
        "numpy": whole.numpy,
        "convert": lambda: tf.convert_to_tensor(whole),
        "array": lambda: np.array(whole),
        "operator": lambda: whole + 1,
        "assign": lambda: whole.assign(tf.zeros(whole.shape)),
        "assign_add": lambda: whole.assign_add(tf.zeros(whole.shape)),
        "sharded": sharded.numpy,
        "rows": lambda: keras.ops.take(sharded, [0, 1, 2], axis=0),
        "get_weights": model.get_weights,
        "set_weights": lambda: model.set_weights(weights),
        "call": lambda: model(x),
        "variables": make_variables,
        "build": build_optimizer,
        "apply": apply,
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, y),
        "test_on_batch": lambda: model.test_on_batch(x, y),
        "predict_on_batch": lambda: model.predict_on_batch(x),
        "save": lambda: model.save(f"{directory}/after.keras"),
        "save_weights": lambda: model.save_weights(f"{directory}/after.weights.h5"),
        "load_weights": lambda: model.load_weights(f"{directory}/before.weights.h5"),
        "checkpoint": lambda: checkpoint.save(f"{directory}/after"),
        "restore": lambda: checkpoint.restore(path),
        "export": lambda: model.export(f"{directory}/exported", verbose=False),
    }
    for fate, change in {"gone": cluster.kill, "restarted": cluster.restart}.items():
        change("ps", 1)
        for name, call in calls.items():
            try:
                call()
                ended = "nothing"
            except Exception as exc:
                ended = f"{type(exc).__name__}: {exc}"
            report[f"{name}, {fate}"] = ended
    strategy.placement()
    strategy.load_report()
    print_report(report)
