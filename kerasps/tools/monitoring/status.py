"""The status of a run as plain records, which `as_dict` converts for JSON, and as rows of text."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerasps.words import num_bytes, text_table

# The result of `as_dict`, also after a way through JSON.
Fields = Mapping[str, Any]
# Rows of cells; the first row names the columns.
Rows = list[tuple[str, ...]]

# A longer name would push the numbers out of a terminal's width.
_NAME_LENGTH = 40
_MOST_TABLES = 5
_LEFT = {"state", "waits for", "address", "table", "hottest table"}


@dataclass(frozen=True)
class ProcessUsage:
    """The memory and the processor time of one process.

    Args:
        pid: its process id.
        memory_bytes: its resident memory in bytes.
        cpu_seconds: the processor time that it has used since it began.
        cpu: the number of cores that it uses, measured since the last status that was at least half
            a second ago, else since the process began.
    """

    pid: int
    memory_bytes: int
    cpu_seconds: float
    cpu: float


@dataclass(frozen=True)
class WorkerRunStatus:
    """The status of one worker in a run.

    Args:
        worker: its index.
        address: its `"host:port"`.
        state: `"connected"`, `"lost"`, `"hangs"`, `"leaving"`, `"left"`, `"joining"` or `"closed"`.
        since_s: the seconds that it has been in this state.
        steps: its training steps in the running or last `fit`.
        steps_total: its training steps since this process was connected.
        steps_per_second: its rate in the last ten seconds of a running `fit`; the mean of one that
            ended.
        executions_in_flight: the executions sent to it that it has not reported as done.
        waits_for: `"data"`, `"ps"`, `"workers"`, `"coordinator"` or `"session"`; empty if it is not
            known to wait. `docs/monitoring.md` explains each.
        times_lost: the number of times that it was lost, or did not answer for too long.
        times_back: the number of times that it came back afterwards.
        staleness_mean: the mean staleness of its updates; None if it has pushed nothing.
        staleness_max: the largest staleness of its updates.
        usage: the usage of its process; None if that is unknown or on another machine.
    """

    worker: int
    address: str
    state: str
    since_s: float
    steps: int = 0
    steps_total: int = 0
    steps_per_second: float = 0.0
    executions_in_flight: int = 0
    waits_for: str = ""
    times_lost: int = 0
    times_back: int = 0
    staleness_mean: float | None = None
    staleness_max: int | None = None
    usage: ProcessUsage | None = None


@dataclass(frozen=True)
class PSRunStatus:
    """The status of one ps in a run.

    Rates are those of the last ten seconds of a running `fit`, and the means of one that ended.

    Args:
        ps: its index.
        address: its `"host:port"`.
        state: `"connected"`, `"lost"`, `"hangs"` or `"closed"`.
        num_variables: the variables that it holds; a shard counts as one.
        num_bytes: their size in bytes.
        rows_read_per_second: the rows of tables that it sends.
        bytes_read_per_second: the bytes of the values that it sends.
        rows_written_per_second: the rows for which it receives gradients.
        bytes_written_per_second: the bytes of the gradients and new values that it receives.
        rows_read_total: the rows that it has sent since this process was connected.
        bytes_read_total: the bytes that it has sent.
        rows_written_total: the rows for which it has received gradients.
        bytes_written_total: the bytes that it has received.
        hottest_tables: the names of the tables with the most rows read, and their rows per second.
        usage: the usage of its process; None if that is unknown or on another machine.
    """

    ps: int
    address: str
    state: str
    num_variables: int = 0
    num_bytes: int = 0
    rows_read_per_second: float = 0.0
    bytes_read_per_second: float = 0.0
    rows_written_per_second: float = 0.0
    bytes_written_per_second: float = 0.0
    rows_read_total: int = 0
    bytes_read_total: int = 0
    rows_written_total: int = 0
    bytes_written_total: int = 0
    hottest_tables: tuple[tuple[str, float], ...] = ()
    usage: ProcessUsage | None = None


@dataclass(frozen=True)
class TableStatus:
    """The use of one table, a variable that steps read by rows.

    Args:
        name: its path.
        num_rows: the number of its rows.
        rows_read_per_second: the rows of it that steps read.
        rows_read_total: the rows that steps have read since this process was connected.
        num_bytes: the bytes of its rows, without those of slots.
        rows_made_per_second: the rows that a table without a vocabulary gets; 0 for any other, as
            are all counts below.
        share_of_max_rows: the share of the rows that it may have; None for no limit.
        rows_made_total: the rows that it got since it was made.
        rows_evicted_total: the rows that it gave up since then.
        gradients_dropped_total: the gradients of ids that got no row.
    """

    name: str
    num_rows: int
    rows_read_per_second: float
    rows_read_total: int
    num_bytes: int = 0
    rows_made_per_second: float = 0.0
    share_of_max_rows: float | None = None
    rows_made_total: int = 0
    rows_evicted_total: int = 0
    gradients_dropped_total: int = 0


@dataclass(frozen=True)
class RunStatus:
    """The status of a run: workers, ps, tables and the coordinator; prints as tables.

    `strategy.status()` returns one at any time: before, during and after `fit`, from another thread
    or a callback, after the loss of a ps, and after the cluster was closed.

    ```python
    status = strategy.status()
    print(status)
    slowest = min(worker.steps_per_second for worker in status.workers)
    ```

    Args:
        state: `"idle"`, `"training"`, `"evaluating"`, `"predicting"` or `"closed"`.
        epoch: the number of the running epoch, from 0; None if no epoch runs.
        steps: the training steps of all workers in the running or last `fit`. Those of `evaluate`,
            `predict` and `train_on_batch` are not counted.
        steps_total: the training steps of every `fit` since this process was connected.
        steps_per_second: the rate in the last ten seconds of a running `fit`; the mean of one that
            ended.
        seconds: the time that the steps of the running or last `fit` took.
        workers: the status of each worker; if workers drive their own steps, only of this one.
        ps: the status of each ps.
        tables: the tables of the last `fit`, the most read ones first.
        staleness_mean: the mean staleness of all updates of the last `fit`; None without updates.
        staleness_max: the largest staleness of an update.
        coordinator: the usage of the coordinator's process; None if this process is a worker.
        advice: sentences that tell how to make the run faster; empty if there is no advice.
    """

    state: str
    epoch: int | None
    steps: int
    steps_total: int
    steps_per_second: float
    seconds: float
    workers: tuple[WorkerRunStatus, ...]
    ps: tuple[PSRunStatus, ...]
    tables: tuple[TableStatus, ...]
    staleness_mean: float | None = None
    staleness_max: int | None = None
    coordinator: ProcessUsage | None = None
    advice: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the status as dictionaries, tuples, numbers and texts, which `json` can write."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        tables = [worker_rows(self), ps_rows(self), table_rows(self)]
        parts = [
            "\n".join(summary_lines(self)),
            *(text_table(rows, is_left) for rows in tables if rows),
        ]
        return "\n\n".join(parts)


def described(
    strategy: str, status: RunStatus, jobs: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return a status for JSON, with the description of this process."""
    return {
        "pid": os.getpid(),
        "script": os.path.basename(sys.argv[0]) or "python",
        "strategy": strategy,
        "jobs": dict(jobs),
        "status": status.as_dict(),
    }


