"""Trains models whose tables are small, with the default bound, and reports whether they equal
plain Keras's, and what else users see of it. Arguments: the shards of each variable that can be
split, and the optimizers.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from support.compare import assert_equal, train_both
from support.optimizers import OPTIMIZERS
from support.tables import is_table

SMALL, LARGE = 50, 3000


def make_model(optimizer):
    """A model with a small table that is looked up twice, once masked, a frozen one, one with a
    constraint, and a large one.
    """
    layers = keras.layers
    ids = keras.Input((4,), dtype="int32")
    shared = layers.Embedding(SMALL, 16, mask_zero=True)
    frozen = layers.Embedding(SMALL, 4, trainable=False, embeddings_initializer="ones")
    held = layers.Embedding(SMALL, 4, embeddings_constraint=keras.constraints.NonNeg())
    large = layers.Embedding(LARGE, 16)
    pooled = layers.GlobalAveragePooling1D()(shared(ids))
    flat = [layers.Flatten()(x) for x in (shared(ids // 2), frozen(ids), held(ids), large(ids))]
    hidden = layers.Dense(4, activation="tanh")(layers.Concatenate()([pooled, *flat]))
    model = keras.Model(ids, layers.Dense(1)(hidden))
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=5)
    return model


def data():
    generator = np.random.default_rng(0)
    ids = generator.integers(0, SMALL, (320, 4)).astype("int32")
    return ids, np.sin(ids).sum(1, keepdims=True).astype("float32")


def small_are_whole(model):
    return [
        layer.embeddings.shape[0]
        for layer in model.layers
        if isinstance(layer, keras.layers.Embedding) and is_table(model, layer.embeddings)
    ] == [LARGE]


def main():
    shards, names = int(sys.argv[1]), sys.argv[2:]
    report = {"equal": [], "tables": []}
    with local_strategy(1, 2, shards=shards, sparse_updates="dense") as (cluster, strategy):
        for name in names:
            make = OPTIMIZERS[name]
            plain, ours = train_both(
                strategy, lambda make=make: make_model(make()), data(), sum_repeated_ids=True
            )
            assert_equal(plain, ours, relative=5e-5)
            report["equal"].append(name)
            report["tables"].append(small_are_whole(ours))
        looked_up = strategy.placement().looked_up
        report["last"] = [
            [name for name in names if name in {v.path for v in ours.variables}]
            for names in (looked_up.tables, looked_up.small)
        ]
        report["printed"] = str(strategy.placement())
        before = [w.numpy() for w in ours.weights]
        out_of_range = np.full((16, 4), SMALL, "int32")
        try:
            ours.fit(out_of_range, np.ones((16, 1)), verbose=0)
        except kerasps.InputError as exc:
            report["out_of_range"] = str(exc)
        report["unchanged"] = all(
            np.array_equal(old, new.numpy()) for old, new in zip(before, ours.weights, strict=True)
        )
        with strategy.scope():
            compiled = keras.Sequential([keras.Input((4,), dtype="int32")])
            compiled.add(keras.layers.Embedding(SMALL, 8))
            compiled.add(keras.layers.Flatten())
            compiled.add(keras.layers.Dense(1))
            compiled.compile("adam", "mse", jit_compile=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled.fit(*data(), batch_size=32, verbose=0)
        report["compiled"] = int(compiled.optimizer.iterations)
        for wrong in (-1, 1.5, True, None):
            try:
                kerasps.ParameterServerStrategy(cluster.cluster_resolver, table_min_bytes=wrong)
            except (TypeError, ValueError) as exc:
                report.setdefault("refused", []).append(str(exc))
    print_report(report)


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    tf.get_logger().setLevel("ERROR")
    main()
