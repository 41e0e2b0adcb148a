"""Measures the cost of values and gradients in 16 bits in quality, and the scatter of seeds.

    python benchmarks/wire_quality.py
    python benchmarks/wire_quality.py --models flights --workers 1 --rounds 3

Trains a network for images (scikit-learn's digits; accuracy) and a wide and deep model (real
flights that are late; AUC), with seeds 1, 2, 3 … and each `wire_dtype`. Every training has a new
process and a new cluster. Prints a table in Markdown; for MovieLens, see `quality.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import numpy as np

WIRE_DTYPES = ["float32", "bfloat16", "float16"]
TEST_SHARE = 5  # one example in so many


def digits(keras: Any) -> tuple[Any, Any, np.ndarray, int]:
    """Return a model, its inputs, its labels, and the number of epochs."""
    from sklearn.datasets import load_digits

    layers = keras.layers
    model = keras.Sequential([layers.Input((8, 8, 1))])
    for filters in (32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.Activation("relu"))
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10, activation="softmax"))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    data = load_digits()
    return model, data.images[..., None].astype("float32") / 16, data.target, 20


def flights(keras: Any) -> tuple[Any, Any, np.ndarray, int]:
    """Return a model, its inputs, its labels, and the number of epochs."""
    import models

    benchmark = models.BENCHMARKS["wide_and_deep"]
    model = benchmark.build(keras)
    model.compile("adam", benchmark.loss, metrics=[keras.metrics.AUC(num_thresholds=1000)])
    return model, *benchmark.data(), 1


MODELS = {"digits": (digits, 32), "flights": (flights, 256)}


def train(name: str, wire_dtype: str, seed: int, workers: int) -> None:
    """Train once, and print the metric on the examples that were not trained on."""
    import keras

    import kerasps

    build, batch_size = MODELS[name]
    argument = None if wire_dtype == "float32" else wire_dtype
    with kerasps.LocalCluster(num_workers=workers, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver, wire_dtype=argument)
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            model, x, y, epochs = build(keras)
            model.steps_per_execution = 10
        order = np.random.default_rng(0).permutation(len(y))
        test, rest = np.split(order, [len(order) // TEST_SHARE])

        def part(indices: np.ndarray) -> tuple[Any, np.ndarray]:
            values = {k: v[indices] for k, v in x.items()} if isinstance(x, dict) else x[indices]
            return values, y[indices]

        model.fit(*part(rest), batch_size=batch_size, epochs=epochs, verbose=0)
        result = model.evaluate(*part(test), batch_size=1024, verbose=0, return_dict=True)
    print("MEASURED", json.dumps(next(value for key, value in result.items() if key != "loss")))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="seeds")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        name, wire_dtype, seed = options.train
        train(name, wire_dtype, int(seed), options.workers)
        return
    print("| model | wire_dtype | median | each seed |\n| --- | --- | ---: | --- |")
    for name in options.models:
        for wire_dtype in WIRE_DTYPES:
            values = []
            for seed in range(1, options.rounds + 1):
                command = [sys.executable, __file__, "--workers", str(options.workers)]
                out = subprocess.run(
                    [*command, "--train", name, wire_dtype, str(seed)],
                    env={**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                ).stdout
                values.append(float(out.rpartition("MEASURED ")[2]))
            each = " ".join(f"{value:.4f}" for value in values)
            print(f"| {name} | {wire_dtype} | {statistics.median(values):.4f} | {each} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
