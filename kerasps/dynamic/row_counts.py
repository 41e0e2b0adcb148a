"""The rows that tables without a vocabulary have, and the word when there is little room left."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable

import keras
import numpy as np

from kerasps.dynamic.key_part import KeyPart
from kerasps.dynamic.keyed_rows import KeyedRows, TableRecord
from kerasps.dynamic.table import KeyedVariable
from kerasps.runtime.on_ps import OnPS, call_on_each

_LOGGER = logging.getLogger("kerasps")

# The share of the rows that a table may have from which on it is nearly full.
NEARLY_FULL = 0.9

# Functions that read the numbers of a part, for as long as it exists.
_READERS: weakref.WeakKeyDictionary[KeyPart, OnPS] = weakref.WeakKeyDictionary()


def known_rows(storage: object) -> Callable[[], int] | None:
    """Return a function that returns the last known number of rows of a table in a part.

    Return None if `storage` is of another kind.
    """
    if not isinstance(storage, KeyedRows):
        return None
    known, device = storage.table.known_rows, storage.device
    return lambda: known.get(device, 0)


def count_rows(variables: Iterable[keras.Variable]) -> None:
    """Ask the ps how many rows the tables without a vocabulary have; warn once of full ones.

    A call of each ps for all tables of one width. Thread: any.
    """
    tables = [
        variable
        for variable in variables
        if isinstance(variable, KeyedVariable) and variable.rows_of_ids is not None
    ]
    parts = list(dict.fromkeys(rows.part for table in tables for rows in table.storage.shards))
    if not parts:
        return
    numbers = dict(zip(parts, call_on_each([_reader(part) for part in parts]), strict=True))
    for table in tables:
        of_parts = np.array(
            [
                rows.part.counted(numbers[rows.part], rows.table.number)
                for rows in table.storage.shards
            ]
        )
        record = table.storage.shards[0].table
        for rows, (count, _) in zip(table.storage.shards, of_parts, strict=True):
            record.known_rows[rows.device] = int(count)
        _warn(record, *of_parts.sum(0))


def _reader(part: KeyPart) -> OnPS:
    if part not in _READERS:
        # It must not keep the part alive, whose end ends its resources.
        known = weakref.ref(part)
        _READERS[part] = OnPS(part.device, lambda: known().all_numbers())  # type: ignore[union-attr]
    return _READERS[part]


def _warn(table: TableRecord, num_rows: int, num_refused: int) -> None:
    if num_refused and not table.told_full:
        table.told_full = table.told_nearly = True
        if table.max_rows is None:
            most = "all that the memory of a ps holds"
        else:
            most = f"of max_rows={table.max_rows:,}, and each ps has an equal share of these"
        _LOGGER.warning(
            f"The table '{table.name}' is full: it has {num_rows:,} rows, {most}. Ids without a "
            f"row have their first row, and their gradients are dropped, {num_refused:,} until "
            "now. Make it with a larger `max_rows`, or with more ps."
        )
    elif (
        table.max_rows is not None
        and num_rows >= NEARLY_FULL * table.max_rows
        and not table.told_nearly
    ):
        table.told_nearly = True
        _LOGGER.warning(
            f"The table '{table.name}' is nearly full: it has {num_rows:,} rows of "
            f"max_rows={table.max_rows:,}. Then ids without a row keep their first row. Make it "
            "with a larger `max_rows`."
        )
