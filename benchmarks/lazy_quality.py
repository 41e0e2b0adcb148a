"""Compares lazy with dense updates of tables: the test metric after each epoch, and the time.

    python benchmarks/lazy_quality.py
    python benchmarks/lazy_quality.py --models movielens --optimizers adam --workers 1 --rounds 3

Trains the model of `examples/movielens.py` (RMSE) and a wide and deep model of late flights (AUC),
with seeds 1, 2, 3 … Every embedding is a table (`table_min_bytes=0`). Every training has a new
process and a new cluster. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

SPARSE_UPDATES = ["lazy", "dense"]
# The number of epochs, the size of a batch, and whether a larger metric is better.
MODELS = {"movielens": (8, 128, False), "flights": (4, 256, True)}
TEST_SHARE = 5  # one flight in so many


def movielens_model(keras: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    """Return a model, and the data to train and to test it."""
    import movielens
    import ratings

    train, test = ratings.load()
    model = movielens.build_model(train)
    rmse = keras.metrics.RootMeanSquaredError(name="metric")
    model.compile(optimizer, "mse", metrics=[rmse], steps_per_execution=10)
    return model, *[(part.inputs("user", "movie"), part.rating) for part in (train, test)]


def flights_model(keras: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    """Return a model, and the data to train and to test it."""
    import models

    benchmark = models.BENCHMARKS["wide_and_deep"]
    model = benchmark.build(keras)
    auc = keras.metrics.AUC(num_thresholds=1000, name="metric")
    model.compile(optimizer, benchmark.loss, metrics=[auc], steps_per_execution=10)
    x, y = benchmark.data()
    order = np.random.default_rng(0).permutation(len(y))
    test, train = np.split(order, [len(order) // TEST_SHARE])
    return model, *[({k: v[rows] for k, v in x.items()}, y[rows]) for rows in (train, test)]


def train(name: str, optimizer: str, sparse_updates: Any, seed: int, workers: int) -> None:
    """Train once; print the metric after each epoch, and the seconds of the epochs until then."""
    import keras

    import kerasps

    rates = {"adam": {"movielens": 0.002, "flights": 0.001}, "rmsprop": {}, "momentum": {}}
    epochs, batch_size, _ = MODELS[name]
    build = {"movielens": movielens_model, "flights": flights_model}[name]
    with kerasps.LocalCluster(num_workers=workers, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, sparse_updates=sparse_updates, table_min_bytes=0
        )
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            rate = rates[optimizer].get(name, 0.001)
            chosen = {
                "adam": lambda: keras.optimizers.Adam(rate),
                "rmsprop": lambda: keras.optimizers.RMSprop(rate),
                "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
            }[optimizer]()
            model, data, test = build(keras, chosen)
        metrics, seconds = [], [0.0]
        for _ in range(epochs):
            start = time.perf_counter()
            model.fit(*data, batch_size=batch_size, verbose=0)
            seconds.append(seconds[-1] + time.perf_counter() - start)
            result = model.evaluate(*test, batch_size=1024, verbose=0, return_dict=True)
            metrics.append(result["metric"])
    print("MEASURED", json.dumps({"metrics": metrics, "seconds": seconds[1:]}))


def measure(*arguments: object) -> dict[str, list[float]]:
    """Return the measurements of one training in a process of its own."""
    out = subprocess.run(
        [sys.executable, __file__, "--train", *map(str, arguments)],
        env={**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    measured: dict[str, list[float]] = json.loads(out.rpartition("MEASURED ")[2])
    return measured


def at_time(run: dict[str, list[float]], seconds: float) -> float:
    """Return the metric of a training at a time, between its epochs on a straight line."""
    return float(np.interp(seconds, run["seconds"], run["metrics"]))


def print_row(name: str, optimizer: str, workers: int, rounds: int) -> None:
    """Measure one setting, and print its row of the table."""
    best = max if MODELS[name][2] else min
    runs: dict[str, list[dict[str, list[float]]]] = {kind: [] for kind in SPARSE_UPDATES}
    for seed in range(1, rounds + 1):
        for kind in SPARSE_UPDATES:  # in turn, since other programs may use the machine
            runs[kind].append(measure(name, optimizer, kind, seed, workers))
            print(json.dumps([name, optimizer, kind, seed, workers, runs[kind][-1]]), flush=True)
    cells = [name, optimizer, str(workers)]
    for kind in SPARSE_UPDATES:
        values = [
            [f"{m:.4f}" for m in (run["metrics"][0], run["metrics"][-1], best(run["metrics"]))]
            for run in runs[kind]
        ]
        medians = [
            f"{statistics.median(map(float, column)):.4f}" for column in zip(*values, strict=True)
        ]
        bests = [row[-1] for row in values]
        cells.append(f"{' / '.join(medians)} ({min(bests)} to {max(bests)})")
    pairs = list(zip(runs["lazy"], runs["dense"], strict=True))
    last = [min(lazy["seconds"][-1], dense["seconds"][-1]) for lazy, dense in pairs]
    for kind in SPARSE_UPDATES:
        at = [at_time(run, t) for run, t in zip(runs[kind], last, strict=True)]
        cells.append(f"{statistics.median(at):.4f}")
    ratio = [dense["seconds"][-1] / lazy["seconds"][-1] for lazy, dense in pairs]
    print(f"| {' | '.join(cells)} | {statistics.median(ratio):.2f} |", flush=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", default=["adam"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="seeds")
    parser.add_argument("--train", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        name, optimizer, kind, seed, workers = options.train
        train(name, optimizer, kind, int(seed), int(workers))
        return
    print(
        "| model | optimizer | workers | lazy: first / last / best epoch | dense | lazy at the "
        "same time | dense at the same time | time of dense / lazy |"
    )
    print("| --- | --- | ---: | --- | --- | ---: | ---: | ---: |")
    for optimizer in options.optimizers:
        for workers in options.workers:
            for name in options.models:
                print_row(name, optimizer, workers, options.rounds)


if __name__ == "__main__":
    main()
