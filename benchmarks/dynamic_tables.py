"""Compares steps of tables without a vocabulary with those of fixed ones, in turn.

    python benchmarks/dynamic_tables.py steps --ps 1 --steps-per-execution 10
    python benchmarks/dynamic_tables.py growth --rows 5000000
    python benchmarks/dynamic_tables.py bound --steps-per-execution 10 --tail-steps 100000
    python benchmarks/dynamic_tables.py changes --ps 1
    python benchmarks/dynamic_tables.py delta --rows 1000000

`steps` trains 26 tables of 16 columns, batches of 128, ids by Zipf's law: fixed tables; tables
without a vocabulary that get no new ids; and some that get 2% new ids. `growth` makes rows in one
table, and prints what the table takes before its first row, how long calls with new rows take
(in turn with calls that have none), the memory of a row, and a step at few rows and at many.
`bound` fills the tables of `steps` to their bound, so that each new id evicts a row, and prints the
slowest steps, one to an execution. `changes` compares the steps of `steps` before anybody asks for
changes, after one question, and while a thread reads the changes of all tables each second. `delta`
compares a backup of one table and its slot with a delta after 1% of the rows changed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
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
# The rows of a call; those that are timed; those of a call that is not.
PIECE, MEASURED_ROWS, LARGE_PIECE = 4096, 5_000_000, 1 << 17
# The rows of a table with eviction.
BOUND = 20_000


class _Steps:
    """The models, and their data."""

    def __init__(
        self,
        strategy: kerasps.ParameterServerStrategy,
        steps_per_execution: int,
        **of_tables: object,
    ) -> None:
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
                lambda: kerasps.layers.DynamicEmbedding(WIDTH, **of_tables), steps_per_execution
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
            # On a busy machine, the two of a pair have to be near in time.
            fixed = milliseconds(steps.fixed, same, epochs=2)
            of_same.append(milliseconds(steps.dynamic, same, epochs=2) / fixed)
            of_fixed.append(fixed)
            # New ids are new once, so this epoch is the first of its data, for both.
            first = milliseconds(steps.fixed, same)
            of_new.append(milliseconds(steps.dynamic, steps.data(0.02)) / first)
    print("| ps | steps per execution | fixed | none new / fixed | 2% new / fixed | load |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(
        f"| {options.ps} | {options.steps_per_execution} | {statistics.median(of_fixed):.2f} ms "
        f"| {spread(of_same)} | {spread(of_new)} | {load()} |"
    )


def compare_bound(options: argparse.Namespace) -> None:
    """Print the ratios of steps in which new ids take the place of others."""
    eviction = kerasps.layers.Eviction(options.order)
    with kerasps.LocalCluster(num_workers=1, num_ps=options.ps) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        per_execution = options.steps_per_execution
        steps = _Steps(strategy, per_execution, max_rows=BOUND, eviction=eviction)
        same = steps.data()
        for model in (steps.fixed, steps.dynamic):
            milliseconds(model, same, epochs=2)
        tables = [
            layer
            for layer in steps.dynamic.layers
            if isinstance(layer, kerasps.layers.DynamicEmbedding)
        ]
        for table in tables:
            missing = int(eviction.low * BOUND) - table.num_rows
            table.load_rows(-1 - np.arange(missing), np.zeros([missing, WIDTH], "float32"))
        before = sum(table.figures()["evicted"] for table in tables)
        found: dict[float, list[float]] = {0.0: [], 0.02: [], 0.2: []}
        for _ in range(options.rounds):
            for share, ratios in found.items():
                first = milliseconds(steps.fixed, same)
                ratios.append(milliseconds(steps.dynamic, steps.data(share)) / first)
        evicted = sum(table.figures()["evicted"] for table in tables) - before
        new_ids = options.rounds * STEPS * BATCH_SIZE * TABLES * 0.22
        print("| ps | steps per execution | none new / fixed | 2% new | 20% new | load |")
        print("| --- | --- | --- | --- | --- | --- |")
        ratios_of_all = " | ".join(spread(ratios) for ratios in found.values())
        print(f"| {options.ps} | {per_execution} | {ratios_of_all} | {load()} |")
        print(f"{evicted:,} rows evicted for some {new_ids:,.0f} new ids")
        if options.tail_steps:
            for name, model, share in (("fixed", steps.fixed, 0), ("bound", steps.dynamic, 0.02)):
                model.compile("adagrad", "mse", steps_per_execution=1)
                print(f"{name}: {_tail(model, steps, share, options.tail_steps)}")


def _tail(model: keras.Model, steps: _Steps, share_of_new: float, num_steps: int) -> str:
    """Return how much longer than the median the slowest steps take."""
    marks: list[float] = []

    def mark(batch: int, logs: object = None) -> None:
        marks.append(time.perf_counter())

    clock = keras.callbacks.LambdaCallback(on_train_batch_end=mark)
    durations: list[float] = []
    while len(durations) < num_steps:
        marks.clear()
        data = steps.data(share_of_new)
        model.fit(data, steps_per_epoch=STEPS, verbose=0, callbacks=[clock])
        # The first steps of a `fit` fill the pipeline.
        durations += np.diff(marks)[10:].tolist()
    median, slow, slowest = np.percentile(durations, (50, 99.9, 100)) * 1e3
    return (
        f"{len(durations):,} steps, median {median:.2f} ms, the slowest 0.1% from {slow:.2f} ms "
        f"on, the slowest {slowest:.2f} ms"
    )


def spread(values: list[float]) -> str:
    """Return the median, and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def load() -> str:
    """Return the load of the machine in the last minute."""
    return f"{psutil.getloadavg()[0]:.0f}"


