"""Draws a status by `rich`: tables for the workers, the ps and the tables of the model."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasps.tools.monitoring.status import (
    Fields,
    Rows,
    RunStatus,
    is_left,
    ps_rows,
    status_of,
    summary_lines,
    table_rows,
    worker_rows,
)

# Between two columns.
_PADDING = 2
# The columns that name a row and its state: they are always shown.
_FEWEST = 3

_GOOD, _BAD, _BETWEEN = "green", "bold red", "yellow"
_STYLES = {
    "connected": _GOOD,
    "lost": _BAD,
    "hangs": _BAD,
    "leaving": _BETWEEN,
    "left": _BETWEEN,
    "joining": _BETWEEN,
    "closed": "dim",
}


def view(reply: Fields, width: int) -> RenderableType:
    """Return the view of a reply."""
    status = status_of(reply["status"])
    head = Text(f"{reply.get('script', '')} (process {reply.get('pid', '?')})  ", style="bold")
    head.append(str(reply.get("strategy", "")), style="dim")
    first, *others = summary_lines(status)
    lines: list[RenderableType] = [
        head,
        Text(first, style=_style_of_run(status)),
        *(Text(line) for line in others),
    ]
    tables = [worker_rows(status), ps_rows(status), table_rows(status)]
    for rows in tables:
        if rows:
            lines += [Text(), _table(_fitting(rows, width))]
    return Group(*lines)


def _style_of_run(status: RunStatus) -> str:
    states = [worker.state for worker in status.workers] + [ps.state for ps in status.ps]
    return _BAD if any(_STYLES.get(state) == _BAD for state in states) else "cyan"


def _fitting(rows: Rows, width: int) -> Rows:
    """Return the first columns of a table that fit."""
    widths = [max(len(row[column]) for row in rows) + _PADDING for column in range(len(rows[0]))]
    num_columns = len(widths)
    while num_columns > _FEWEST and sum(widths[:num_columns]) > width:
        num_columns -= 1
    return [row[:num_columns] for row in rows]


def _table(rows: Rows) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    columns, *others = rows
    for name in columns:
        justify: Any = "left" if is_left(name) else "right"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in others:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table
