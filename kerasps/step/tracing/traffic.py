"""The traffic of a training: how much each ps task hands out and takes in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from kerasps.runtime.devices import ps_device
from kerasps.variables.placement import text_table

_HOTTEST = 3


@dataclass(frozen=True)
class TaskLoad:
    """The traffic of one ps task, per second of training.

    Rows are those of tables that steps read by rows; bytes are of tables and of dense variables.

    Args:
        device: the name of the ps's device.
        rows_read_per_second: the rows that the ps hands out.
        bytes_read_per_second: the bytes of the values that it hands out.
        rows_written_per_second: the rows for which it takes in gradients.
        bytes_written_per_second: the bytes of the gradients and new values that it takes in.
        hottest_tables: the names of the tables with the most rows read, and their rows per second.
    """

    device: str
    rows_read_per_second: float
    bytes_read_per_second: float
    rows_written_per_second: float
    bytes_written_per_second: float
    hottest_tables: tuple[tuple[str, float], ...]


class LoadReport(Sequence[TaskLoad]):
    """The traffic of every ps task, a `TaskLoad` each, in task order; prints as a table.

    ```python
    print(strategy.load_report())  # after `model.fit`, or while it runs
    busiest = max(task.bytes_read_per_second for task in strategy.load_report())
    ```

    Args:
        tasks: the traffic of each ps.
        steps: the training steps that the report is about.
        seconds: the time that they took.
    """

    def __init__(self, tasks: Sequence[TaskLoad], steps: int, seconds: float) -> None:
        self._tasks = tuple(tasks)
        self._steps = steps
        self._seconds = seconds

    @overload
    def __getitem__(self, index: int) -> TaskLoad: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TaskLoad]: ...

    def __getitem__(self, index: int | slice) -> TaskLoad | Sequence[TaskLoad]:
        return self._tasks[index]

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def steps(self) -> int:
        """The training steps that the report is about."""
        return self._steps

    @property
    def seconds(self) -> float:
        """The time that they took, in seconds."""
        return self._seconds

    def __repr__(self) -> str:
        return f"<LoadReport of {self.steps} steps in {self.seconds:.1f} s on {len(self)} ps>"

    def __str__(self) -> str:
        rows = [
            (
                "ps",
                "rows read/s",
                "MB read/s",
                "rows written/s",
                "MB written/s",
                "hottest tables (rows read/s)",
            )
        ]
        for index, task in enumerate(self._tasks):
            numbers = (
                f"{task.rows_read_per_second:,.0f}",
                f"{task.bytes_read_per_second / 1e6:,.2f}",
                f"{task.rows_written_per_second:,.0f}",
                f"{task.bytes_written_per_second / 1e6:,.2f}",
            )
            hottest = ", ".join(f"{name} ({rows:,.0f})" for name, rows in task.hottest_tables)
            rows.append((str(index), *numbers, hottest))
        return text_table(rows)


@dataclass(frozen=True)
class TableTraffic:
    """A shard of a table.

    Attributes:
        ps: the index of the ps that has it.
        name: the path of the table.
        row_bytes: the bytes of a row.
        is_written: whether steps write it too.
    """

    ps: int
    name: str
    row_bytes: int
    is_written: bool


@dataclass(frozen=True)
class StepTraffic:
    """The bytes and rows that each step moves.

    Attributes:
        dense_read: the bytes of dense variables that each ps hands out.
        dense_written: the bytes of their gradients and new values that each ps takes in.
        tables: the shards of tables, whose rows are counted as they are asked for.
    """

    dense_read: dict[int, int]
    dense_written: dict[int, int]
    tables: Sequence[TableTraffic]


class TrafficMeter:
    """Adds up what steps moved, for a `LoadReport`.

    Args:
        num_ps: the number of ps tasks.
    """

    def __init__(self, num_ps: int) -> None:
        self._num_ps = num_ps
        self.start(StepTraffic({}, {}, ()))

    def start(self, traffic: StepTraffic) -> None:
        """Begin anew, for steps that move `traffic`."""
        self._traffic = traffic
        self._rows = np.zeros([len(traffic.tables)], np.int64)
        self._steps = 0
        self._seconds = 0.0
        self._running_since: float | None = None

    def resume(self) -> None:
        """Let time count from here on."""
        self._running_since = time.monotonic()

    def pause(self) -> None:
        """Let time not count from here on."""
        if self._running_since is not None:
            self._seconds += time.monotonic() - self._running_since
        self._running_since = None

    def add(self, steps: int, rows: Sequence[np.ndarray]) -> None:
        """Count steps, and the rows that they read of each of the traffic's tables."""
        self._steps += steps
        if rows:
            self._rows = self._rows + rows[0]

    def report(self) -> LoadReport:
        """Return what was counted since `start`."""
        running = 0.0 if self._running_since is None else time.monotonic() - self._running_since
        seconds = self._seconds + running
        return LoadReport(
            [self._task(ps, seconds) for ps in range(self._num_ps)], self._steps, seconds
        )

    def _task(self, ps: int, seconds: float) -> TaskLoad:
        def rate(amount: float) -> float:
            return float(amount) / seconds if seconds else 0.0

        here = [
            (table, int(rows))
            for table, rows in zip(self._traffic.tables, self._rows, strict=True)
            if table.ps == ps
        ]
        written = [(table, rows) for table, rows in here if table.is_written]
        read_bytes = sum(rows * table.row_bytes for table, rows in here)
        written_bytes = sum(rows * table.row_bytes for table, rows in written)
        by_name: dict[str, int] = {}
        for table, rows in here:
            by_name[table.name] = by_name.get(table.name, 0) + rows
        hottest = sorted(by_name.items(), key=lambda item: -item[1])[:_HOTTEST]
        return TaskLoad(
            ps_device(ps),
            rate(sum(rows for _, rows in here)),
            rate(read_bytes + self._steps * self._traffic.dense_read.get(ps, 0)),
            rate(sum(rows for _, rows in written)),
            rate(written_bytes + self._steps * self._traffic.dense_written.get(ps, 0)),
            tuple((name, rate(rows)) for name, rows in hottest if rows),
        )