def compare_changes(options: argparse.Namespace) -> None:
    """Print the ratios of steps whose changes nobody asks for, or somebody."""
    with kerasps.LocalCluster(num_workers=1, num_ps=options.ps) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        steps = _Steps(strategy, options.steps_per_execution)
        same = steps.data()
        kind = kerasps.layers.DynamicEmbedding
        tables = [layer for layer in steps.dynamic.layers if isinstance(layer, kind)]
        for model in (steps.fixed, steps.dynamic):
            milliseconds(model, same, epochs=2)

        fastest: list[float] = []

        def ratios() -> list[float]:
            found, times = [], []
            for _ in range(options.rounds):
                times.append(milliseconds(steps.dynamic, same, epochs=2))
                found.append(times[-1] / milliseconds(steps.fixed, same, epochs=2))
            fastest.append(min(times))
            return found

        before = ratios()
        versions = [table.changed_since().version for table in tables]
        noted, is_over, answers, rows = ratios(), threading.Event(), 0, 0

        def follow() -> None:
            nonlocal answers, rows
            while not is_over.wait(1.0):
                for number, table in enumerate(tables):
                    changes = table.changed_since(versions[number])
                    versions[number] = changes.version
                    rows += sum(len(ids) for ids, _ in changes.pieces)
                answers += 1

        reader = threading.Thread(target=follow)
        reader.start()
        followed = ratios()
        is_over.set()
        reader.join()
    middle = statistics.median(before)
    print("| ps | dynamic / fixed | changes noted | and read each second | load |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| {options.ps} | {spread(before)} | {spread(noted)} | {spread(followed)} | {load()} |")
    print(
        f"noted / before {statistics.median(noted) / middle:.3f}; followed / before "
        f"{statistics.median(followed) / middle:.3f}; {answers} answers with {rows:,} rows"
    )
    # Other work on the machine disturbs the fastest epochs least.
    print("fastest epochs: " + ", ".join(f"{time:.3f}" for time in fastest) + " ms a step")


