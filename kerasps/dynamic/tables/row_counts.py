"""The rows that tables without a vocabulary have, and the word when there is little room left."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from kerasps.dynamic.parts.figures import all_figures
from kerasps.dynamic.parts.key_part import KeyPart
from kerasps.dynamic.parts.keyed_rows import KeyedRows, TableRecord
from kerasps.dynamic.parts.terms import Field
from kerasps.dynamic.tables.table import KeyedVariable, has_rows
from kerasps.runtime.on_ps import OnPS, call_on_each

_LOGGER = logging.getLogger("kerasps")

# The share of the rows that a table may have from which on it is nearly full.
NEARLY_FULL = 0.9

# Their sum is the number of rows that were made, but for those that were removed by hand.
_MADE = (Field.ROWS, Field.EVICTED)
# Functions that read the numbers of a part, for as long as it exists.
_READERS: weakref.WeakKeyDictionary[KeyPart, OnPS] = weakref.WeakKeyDictionary()
# The parts with rows of the tables that steps use.
_IN_USE: weakref.WeakKeyDictionary[TableRecord, list[KeyPart]] = weakref.WeakKeyDictionary()


class GrowingRows:
    """The rows of a table in a part, when they were last counted."""

    def __init__(self, rows: KeyedRows) -> None:
        # Not the table, which ends with its variable.
        self._known, self._made = rows.table.known_rows, rows.table.made_per_second
        self._device = rows.device

    @property
    def number(self) -> int:
        """Their number; 0 if they were never counted."""
        return self._known.get(self._device, 0)

    @property
    def made_per_second(self) -> float:
        """The rows that were made in a second, between the last two counts."""
        return self._made.get(self._device, 0.0)


def growing_rows(storage: object) -> GrowingRows | None:
    """Return the rows of a table in a part, which are counted from now on; None for others."""
    if not isinstance(storage, KeyedRows):
        return None
    parts = _IN_USE.setdefault(storage.table, [])
    if storage.part not in parts:
        parts.append(storage.part)
    return GrowingRows(storage)


def count_again() -> None:
    """Count the rows of all tables that steps use. Thread: any."""
    _count(dict(_IN_USE))


def count_rows(variables: Iterable[keras.Variable]) -> None:
    """Ask the ps how many rows the tables without a vocabulary have; warn once of full ones.

    A call of each ps for all tables of one width. Thread: any.
    """
    _count(
        {
            variable.storage.table: [rows.part for rows in variable.storage.shards]
            for variable in variables
            if isinstance(variable, KeyedVariable) and has_rows(variable)
        }
    )


def _count(tables: Mapping[TableRecord, Sequence[KeyPart]]) -> None:
    parts = list(dict.fromkeys(part for of_table in tables.values() for part in of_table))
    if not parts:
        return
    most = max(table.number for table in tables) + 1
    figures = dict(zip(parts, call_on_each([_reader(part) for part in parts], most), strict=True))
    now = time.monotonic()
    for table, of_table in tables.items():
        of_parts = np.array([figures[part][table.number] for part in of_table])
        seconds = now - table.counted_at
        for part, fields in zip(of_table, of_parts.tolist(), strict=True):
            # As many as there are more, and those for which others were given up.
            made = sum(fields[i] for i in _MADE) - table.known_made.get(part.device, 0)
            if table.counted_at:
                table.made_per_second[part.device] = max(0, made) / max(seconds, 1e-3)
            table.known_rows[part.device] = fields[Field.ROWS]
            table.known_made[part.device] = sum(fields[i] for i in _MADE)
        table.counted_at = now
        of_all = of_parts.sum(0)
        _warn(table, of_all[Field.ROWS], of_all[Field.REFUSED])


def _reader(part: KeyPart) -> OnPS:
    if part not in _READERS:
        # It must not keep the part alive, whose end ends its resources.
        known = weakref.ref(part)
        _READERS[part] = OnPS(
            part.device,
            lambda num_tables: all_figures(known(), num_tables),  # type: ignore[arg-type]
            tf.TensorSpec([], tf.int32),
        )
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
        and table.rows_of_ids.eviction is None
        and num_rows >= NEARLY_FULL * table.max_rows
        and not table.told_nearly
    ):
        table.told_nearly = True
        _LOGGER.warning(
            f"The table '{table.name}' is nearly full: it has {num_rows:,} rows of "
            f"max_rows={table.max_rows:,}. Then ids without a row keep their first row. Make it "
            "with a larger `max_rows`."
        )
