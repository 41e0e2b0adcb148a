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
from scenario import print_report

import kerasps
from kerasps.cluster.description.tf_config import read_tf_config

DIRECTORY, EVALUATES_UNDER_STRATEGY = Path(sys.argv[1]), sys.argv[2] == "strategy"
CHECKPOINTS = DIRECTORY / "checkpoints"
EPOCHS = 3

RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 40, (64, 2)).astype("int32")
Y = RANDOM.normal(size=(64, 1)).astype("float32")
HELD_OUT = (IDS[:16], Y[:16])


def build():
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(40, 4), keras.layers.Flatten()]
    )
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
    model.fit(
        IDS,
        Y,
        batch_size=16,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[save, kerasps.TrainingEndMarker(CHECKPOINTS)],
    )
    return {"metrics": model.evaluate(*HELD_OUT, verbose=0, return_dict=True)}


def evaluate():
    with contextlib.ExitStack() as stack:
        scope = contextlib.nullcontext()
        if EVALUATES_UNDER_STRATEGY:
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
        "type_of_variables": type_of_variables,
        "best": best.best,
        "evaluations": [[Path(e.checkpoint).name, e.iterations, e.metrics] for e in evaluations],
    }


print_report(evaluate() if read_tf_config().task_type == "evaluator" else train())
