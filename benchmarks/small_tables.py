"""Finds the size from which reading rows of a table is faster than reading it whole.

    python benchmarks/small_tables.py --rows 32 250 500 1000 4000

For each number of rows, trains a model with tables of that many rows, which are just large enough
to be read by rows, and one whose tables have a row less, in turn. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import kerasps

BATCHES, STEPS, STEPS_PER_EXECUTION = 64, 200, 10


class _Training:
    """A model with tables, and its data."""

    def __init__(
        self, strategy: kerasps.ParameterServerStrategy, rows: int, options: argparse.Namespace
    ) -> None:
        generator = np.random.default_rng(0)
        shape = (BATCHES * options.batch_size, options.ids)
        with strategy.scope():
            inputs = [keras.Input((options.ids,), dtype="int32") for _ in range(options.tables)]
            found = [keras.layers.Embedding(rows, options.columns)(ids) for ids in inputs]
            flat = [keras.layers.Flatten()(vectors) for vectors in found]
            both = keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
            hidden = keras.layers.Dense(16, activation="relu")(both)
            self.model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
            self.model.compile(options.optimizer, "mse", steps_per_execution=STEPS_PER_EXECUTION)
        ids = tuple(generator.integers(0, rows, shape).astype("int32") for _ in inputs)
        targets = generator.random((len(ids[0]), 1)).astype("float32")
        self._examples = ids, targets
        self._batch_size = options.batch_size

    def _dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(self._examples)
        return dataset.batch(self._batch_size, drop_remainder=True).cache().repeat()

    def seconds(self) -> float:
        """Return the seconds of an epoch's steps, after an epoch that reads the data."""
        started = []
        clock = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: started.append(time.perf_counter()),
            on_epoch_end=lambda epoch, logs: started.append(time.perf_counter()),
        )
        self.model.fit(
            kerasps.DatasetCreator(self._dataset),
            epochs=2,
            steps_per_epoch=STEPS,
            verbose=0,
            callbacks=[clock],
        )
        return started[3] - started[2]


def measure(rows: int, options: argparse.Namespace) -> None:
    """Print the table's line for `rows`."""
    num_bytes = rows * options.columns * 4
    with kerasps.LocalCluster(num_workers=1, num_ps=options.num_ps) as cluster:
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, table_min_bytes=num_bytes
        )
        both = [_Training(strategy, number, options) for number in (rows, rows - 1)]
        for training in both:
            training.seconds()
        times = [[training.seconds() for training in both] for _ in range(options.rounds)]
    by_rows, whole = (
        statistics.median(column) / STEPS * 1000 for column in zip(*times, strict=True)
    )
    ratio = statistics.median(b / a for a, b in times)
    print(f"| {rows} | {num_bytes >> 10} | {by_rows:.2f} | {whole:.2f} | {ratio:.2f} |", flush=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 250, 500, 1000, 4000])
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--tables", type=int, default=7)
    parser.add_argument("--ids", type=int, default=1, help="of each table, an example")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--num-ps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.rows[0], options)
        return
    print("| rows | kB each | by rows, ms a step | whole, ms a step | whole / by rows |")
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    # A process has one strategy.
    for rows in options.rows:
        arguments = [*sys.argv[1:], "--measure", "--rows", str(rows)]
        subprocess.run(
            [sys.executable, __file__, *arguments], check=True, stderr=subprocess.DEVNULL
        )


if __name__ == "__main__":
    main()
