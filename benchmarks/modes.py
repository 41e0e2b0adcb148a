"""Measures steps per second with a coordinator, and with workers that drive their own steps.

    python benchmarks/modes.py --models mlp2 --workers 1 2 --steps-per-execution 1 10

Each measurement is a separate `kerasps launch`, and the two modes take turns. Prints a table in
Markdown: all steps of all workers in the second epoch, per second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

import keras
import tensorflow as tf

import kerasps
from models import MODELS, Benchmark, find

MODES = ("coordinator", "worker")


def train(benchmark: Benchmark, steps_per_execution: int, steps: int) -> None:
    """Train under the strategy of the mode, and print the steps per second."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    driven = task == "worker"
    strategy = kerasps.WorkerDrivenStrategy() if driven else kerasps.ParameterServerStrategy()
    with strategy.scope():
        model = benchmark.build(keras)
        model.compile(benchmark.optimizer, benchmark.loss, steps_per_execution=steps_per_execution)
    examples = benchmark.data()

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(examples).repeat().batch(benchmark.batch_size)

    def fit(steps: int) -> None:
        model.fit(kerasps.DatasetCreator(dataset_fn), steps_per_epoch=steps, verbose=0)

    steps = steps // strategy.num_workers if driven else steps
    fit(steps // 2 // steps_per_execution * steps_per_execution)
    before, start = int(model.optimizer.iterations), time.perf_counter()
    fit(steps)
    seconds = time.perf_counter() - start
    print(f"RATE {(int(model.optimizer.iterations) - before) / seconds}", flush=True)


def measure(mode: str, model: str, workers: int, steps_per_execution: int, steps: int) -> float:
    """Return the steps per second of one launch."""
    launch = [sys.executable, "-m", "kerasps", "launch", "--mode", mode]
    script = [__file__, "--train", model, str(steps_per_execution), str(steps)]
    out = subprocess.run(
        [*launch, "--num-workers", str(workers), *script],
        env={**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return next(float(line.split()[1]) for line in out.splitlines() if line.startswith("RATE "))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp2", "mlp50"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps-per-execution", nargs="+", type=int, default=[1, 10])
    parser.add_argument("--steps", type=int, default=1000, help="steps of all workers together")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.train:
        model, steps_per_execution, steps = options.train
        train(find(model, 100_000), int(steps_per_execution), int(steps))
        return
    print("| model | workers | steps per execution | coordinator, steps/s | worker, steps/s |")
    print("| --- | --- | --- | --- | --- |")
    cells = itertools.product(options.models, options.workers, options.steps_per_execution)
    for cell in cells:
        rates = {mode: [] for mode in MODES}
        for mode in [*MODES] * options.rounds:
            rates[mode].append(measure(mode, *cell, options.steps))
        medians = [f"{statistics.median(rates[mode]):.0f}" for mode in MODES]
        print("|", " | ".join([*map(str, cell), *medians]), "|", flush=True)


if __name__ == "__main__":
    main()