def compare_delta(options: argparse.Namespace) -> None:
    """Print the bytes and seconds of a backup, and of a delta after 1% of the rows changed."""
    from kerasps.saving import BackupStore
    from kerasps.saving.backup_files import BackupDirectory

    generator = np.random.default_rng(0)
    with (
        kerasps.LocalCluster(num_workers=1, num_ps=options.ps) as cluster,
        tempfile.TemporaryDirectory() as path,
    ):
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            table = kerasps.layers.DynamicEmbedding(WIDTH)
            model = _one_table(table)
            model.compile("adagrad", "mse")
            model.optimizer.build(model.trainable_variables)
        for ids in np.array_split(np.arange(options.rows), -(-options.rows // LARGE_PIECE)):
            table.load_rows(ids, generator.random((len(ids), WIDTH)).astype("float32"))
        store = BackupStore(path, model, full_every=1000)
        seconds: list[tuple[float, float]] = []
        for number in range(1 + options.rounds):
            if number:
                ids = generator.choice(options.rows, options.rows // 100, replace=False)
                table.load_rows(ids, generator.random((len(ids), WIDTH)).astype("float32"))
            began = time.perf_counter()
            store.write({}, [])
            copied = time.perf_counter()
            store.wait(600)
            seconds.append((copied - began, time.perf_counter() - began))
            if number == 0:  # the functions are traced now; begin anew
                store = BackupStore(path, model, full_every=1000)
                began = time.perf_counter()
                store.write({}, [])
                copied = time.perf_counter()
                store.wait(600)
                seconds = [(copied - began, time.perf_counter() - began)]
        base, *deltas = next(BackupDirectory(path).backups()).chain
        num_bytes = statistics.median(delta.num_bytes for delta in deltas)
    copying, whole = seconds[0]
    delta_copying, delta_whole = (statistics.median(v) for v in zip(*seconds[2:], strict=True))
    print(f"base: {base.num_bytes:,} bytes, {copying:.3f} s to copy, {whole:.3f} s in all")
    print(
        f"delta of 1%: {num_bytes:,} bytes ({num_bytes / base.num_bytes:.1%}), "
        f"{delta_copying:.3f} s to copy, {delta_whole:.3f} s in all ({delta_whole / whole:.1%}); "
        f"load {load()}"
    )


def resident() -> int:
    """Return the bytes that the ps holds in memory."""
    return sum(task.memory_info().rss for task in psutil.Process().children(recursive=True))


def grow(options: argparse.Namespace) -> None:
    """Print what many rows cost."""
    with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        began, before = time.perf_counter(), resident()
        with strategy.scope():
            table = kerasps.layers.DynamicEmbedding(WIDTH, max_rows=10**9)
            table.build()
        seconds = time.perf_counter() - began
        print(
            f"a table of up to 10**9 rows is there in {seconds:.1f} s, "
            f"with {(resident() - before) >> 20} MiB; load {load()}"
        )
        with strategy.scope():
            model = _one_table(table)
            fixed = _one_table(keras.layers.Embedding(FEW, WIDTH))
        few = kerasps.DatasetCreator(lambda context: _ids(FEW))
        table.load_rows(np.arange(FEW), np.zeros((FEW, WIDTH), "float32"))
        at_few = _against(model, fixed, few, options.rounds)
        begin, rows_before = resident(), table.num_rows
        slowest_pushes(table, min(options.rows, MEASURED_ROWS))
        made = table.num_rows - rows_before
        print(f"{(resident() - begin) / made - WIDTH * 4:.0f} bytes beside a row")
        for first in range(10**6 + MEASURED_ROWS, 10**6 + options.rows, LARGE_PIECE):
            ids = np.arange(first, min(first + LARGE_PIECE, 10**6 + options.rows))
            table.load_rows(ids, np.zeros((len(ids), WIDTH), "float32"))
        at_many = _against(model, fixed, few, options.rounds)
        print(
            f"{(resident() - begin) / (table.num_rows - rows_before) - WIDTH * 4:.0f} bytes beside"
        )
        print(
            f"step at {table.num_rows:,} rows / at {rows_before:,}, each against a fixed table: "
            f"{at_many:.2f} / {at_few:.2f} = {at_many / at_few:.2f}; load {load()}"
        )


def slowest_pushes(table: kerasps.layers.DynamicEmbedding, num_rows: int) -> None:
    """Print how long calls take that make rows, and such that write the same rows, in turn."""
    zeros = np.zeros((PIECE, WIDTH), "float32")
    old = np.arange(PIECE)
    of_new, of_old = [], []
    for first in range(10**6, 10**6 + num_rows, PIECE):
        for ids, times in ((np.arange(first, first + PIECE), of_new), (old, of_old)):
            started = time.perf_counter()
            table.embeddings.write_rows(ids, zeros)
            times.append((time.perf_counter() - started) * 1e3)
    for name, times in (("new", of_new[1:]), ("old", of_old[1:])):  # the first calls trace
        quantiles = ", ".join(f"{np.quantile(times, q):.1f}" for q in (0.5, 0.9, 0.99, 0.999))
        late = sum(value > 5 for value in times)
        print(
            f"calls with {PIECE} {name} rows: 50, 90, 99, 99.9%: {quantiles} ms; slowest "
            f"{max(times):.1f}; {late} of {len(times)} over 5 ms; load {load()}"
        )


def _one_table(table: keras.layers.Layer) -> keras.Model:
    inputs = keras.Input((TABLES,), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(table(inputs))))
    model.compile("sgd", "mse", steps_per_execution=10)
    return model


def _against(
    model: keras.Model, fixed: keras.Model, data: kerasps.DatasetCreator, rounds: int
) -> float:
    """Return the median ratio of steps of two models."""
    for each in (model, fixed):
        milliseconds(each, data, epochs=2)
    return statistics.median(
        milliseconds(model, data, epochs=2) / milliseconds(fixed, data, epochs=2)
        for _ in range(rounds)
    )


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
    steps.add_argument("--rounds", type=int, default=15)
    steps.set_defaults(run=compare_steps)
    growth = commands.add_parser("growth")
    growth.add_argument("--rows", type=int, default=5_000_000)
    growth.add_argument("--rounds", type=int, default=7)
    growth.set_defaults(run=grow)
    bound = commands.add_parser("bound")
    bound.add_argument("--ps", type=int, default=1)
    bound.add_argument("--steps-per-execution", type=int, default=10)
    bound.add_argument("--rounds", type=int, default=15)
    bound.add_argument("--order", default="lru")
    bound.add_argument("--tail-steps", type=int, default=0)
    bound.set_defaults(run=compare_bound)
    changes = commands.add_parser("changes")
    changes.add_argument("--ps", type=int, default=1)
    changes.add_argument("--steps-per-execution", type=int, default=10)
    changes.add_argument("--rounds", type=int, default=9)
    changes.set_defaults(run=compare_changes)
    delta = commands.add_parser("delta")
    delta.add_argument("--ps", type=int, default=2)
    delta.add_argument("--rows", type=int, default=1_000_000)
    delta.add_argument("--rounds", type=int, default=5)
    delta.set_defaults(run=compare_delta)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
