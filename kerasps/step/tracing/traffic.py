"""The traffic of a training: the rows and bytes that each ps task sends and receives."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kerasps.dynamic import GrowingRows
from kerasps.runtime.devices import ps_device
from kerasps.words import Records, text_table

_HOTTEST = 3


@dataclass(frozen=True)
class TaskLoad:
    """The traffic of one ps task, per second of training.

    Rows are those of tables that steps read by rows; bytes are of tables and of dense variables.

    Args:
        device: the name of the ps's device.
        rows_read_per_second: the rows that the ps sends.
        bytes_read_per_second: the bytes of the values that it sends.
        rows_written_per_second: the rows for which it receives gradients.
        bytes_written_per_second: the bytes of the gradients and new values that it receives.
        hottest_tables: the names of the tables with the most rows read, and their rows per second.
    """

    device: str
    rows_read_per_second: float
    bytes_read_per_second: float
    rows_written_per_second: float
    bytes_written_per_second: float
    hottest_tables: tuple[tuple[str, float], ...]


class LoadReport(Records[TaskLoad]):
    """The traffic of every ps task, a `TaskLoad` each, in task order; prints as a table.

    ```python
    print(strategy.load_report())  # after `model.fit`, or while it runs
    busiest = max(task.bytes_read_per_second for task in strategy.load_report())
    ```

    Args:
        tasks: the traffic of each ps.
        steps: the training steps that the report covers.
        seconds: the time that they took, in seconds.
        tables: the size of each table that they read, by its name, over all ps.
    """

    def __init__(
        self,
        tasks: Sequence[TaskLoad],
        steps: int,
        seconds: float,
        tables: Mapping[str, TableSize],
    ) -> None:
        super().__init__(tasks)
        self._steps = steps
        self._seconds = seconds
        self._tables = dict(tables)

    @property
    def steps(self) -> int:
        """The training steps that the report covers."""
        return self._steps

    @property
    def seconds(self) -> float:
        """The time that they took, in seconds."""
        return self._seconds

    @property
    def tables(self) -> dict[str, TableSize]:
        """The size of each table that the steps read, by its name, over all ps.

        Rows of tables without a vocabulary are counted at the end of each epoch.
        """
        return dict(self._tables)

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
        for index, task in enumerate(self):
            numbers = (
                f"{task.rows_read_per_second:,.0f}",
                f"{task.bytes_read_per_second / 1e6:,.2f}",
                f"{task.rows_written_per_second:,.0f}",
                f"{task.bytes_written_per_second / 1e6:,.2f}",
            )
            hottest = ", ".join(f"{name} ({rows:,.0f})" for name, rows in task.hottest_tables)
            rows.append((str(index), *numbers, hottest))
        grown = {name: size for name, size in self._tables.items() if size.made}
        if not grown:
            return text_table(rows)
        of_tables: list[tuple[str, ...]] = [
            ("table", "rows", "most", "made", "evicted", "dropped gradients")
        ]
        for name, size in grown.items():
            counts = size.num_rows, size.most, size.made, size.evicted, size.dropped
            of_tables.append((name, *(f"{count:,}" for count in counts)))
        return text_table(rows) + "\n\n" + text_table(of_tables)


class TableSize(NamedTuple):
    """The size of a table.

    Attributes:
        num_rows: the number of its rows.
        num_bytes: their bytes, without those of slots.
        made_per_second: the rows that a table without a vocabulary gets each second.
        most: the most rows that it may have; 0 for no limit.
        made: how many rows it got.
        evicted: how many of them it gave up.
        dropped: the gradients of ids that got no row.
    """

    num_rows: int = 0
    num_bytes: int = 0
    made_per_second: float = 0.0
    most: int = 0
    made: int = 0
    evicted: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class TableTraffic:
    """A shard of a table."""

    ps: int  # the index of its ps
    name: str  # the path of the table
    row_bytes: int  # the bytes of a row
    is_written: bool  # whether steps write it too
    held_row_bytes: int = 0  # the bytes of a row on the ps
    num_rows: int | GrowingRows = 0  # the number of its rows

    @property
    def size(self) -> TableSize:
        """Its size, as far as is known now."""
        rows = self.num_rows
        if isinstance(rows, int):
            return TableSize(rows, rows * self.held_row_bytes)
        return TableSize(
            rows.number,
            rows.number * self.held_row_bytes,
            rows.made_per_second,
            rows.most or 0,
            rows.made,
            rows.evicted,
            rows.dropped,
        )


@dataclass(frozen=True)
class StepTraffic:
    """The bytes and rows that each step moves."""

    dense_read: dict[int, int]  # the bytes of dense variables that each ps sends
    # The bytes of their gradients and new values that each ps receives.
    dense_written: dict[int, int]
    # The shards of tables; the steps count their rows when they ask for them.
    tables: Sequence[TableTraffic]


@dataclass(frozen=True)
class Moved:
    """The rows and bytes that one ps has sent and received."""

    rows_read: int = 0  # the rows of tables that it sent
    bytes_read: int = 0  # the bytes of the values that it sent
    rows_written: int = 0  # the rows for which it received gradients
    bytes_written: int = 0  # the bytes of the gradients and new values that it received

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.rows_read + other.rows_read,
            self.bytes_read + other.bytes_read,
            self.rows_written + other.rows_written,
            self.bytes_written + other.bytes_written,
        )


class _Counted(NamedTuple):
    """The steps that were counted since `start`, and the rows that they read of each table.

    It is one tuple, so that another thread reads numbers that belong together, and the next one
    costs little to make.
    """

    traffic: StepTraffic
    rows: np.ndarray
    steps: int
    # Of each ps, and of each table, before `start`.
    moved_before: tuple[Moved, ...]
    rows_before: Mapping[str, int]

    def rows_here(self, ps: int) -> list[tuple[TableTraffic, int]]:
        """Return the shards of tables on a ps, and the number of rows read of each."""
        return [
            (table, int(rows))
            for table, rows in zip(self.traffic.tables, self.rows, strict=True)
            if table.ps == ps
        ]

    def moved(self, ps: int) -> Moved:
        """Return what a ps has moved since `start`."""
        here, traffic = self.rows_here(ps), self.traffic
        written = [(table, rows) for table, rows in here if table.is_written]
        return Moved(
            sum(rows for _, rows in here),
            sum(rows * table.row_bytes for table, rows in here)
            + self.steps * traffic.dense_read.get(ps, 0),
            sum(rows for _, rows in written),
            sum(rows * table.row_bytes for table, rows in written)
            + self.steps * traffic.dense_written.get(ps, 0),
        )

    @property
    def rows_by_table(self) -> dict[str, int]:
        """The rows that were read of each table since this process was connected."""
        by_name = dict(self.rows_before)
        for table, rows in zip(self.traffic.tables, self.rows, strict=True):
            by_name[table.name] = by_name.get(table.name, 0) + int(rows)
        return by_name


class TrafficMeter:
    """Adds up the rows and bytes that steps move, for a `LoadReport`.

    Thread: `fit`'s thread counts; any thread may ask.
    """

    def __init__(self, num_ps: int) -> None:
        self._num_ps = num_ps
        nothing = StepTraffic({}, {}, ())
        self._counted = _Counted(nothing, np.zeros([0], np.int64), 0, (Moved(),) * num_ps, {})
        self._seconds = 0.0
        self._running_since: float | None = None

    def start(self, traffic: StepTraffic) -> None:
        """Start a new count, for steps that move `traffic`."""
        self._counted = _Counted(
            traffic,
            np.zeros([len(traffic.tables)], np.int64),
            0,
            tuple(self.moved()),
            self._counted.rows_by_table,
        )
        self._seconds = 0.0
        self._running_since = None

    def resume(self) -> None:
        """Count time from here on."""
        self._running_since = time.monotonic()

    def pause(self) -> None:
        """Stop counting time from here on."""
        if self._running_since is not None:
            self._seconds += time.monotonic() - self._running_since
        self._running_since = None

    def add(self, steps: int, rows: Sequence[np.ndarray]) -> None:
        """Count steps, and the rows that they read of each of the traffic's tables."""
        traffic, counted, steps_before, moved_before, rows_before = self._counted
        total = counted + rows[0] if rows else counted
        self._counted = _Counted(traffic, total, steps_before + steps, moved_before, rows_before)

    def report(self) -> LoadReport:
        """Return the traffic since `start`."""
        since, counted = self._running_since, self._counted
        seconds = self._seconds + (0.0 if since is None else time.monotonic() - since)
        return LoadReport(
            [_load(counted, ps, seconds) for ps in range(self._num_ps)],
            counted.steps,
            seconds,
            self.table_sizes(),
        )

    def moved(self) -> list[Moved]:
        """Return the rows and bytes that each ps has moved since this process connected."""
        counted = self._counted
        return [before + counted.moved(ps) for ps, before in enumerate(counted.moved_before)]

    def rows_read(self) -> dict[str, tuple[int, int]]:
        """Return, for each table, the rows read by the last training, and by all until now."""
        counted = self._counted
        before = counted.rows_before
        return {
            name: (rows - before.get(name, 0), rows) for name, rows in counted.rows_by_table.items()
        }

    def table_sizes(self) -> dict[str, TableSize]:
        """Return the size of each table that the last training read."""
        sizes: dict[str, TableSize] = {}
        for table in self._counted.traffic.tables:
            before = sizes.get(table.name, TableSize())
            sizes[table.name] = TableSize(*map(operator.add, before, table.size))
        return sizes


def _load(counted: _Counted, ps: int, seconds: float) -> TaskLoad:
    """Return the traffic of one ps, per second."""

    def rate(amount: float) -> float:
        return float(amount) / seconds if seconds else 0.0

    by_name: dict[str, int] = {}
    for table, rows in counted.rows_here(ps):
        by_name[table.name] = by_name.get(table.name, 0) + rows
    hottest = sorted(by_name.items(), key=lambda item: -item[1])[:_HOTTEST]
    moved = counted.moved(ps)
    return TaskLoad(
        ps_device(ps),
        rate(moved.rows_read),
        rate(moved.bytes_read),
        rate(moved.rows_written),
        rate(moved.bytes_written),
        tuple((name, rate(rows)) for name, rows in hottest if rows),
    )