def status_of(values: Fields) -> RunStatus:
    """Return the status from the result of `as_dict`, also after a way through JSON.

    It ignores unknown fields, which are those of a later version.
    """
    known = _known(RunStatus, values)
    known["workers"] = tuple(_with_usage(WorkerRunStatus, v) for v in values["workers"])
    known["ps"] = tuple(
        dataclasses.replace(
            _with_usage(PSRunStatus, v),
            hottest_tables=tuple((name, rate) for name, rate in v["hottest_tables"]),
        )
        for v in values["ps"]
    )
    known["tables"] = tuple(TableStatus(**_known(TableStatus, v)) for v in values["tables"])
    known["coordinator"] = _usage(values["coordinator"])
    known["advice"] = tuple(values.get("advice", ()))
    return RunStatus(**known)


def _known(cls: type, values: Fields) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def _with_usage(cls: type, values: Fields) -> Any:
    return cls(**{**_known(cls, values), "usage": _usage(values["usage"])})


def _usage(values: Fields | None) -> ProcessUsage | None:
    return None if values is None else ProcessUsage(**_known(ProcessUsage, values))


def summary_lines(status: RunStatus) -> list[str]:
    """Return lines about the whole run."""
    doing = status.state if status.epoch is None else f"{status.state}, epoch {status.epoch + 1}"
    staleness = (
        ""
        if status.staleness_mean is None
        else f"; staleness {status.staleness_mean:.2f} mean, {status.staleness_max} max"
    )
    lines = [
        f"{doing}: {status.steps:,} steps in {status.seconds:,.1f} s, "
        f"{status.steps_per_second:,.1f} steps/s{staleness}"
    ]
    if status.coordinator is not None:
        cpu, memory = _usage_cells(status.coordinator)
        lines.append(f"coordinator: process {status.coordinator.pid}, CPU {cpu}, memory {memory}")
    return [*lines, *(f"advice: {advice}" for advice in status.advice)]


