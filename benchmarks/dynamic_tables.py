"""Compares steps of tables without a vocabulary with those of fixed ones, in turn.

    python benchmarks/dynamic_tables.py steps --ps 1 --steps-per-execution 10
    python benchmarks/dynamic_tables.py growth --rows 5000000

`steps` trains 26 tables of 16 columns, batches of 128, ids by Zipf's law: fixed tables; tables
without a vocabulary that get no new ids; and some that get 2% new ids. `growth` makes rows in one
table, and prints the slowest push, the memory of a row, and a step at few rows and at many.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import keras
import numpy as np
import psutil
import tensorflow as tf

import kerasps

TABLES, HEIGHT, WIDTH, BATCH_SIZE, STEPS = 26, 100_000, 16, 128, 200
# The rows of a table that is small beside one that grows.
FEW = 100_000


class _Steps:
    """The models, and their data."""

    def __init__(self, strategy: kerasps.ParameterServerStrategy, steps_per_execution: int) -> None:
        self._generator = np.random.default_rng(0)
        self._next_new = 10**6
        draw = self._generator.zipf
        shape = (STEPS * BATCH_SIZE, 1)
        self._ids = [draw(1.2, shape).astype("int64") % HEIGHT for _ in range(TABLES)]
        self._targets = self._generator.random(shape).astype("float32")
        with strategy.scope():
            self.fixed = self._model(
                lambda: keras.layers.Embedding(HEIGHT, WIDTH), steps_per_execution
            )
            self.dynamic = self._model(
                lambda: kerasps.layers.DynamicEmbedding(WIDTH), steps_per_execution
            )

    def _model(
        self, make_table: Callable[[], keras.layers.Layer], steps_per_execution: int
    ) -> keras.Model:
        inputs = [keras.Input((1,), dtype="int64") for _ in range(TABLES)]
        flat = [keras.layers.Flatten()(make_table()(ids)) for ids in inputs]
        hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Concatenate()(flat))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile("adagrad", "mse", steps_per_execution=steps_per_execution)
        return model

    def data(self, share_of_new: float = 0.0) -> kerasps.DatasetCreator:
        """Return batches of which a share of the ids is new."""
        ids = [values.copy() for values in self._ids]
        for values in ids:
            is_new = self._generator.random(values.shape) < share_of_new
            count = int(is_new.sum())
            values[is_new] = np.arange(self._next_new, self._next_new + count)
            self._next_new += count
        dataset = tf.data.Dataset.from_tensor_slices((tuple(ids), self._targets))
        dataset = dataset.batch(BATCH_SIZE, drop_remainder=True).cache().repeat()
        return kerasps.DatasetCreator(lambda context: dataset)


def milliseconds(model: keras.Model, data: kerasps.DatasetCreator, epochs: int = 1) -> float:
    """Return the milliseconds of a step in the last epoch."""
    marks: list[float] = []

    def mark(*_: object) -> None:
        marks.append(time.perf_counter())

    clock = keras.callbacks.LambdaCallback(on_epoch_begin=mark, on_epoch_end=mark)
    model.fit(data, epochs=epochs, steps_per_epoch=STEPS, verbose=0, callbacks=[clock])
    return (marks[-1] - marks[-2]) / STEPS * 1e3


def compare_steps(options: argparse.Namespace) -> None:
    """Print the ratios of steps."""
    partitioner = kerasps.FixedShardsPartitioner(options.ps) if options.ps > 1 else None
    with kerasps.LocalCluster(num_workers=1, num_ps=options.ps) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver, partitioner)
        steps = _Steps(strategy, options.steps_per_execution)
        same = steps.data()
        for model in (steps.fixed, steps.dynamic):
            milliseconds(model, same, epochs=2)
        of_fixed, of_same, of_new = [], [], []
        for _ in range(options.rounds):
            fixed = milliseconds(steps.fixed, same, epochs=2)
            of_same.append(milliseconds(steps.dynamic, same, epochs=2) / fixed)
            of_fixed.append(fixed)
            # New ids are new once, so this epoch is the first of its data, for both.
            first = milliseconds(steps.fixed, same)
            of_new.append(milliseconds(steps.dynamic, steps.data(0.02)) / first)
    print("| ps | steps per execution | fixed | none new / fixed | 2% new / fixed |")
    print("| --- | --- | --- | --- | --- |")
    print(
        f"| {options.ps} | {options.steps_per_execution} | {statistics.median(of_fixed):.2f} ms "
        f"| {statistics.median(of_same):.2f} | {statistics.median(of_new):.2f} |"
    )


def resident() -> int:
    """Return the bytes that the ps holds in memory."""
    return sum(task.memory_info().rss for task in psutil.Process().children(recursive=True))


def grow(options: argparse.Namespace) -> None:
    """Print what many rows cost."""
    with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        began = time.perf_counter()
        before = resident()
        with strategy.scope():
            table = kerasps.layers.DynamicEmbedding(WIDTH)
            inputs = keras.Input((TABLES,), dtype="int64")
            output = keras.layers.Dense(1)(keras.layers.Flatten()(table(inputs)))
            model = keras.Model(inputs, output)
            model.compile("sgd", "mse", steps_per_execution=10)
        print(f"there in {time.perf_counter() - began:.1f} s, {(resident() - before) >> 20} MiB")
        few = kerasps.DatasetCreator(lambda context: _ids(FEW))
        table.load_rows(np.arange(FEW), np.zeros((FEW, WIDTH), "float32"))
        milliseconds(model, few, epochs=2)
        at_few = statistics.median(milliseconds(model, few, epochs=2) for _ in range(5))
        begin, rows_before, slowest = resident(), table.num_rows, 0.0
        piece = 4096
        zeros = np.zeros((piece, WIDTH), "float32")
        for first in range(10**6, 10**6 + options.rows, piece):
            started = time.perf_counter()
            table.embeddings.write_rows(np.arange(first, first + piece), zeros)
            if first > 10**6:  # the first call traces
                slowest = max(slowest, time.perf_counter() - started)
        made = table.num_rows - rows_before
        print(f"{made:,} rows: {(resident() - begin) / made - WIDTH * 4:.0f} bytes beside a row; ")
        print(f"slowest call with {piece} new rows {slowest * 1e3:.1f} ms")
        at_many = statistics.median(milliseconds(model, few, epochs=2) for _ in range(5))
        print(f"step at {table.num_rows:,} rows / at {rows_before:,}: {at_many / at_few:.2f}")


def _ids(height: int) -> tf.data.Dataset:
    generator = np.random.default_rng(1)
    ids = generator.integers(0, height, (STEPS * BATCH_SIZE // 8, TABLES))
    targets = generator.random((len(ids), 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((ids, targets)).batch(1).cache().repeat()


def main() -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("steps")
    steps.add_argument("--ps", type=int, default=1)
    steps.add_argument("--steps-per-execution", type=int, default=10)
    steps.add_argument("--rounds", type=int, default=7)
    steps.set_defaults(run=compare_steps)
    growth = commands.add_parser("growth")
    growth.add_argument("--rows", type=int, default=5_000_000)
    growth.set_defaults(run=grow)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
