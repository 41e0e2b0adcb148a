"""Measures the gain of a ps if tables shared a storage, or if rows and slots were in one storage.

    python benchmarks/row_storage.py
    python benchmarks/row_storage.py --tables 26 --rows 100000 --columns 16 --batch-size 128

It runs only the operations by which a ps reads rows and updates them by Adagrad, in this one
process: with a variable and a slot for each table, with one of each for all tables, and with rows
that hold value and slot. They take turns. Prints a table in Markdown: microseconds of wall-clock
and of CPU time per step, medians of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

STEPS = 20
LEARNING_RATE = 0.1
EPSILON = 1e-7


class Storage:
    """The storage of tables as on a ps, and the steps that read and update them.

    Args:
        num_tables: the number of variables that hold rows.
        rows: the rows of each.
        columns: the width of a table.
        ids: the number of rows of each variable that a step reads.
        is_packed: whether a row holds the value and the slot.
    """

    def __init__(
        self, num_tables: int, rows: int, columns: int, ids: int, *, is_packed: bool
    ) -> None:
        self._columns, self._is_packed = columns, is_packed
        self._sizes = [ids] * num_tables
        self._num_rows = rows
        widths = [2 * columns] if is_packed else [columns, columns]
        self._variables = [
            [tf.Variable(tf.ones([rows, width])) for _ in range(num_tables)] for width in widths
        ]
        self._run = tf.function(self._steps, autograph=False)

    def ids(self, generator: np.random.Generator) -> tf.Tensor:
        """Return the ids of some steps, of shape `[STEPS, all ids of a step]`."""
        return tf.constant(
            generator.integers(0, self._num_rows, (STEPS, sum(self._sizes)), "int32")
        )

    def __call__(self, ids: tf.Tensor) -> None:
        """Do some steps."""
        self._run(ids)

    def _gather(self, variables: Sequence[tf.Variable], ids: Sequence[tf.Tensor]) -> tf.Tensor:
        rows = [
            tf.raw_ops.ResourceGather(resource=v.handle, indices=table_ids, dtype=v.dtype)
            for v, table_ids in zip(variables, ids, strict=True)
        ]
        return rows[0] if len(rows) == 1 else tf.concat(rows, 0)

    def _scatter(
        self, variables: Sequence[tf.Variable], ids: Sequence[tf.Tensor], rows: tf.Tensor
    ) -> None:
        for v, table_ids, new in zip(variables, ids, self._by_table(rows), strict=True):
            tf.raw_ops.ResourceScatterUpdate(resource=v.handle, indices=table_ids, updates=new)

    def _by_table(self, values: tf.Tensor) -> list[tf.Tensor]:
        return [values] if len(self._sizes) == 1 else list(tf.split(values, self._sizes))

    def _steps(self, ids: tf.Tensor) -> None:
        after: list[Any] = []
        graph = tf.compat.v1.get_default_graph()
        for number in range(STEPS):
            with tf.control_dependencies(after):
                of_step = self._by_table(tf.identity(ids[number]))
                pulled = self._gather(self._variables[0], of_step)[:, : self._columns]
            start = len(graph.get_operations())
            with tf.control_dependencies([pulled]):
                self._update(of_step, pulled * 0.01)
            after = [op for op in graph.get_operations()[start:] if op.op_def.is_stateful]

    def _update(self, ids: Sequence[tf.Tensor], gradient: tf.Tensor) -> None:
        held = [self._gather(variables, ids) for variables in self._variables]
        value, slot = tf.split(held[0], 2, axis=1) if self._is_packed else held
        slot += tf.square(gradient)
        value -= LEARNING_RATE * gradient / tf.sqrt(slot + EPSILON)
        new = [tf.concat([value, slot], 1)] if self._is_packed else [value, slot]
        for variables, rows in zip(self._variables, new, strict=True):
            self._scatter(variables, ids, rows)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return the wall-clock and the CPU time that `work` takes, in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000, help="the rows of each table")
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=128, help="the ids of each table")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    number, columns, size = options.tables, options.columns, options.batch_size
    together = 1, options.rows * number, columns, size * number
    storages = {
        "a variable and a slot per table": Storage(
            number, options.rows, columns, size, is_packed=False
        ),
        "one of each for all": Storage(*together, is_packed=False),
        "value and slot in a row, per table": Storage(
            number, options.rows, columns, size, is_packed=True
        ),
        "value and slot in a row, for all": Storage(*together, is_packed=True),
    }
    generator = np.random.default_rng(0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in storages}
    for is_warm in [False] * 3 + [True] * options.rounds:
        for name, storage in storages.items():
            batches = [storage.ids(generator) for _ in range(20)]
            wall, cpu = timed(lambda s=storage, b=batches: [s(ids) for ids in b])
            if is_warm:
                times[name].append((wall / len(batches) / STEPS, cpu / len(batches) / STEPS))
    print("| storage | time, us | CPU, us |\n| --- | ---: | ---: |")
    for name, measured in times.items():
        wall, cpu = (1e6 * statistics.median(values) for values in zip(*measured, strict=True))
        print(f"| {name} | {wall:.0f} | {cpu:.0f} |")


if __name__ == "__main__":
    main()
