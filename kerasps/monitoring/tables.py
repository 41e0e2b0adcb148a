"""Formats a status as rows of text, for plain text and for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kerasps.words import num_bytes

if TYPE_CHECKING:
    from kerasps.monitoring.status import ProcessUsage, RunStatus

# Rows of cells; the first row names the columns.
Rows = list[tuple[str, ...]]

# A longer name would push the numbers out of a terminal's width.
_NAME_LENGTH = 40
_MOST_TABLES = 5
_LEFT = {"state", "waits for", "address", "table", "hottest table"}


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
    rows: Rows = [("table", "rows", "rows read/s", "rows read in all")]
    for table in status.tables[:_MOST_TABLES]:
        numbers = table.num_rows, table.rows_read_per_second, table.rows_read_total
        rows.append((_short(table.name), *(f"{number:,.0f}" for number in numbers)))
    more = len(status.tables) - _MOST_TABLES
    if more > 0:
        rows.append((f"and {more} more", "", "", ""))
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
