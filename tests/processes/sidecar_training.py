"""Trains under the cluster of `kerasps launch`, or evaluates the checkpoints where it is the
evaluator; see test_sidecar.py.

Either prints one JSON line.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps
from kerasps.cluster.description.tf_config import read_tf_config

DIRECTORY, KIND = Path(sys.argv[1]), sys.argv[2]
CHECKPOINTS = DIRECTORY / "checkpoints"
EPOCHS = 3

RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 40, (64, 2)).astype("int32")
Y = RANDOM.normal(size=(64, 1)).astype("float32")
# Some ids of "tables" are never trained.
HELD_OUT = (IDS[:16] + (20 if KIND == "tables" else 0), Y[:16])


def build():
    table = keras.layers.Embedding(40, 4)
    if KIND == "tables":
        table = kerasps.layers.DynamicEmbedding(4, seed=1)
    model = keras.Sequential([keras.Input((2,), dtype="int32"), table, keras.layers.Flatten()])
    model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def train():
    strategy = kerasps.ParameterServerStrategy()
    with strategy.scope():
        model = build()
    save = keras.callbacks.ModelCheckpoint(
        CHECKPOINTS / "epoch-{epoch}.weights.h5", save_weights_only=True
    )
    if KIND == "tables":
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        manager = tf.train.CheckpointManager(checkpoint, str(CHECKPOINTS), 2)
        save = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: manager.save())
    model.fit(
        IDS,
        Y,
        batch_size=16,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[save, kerasps.TrainingEndMarker(CHECKPOINTS)],
    )
    metrics = model.evaluate(*HELD_OUT, verbose=0, return_dict=True)
    return {"metrics": metrics, "num_rows": num_rows(model)}


def num_rows(model):
    return getattr(model.layers[0], "num_rows", None)


def evaluate():
    with contextlib.ExitStack() as stack:
        scope = contextlib.nullcontext()
        if KIND == "strategy":
            cluster = stack.enter_context(kerasps.LocalCluster(num_workers=1, num_ps=1))
            partitioner = kerasps.FixedShardsPartitioner(2, min_bytes=512)
            scope = kerasps.ParameterServerStrategy(cluster.cluster_resolver, partitioner).scope()
        with scope:
            model = build()
        best = kerasps.SidecarEvaluatorModelExport(DIRECTORY / "best" / "model.keras")
        evaluator = kerasps.SidecarEvaluator(
            model, HELD_OUT, CHECKPOINTS, callbacks=[best], log_dir=DIRECTORY / "logs"
        )
        evaluations = evaluator.start()
        type_of_variables = type(model.weights[0]).__name__
    return {
        "num_rows": num_rows(model),
        "type_of_variables": type_of_variables,
        "best": best.best,
        "evaluations": [[Path(e.checkpoint).name, e.iterations, e.metrics] for e in evaluations],
    }


print_report(evaluate() if read_tf_config().task_type == "evaluator" else train())