def worker_rows(status: RunStatus) -> Rows:
    """Return a row for each worker."""
    rows: Rows = [
        (
            *("worker", "state", "steps/s", "steps", "in flight", "waits for"),
            *("lost", "back", "staleness", "CPU", "memory", "address"),
        )
    ]
    for worker in status.workers:
        stale = "-" if worker.staleness_mean is None else f"{worker.staleness_mean:.2f}"
        rows.append(
            (
                str(worker.worker),
                worker.state,
                f"{worker.steps_per_second:,.1f}",
                f"{worker.steps:,}",
                str(worker.executions_in_flight),
                worker.waits_for or "-",
                str(worker.times_lost),
                str(worker.times_back),
                stale,
                *_usage_cells(worker.usage),
                worker.address,
            )
        )
    return rows


def ps_rows(status: RunStatus) -> Rows:
    """Return a row for each ps."""
    rows: Rows = [
        (
            *("ps", "state", "holds", "rows/s out", "MB/s out", "rows/s in", "MB/s in"),
            *("CPU", "memory", "hottest table"),
        )
    ]
    for ps in status.ps:
        hottest = ps.hottest_tables[0] if ps.hottest_tables else None
        rows.append(
            (
                str(ps.ps),
                ps.state,
                num_bytes(ps.num_bytes),
                f"{ps.rows_read_per_second:,.0f}",
                f"{ps.bytes_read_per_second / 1e6:,.2f}",
                f"{ps.rows_written_per_second:,.0f}",
                f"{ps.bytes_written_per_second / 1e6:,.2f}",
                *_usage_cells(ps.usage),
                "-" if hottest is None else f"{_short(hottest[0])} ({hottest[1]:,.0f}/s)",
            )
        )
    return rows


def table_rows(status: RunStatus) -> Rows:
    """Return a row for each of the most read tables; empty without tables."""
    if not status.tables:
        return []
    columns = "table", "rows", "holds", "rows read/s", "rows read in all", "rows made/s"
    rows: Rows = [(*columns, "full", "evicted", "dropped")]
    for table in status.tables[:_MOST_TABLES]:
        rows.append(
            (
                _short(table.name),
                f"{table.num_rows:,}",
                num_bytes(table.num_bytes),
                f"{table.rows_read_per_second:,.0f}",
                f"{table.rows_read_total:,}",
                f"{table.rows_made_per_second:,.0f}",
                "-" if table.share_of_max_rows is None else f"{table.share_of_max_rows:.0%}",
                f"{table.rows_evicted_total:,}",
                f"{table.gradients_dropped_total:,}",
            )
        )
    more = len(status.tables) - _MOST_TABLES
    if more > 0:
        rows.append((f"and {more} more", *[""] * (len(rows[0]) - 1)))
    return rows


def is_left(column: str) -> bool:
    """Return True if a column is text, which is aligned to the left."""
    return column in _LEFT


def _usage_cells(usage: ProcessUsage | None) -> tuple[str, str]:
    if usage is None:
        return "-", "-"
    return f"{usage.cpu:.0%}", num_bytes(usage.memory_bytes)


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else f"…{name[1 - _NAME_LENGTH :]}"
