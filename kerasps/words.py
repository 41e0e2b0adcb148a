"""Formats numbers and tables for reports on a training, and prints lines about it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar, overload

_Record = TypeVar("_Record")

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def num_bytes(number: float | None) -> str:
    """Return bytes in the smallest unit of 1000 that keeps the number below 1000; "?" for None."""
    if number is None:
        return "?"
    value, unit = float(number), 0
    while float(f"{value:.3g}") >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{value:,.0f} {_UNITS[0]}"
    return f"{value:,.0f} {_UNITS[unit]}" if value >= 1000 else f"{value:.3g} {_UNITS[unit]}"


def count(number: float | None) -> str:
    """Return a number with separators, below 100 with one decimal; "?" for None."""
    if number is None:
        return "?"
    is_whole = number >= 100 or float(number).is_integer()
    return f"{number:,.0f}" if is_whole else f"{number:,.1f}"


def times(number: int, what: str) -> str:
    """Return a number and a noun, with an "s" unless the number is 1."""
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def say(line: str) -> None:
    """Print a line on stderr.

    A line that cannot be written is dropped: a full disk behind stderr must not end a run.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(line, file=sys.stderr, flush=True)


def text_table(
    rows: Sequence[Sequence[str]], is_left: Callable[[str], bool] = lambda name: False
) -> str:
    """Return rows of text as an aligned table."""
    *columns, last = zip(*rows, strict=True)
    cells = []
    for column in columns:
        width = max(map(len, column))
        left = is_left(column[0])
        cells.append([cell.ljust(width) if left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*cells, last, strict=True))


class Records(Sequence[_Record]):
    """The records of a report, in order."""

    def __init__(self, records: Sequence[_Record]) -> None:
        self._records = tuple(records)

    @overload
    def __getitem__(self, index: int) -> _Record: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[_Record]: ...

    def __getitem__(self, index: int | slice) -> _Record | Sequence[_Record]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)
