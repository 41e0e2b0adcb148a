"""How much each ps task hands out and takes in while a model trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from kerasps.placement import ps_device, text_table

_HOTTEST = 3


@dataclass(frozen=True)
class TaskLoad:
    """The load of one ps task, per second of training.

    Rows are those of tables that steps read by rows. Bytes are values that the ps hands out ("read") and gradients and new
    values that it takes in ("written"), of tables and of dense variables. `hottest_tables` are names and rows read per second.
    """

    device: str
    rows_read_per_second: float
    bytes_read_per_second: float
    rows_written_per_second: float
    bytes_written_per_second: float
    hottest_tables: tuple[tuple[str, float], ...]


class LoadReport(Sequence[TaskLoad]):
    """The load of every ps task, in task order; prints as a table.

    ```python
    model.fit(...)
    print(strategy.load_report())
    ```
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
        rows = [("ps", "rows read/s", "MB read/s", "rows written/s", "MB written/s", "hottest tables (rows read/s)")]
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
    """A shard of a table: on which ps, of which variable, bytes of a row, and whether steps write it too."""

    ps: int
    name: str
    row_bytes: int
    is_written: bool


@dataclass(frozen=True)
class StepTraffic:
    """What each step moves: bytes per ps of what is dense, and the shards of tables that it counts rows of."""

    dense_read: dict[int, int]
    dense_written: dict[int, int]
    tables: Sequence[TableTraffic]


class LoadMeter:
    """Adds up what steps moved, for a `LoadReport`.

    Args:
        num_ps: the number of ps tasks.
    """

    def __init__(self, num_ps: int) -> None:
        self._num_ps = num_ps
        self.start(StepTraffic({}, {}, ()))

    def start(self, traffic: StepTraffic) -> None:
        """Begins anew, for steps that move `traffic`."""
        self._traffic = traffic
        self._rows = np.zeros([len(traffic.tables)], np.int64)
        self._steps = 0
        self._seconds = 0.0
        self._running_since: float | None = None

    def resume(self) -> None:
        """Time counts from here on."""
        self._running_since = time.monotonic()

    def pause(self) -> None:
        """Time does not count from here on."""
        if self._running_since is not None:
            self._seconds += time.monotonic() - self._running_since
        self._running_since = None

    def add(self, steps: int, rows: Sequence[np.ndarray]) -> None:
        """Counts steps, and the rows that they read of each of the traffic's tables."""
        self._steps += steps
        if rows:
            self._rows = self._rows + rows[0]

    def report(self) -> LoadReport:
        """What was counted since `start`."""
        running = 0.0 if self._running_since is None else time.monotonic() - self._running_since
        seconds = self._seconds + running
        return LoadReport([self._task(ps, seconds) for ps in range(self._num_ps)], self._steps, seconds)

    def _task(self, ps: int, seconds: float) -> TaskLoad:
        def rate(amount: float) -> float:
            return float(amount) / seconds if seconds else 0.0

        here = [(table, int(rows)) for table, rows in zip(self._traffic.tables, self._rows, strict=True) if table.ps == ps]
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
