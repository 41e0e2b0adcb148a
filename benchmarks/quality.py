"""Measures the cost of asynchronous updates in quality: the test error by number of workers.

    python benchmarks/quality.py --workers 1 2 4 8 --rounds 3

Trains the model of `examples/movielens.py`, on the same number of examples in all. Each measurement
is a separate `kerasps launch`. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import keras
import tensorflow as tf

import kerasps

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import movielens
import ratings

EPOCHS = 3


def train(seed: int, arguments: dict[str, object], optimizer: str) -> None:
    """Train under a strategy with these arguments; print the test error and the staleness."""
    keras.utils.set_random_seed(seed)
    strategy = kerasps.ParameterServerStrategy(**arguments)
    train, test = ratings.load()
    steps = len(train) // movielens.BATCH_SIZE // 20 * 20

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((train.inputs("user", "movie"), train.rating))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        dataset = dataset.shuffle(len(train), seed=100 * seed + context.input_pipeline_id)
        return dataset.repeat().batch(movielens.BATCH_SIZE, drop_remainder=True).prefetch(2)

    with strategy.scope():
        model = movielens.build_model(train)
        if optimizer:
            model.compile(
                optimizer,
                "mse",
                metrics=[keras.metrics.RootMeanSquaredError(name="rmse")],
                steps_per_execution=movielens.STEPS_PER_EXECUTION,
            )
    data = kerasps.DatasetCreator(dataset_fn)
    model.fit(data, epochs=EPOCHS, steps_per_epoch=steps, verbose=0)
    workers = strategy.staleness()
    pushes = sum(worker.pushes for worker in workers)
    mean = sum(worker.mean * worker.pushes for worker in workers) / max(pushes, 1)
    result = model.evaluate(
        test.inputs("user", "movie"), test.rating, batch_size=1024, verbose=0, return_dict=True
    )
    print("MEASURED", json.dumps({"rmse": result["rmse"], "staleness": mean}), flush=True)


def measure(workers: int, seed: int, arguments: str, optimizer: str) -> dict[str, float]:
    """Return the measurements of one launch."""
    out = subprocess.run(
        [
            *(sys.executable, "-m", "kerasps", "launch", "--num-workers", str(workers)),
            *(__file__, "--train", str(seed), arguments, optimizer),
        ],
        env={**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    line = next(line for line in out.splitlines() if line.startswith("MEASURED "))
    measured: dict[str, float] = json.loads(line.removeprefix("MEASURED "))
    return measured


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3, help="runs, each with another seed")
    parser.add_argument("--optimizer", default="", help="by its name; default: the example's Adam")
    parser.add_argument(
        "--arguments",
        nargs="+",
        default=["{}"],
        help="of the strategy, each a row of the table, such as '{\"max_staleness\": 20}'",
    )
    options = parser.parse_args()
    if options.train:
        seed, arguments, optimizer = options.train
        train(int(seed), json.loads(arguments), optimizer)
        return
    print("| strategy | workers | staleness, mean | test RMSE: median | all |")
    print("| --- | --- | --- | --- | --- |")
    for arguments in options.arguments:
        for workers in options.workers:
            runs = [
                measure(workers, seed, arguments, options.optimizer)
                for seed in range(1, options.rounds + 1)
            ]
            staleness = statistics.mean(run["staleness"] for run in runs)
            rmses = [run["rmse"] for run in runs]
            each = " ".join(f"{rmse:.4f}" for rmse in rmses)
            median = statistics.median(rmses)
            print(f"| `{arguments}` | {workers} | {staleness:.2f} | {median:.4f} | {each} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
