"""Measures the cost of a step with many tables, and with one table and as many ids.

    python benchmarks/many_tables.py
    python benchmarks/many_tables.py --tables 1 26 --workers 2 --num-ps 2 --shards 2 --rounds 5

Every measurement has a new process and a new cluster; they take turns. Prints a table in
Markdown: milliseconds per step, and the CPU time of a step in the workers and in the ps tasks.
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

IDS = 26


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(num_tables: int, options: argparse.Namespace) -> None:
    """Train a model with `num_tables` tables and print its times as JSON."""
    import keras
    import numpy as np
    import tensorflow as tf

    import kerasps

    size = options.batch_size
    with kerasps.LocalCluster(num_workers=options.workers, num_ps=options.num_ps) as cluster:
        partitioner = kerasps.FixedShardsPartitioner(options.shards) if options.shards > 1 else None
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, variable_partitioner=partitioner
        )
        with strategy.scope():
            per_table = IDS // num_tables
            inputs = [keras.Input((per_table,), dtype="int32") for _ in range(num_tables)]
            rows = options.rows * IDS // num_tables if options.same_rows else options.rows
            found = [keras.layers.Embedding(rows, options.columns)(ids) for ids in inputs]
            flat = [keras.layers.Flatten()(vectors) for vectors in found]
            both = keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
            hidden = keras.layers.Dense(8, activation="relu")(both)
            model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
            model.compile(options.optimizer, "mse", steps_per_execution=options.steps_per_execution)
        generator = np.random.default_rng(0)
        shape = (64 * size, per_table)
        ids = tuple(generator.integers(0, rows, shape).astype("int32") for _ in inputs)
        targets = generator.random((64 * size, 1)).astype("float32")

        def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            data = tf.data.Dataset.from_tensor_slices((ids, targets))
            return data.batch(size, drop_remainder=True).cache().repeat()

        def cpu() -> dict[str, float]:
            times: dict[str, float] = {"worker": 0.0, "ps": 0.0}
            for (job, _), process in cluster.processes.items():
                times[job] += cpu_seconds(process.pid)
            return times

        marks = []

        def mark(*_: object) -> None:
            marks.append((time.perf_counter(), cpu()))

        clock = keras.callbacks.LambdaCallback(on_epoch_begin=mark, on_epoch_end=mark)
        started = time.perf_counter()
        model.fit(
            kerasps.DatasetCreator(dataset),
            epochs=options.epochs + 1,
            steps_per_epoch=options.steps,
            verbose=0,
            callbacks=[clock],
        )
        first = marks[1][0] - started
        spans = [
            (
                (after[0] - before[0]) / options.steps * 1e3,
                *((after[1][job] - before[1][job]) / options.steps * 1e3 for job in before[1]),
            )
            for before, after in zip(marks[2::2], marks[3::2], strict=True)
        ]
        figures = [statistics.median(column) for column in zip(*spans, strict=True)]
        print(json.dumps([*figures, first]))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", type=int, choices=[1, 2, 13, 26], default=[1, 26])
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument(
        "--same-rows", action="store_true", help="--rows is of each of 26 tables, or their sum"
    )
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--num-ps", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--steps-per-execution", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.tables[0], options)
        return
    found: dict[int, list[list[float]]] = {number: [] for number in options.tables}
    for _ in range(options.rounds):
        for number in options.tables:
            arguments = [*sys.argv[1:], "--measure", "--tables", str(number)]
            done = subprocess.run(
                [sys.executable, __file__, *arguments],
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            found[number].append(json.loads(done.stdout.splitlines()[-1]))
    print("| tables | ms a step | CPU, workers | CPU, ps | first epoch, s |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for number, rounds in found.items():
        ms, worker, ps, first = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {number} | {ms:.2f} | {worker:.2f} | {ps:.2f} | {first:.1f} |")


if __name__ == "__main__":
    main()
