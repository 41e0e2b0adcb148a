"""The rows of a table that changed since a version, as its layer tells them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from kerasps.dynamic.parts.keyed_rows import KeyedRows
from kerasps.dynamic.policies.stamps import (
    MOST_REMOVED,
    PLACES,
    ask,
    changed_places,
    removed_between,
    rows_at,
)
from kerasps.dynamic.tables.table_access import called_range, spanning
from kerasps.errors import InputError
from kerasps.runtime.calls import separate_executor
from kerasps.runtime.on_ps import OnPS

# The bytes of the rows that a ps reads under its lock: a millisecond or less.
_LOCKED_BYTES = 4 << 20


class ChangedRows(NamedTuple):
    """The rows of a table that changed since a version.

    Attributes:
        version: what to pass as `version` to hear of later changes: a tuple of numbers.
        is_whole: True if the pieces are all rows of the table. Rows from earlier answers are to be
            forgotten.
        removed: int64, different ids that have no row now. Empty if `is_whole`.
        pieces: an iterator over pieces `(ids, rows)`: int64 of shape `[n]`, and the rows as they
            are when the piece is read, of shape `[n, output_dim]`. It can be used once.
    """

    version: tuple[int, ...]
    is_whole: bool
    removed: np.ndarray
    pieces: Iterator[tuple[np.ndarray, np.ndarray]]


class _Known(NamedTuple):
    """The version of a part.

    Attributes:
        born: when the part was made, as a number.
        version: its number; 0 for that before all.
        removed: how many rows were removed before it.
    """

    born: int
    version: int
    removed: int


class RowChanges:
    """Tells the rows of a table that changed. Its functions are traced once. Thread: any."""

    def __init__(self, shards: Sequence[KeyedRows]) -> None:
        self._shards = shards
        self._number = shards[0].table.number

    def since(self, version: object, batch: int) -> ChangedRows:
        """Return the rows that changed since a version; see `ChangedRows`.

        Raises:
            InputError: it is no version.
        """
        known = self._known(checked_version(version))
        now = self._ask()
        removed: list[np.ndarray] | None = None
        if known is not None and [k.born for k in known] == [n.born for n in now]:
            removed = self._removed(known, now)
        if removed is None:
            versions = [0] * len(self._shards)
        else:
            versions = [of_part.version for of_part in known or ()]
        return ChangedRows(
            (self._number, *(number for of_part in now for number in of_part)),
            removed is None,
            np.unique(np.concatenate([np.zeros(0, np.int64), *(removed or [])])),
            self._pieces(versions, batch),
        )

    def _known(self, numbers: tuple[int, ...]) -> list[_Known] | None:
        if len(numbers) != 1 + 3 * len(self._shards) or numbers[0] != self._number:
            return None
        return [_Known(*numbers[i : i + 3]) for i in range(1, len(numbers), 3)]

    def _ask(self) -> list[_Known]:
        with separate_executor():
            # A version more than needed does no harm, so it may run twice.
            return [_Known(*(int(n) for n in each.call())) for each in self._questions]

    def _removed(self, known: Sequence[_Known], now: Sequence[_Known]) -> list[np.ndarray] | None:
        """Return the ids that each part removed; None if one does not know all of them."""
        found = []
        for read, before, after in zip(self._removals, known, now, strict=True):
            if before.version > after.version or before.removed > after.removed:
                return None
            if after.removed == before.removed:
                continue
            with separate_executor():
                ids, last = read.call(before.removed, after.removed)
            if int(last) - before.removed > MOST_REMOVED:
                return None
            found.append(ids)
        return found

    def _pieces(
        self, versions: Sequence[int], batch: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rows = self._shards[0]
        row_bytes = int(rows.shape[1]) * int(rows.dtype.size)
        batch = max(1, min(batch, _LOCKED_BYTES // row_bytes))
        for (span, find, read), since in zip(self._readers, versions, strict=True):
            with separate_executor():
                starts = called_range(span, PLACES)
            for start in starts:
                with separate_executor():
                    (places,) = find.call(since, start, PLACES)
                for first in range(0, len(places), batch):
                    with separate_executor():
                        ids, values = read.call(places[first : first + batch])
                    if len(ids):
                        yield ids, values

    @functools.cached_property
    def _questions(self) -> list[OnPS]:
        return [
            OnPS(r.device, functools.partial(ask, r.part), mutex=r.pool.mutex(r.device))
            for r in self._shards
        ]

    @functools.cached_property
    def _removals(self) -> list[OnPS]:
        number = tf.TensorSpec([], tf.int64)
        return [
            OnPS(
                r.device,
                functools.partial(removed_between, r.part, r.table.holder),
                *(number, number),
            )
            for r in self._shards
        ]

    @functools.cached_property
    def _readers(self) -> list[tuple[OnPS, OnPS, OnPS]]:
        return [_readers(rows) for rows in self._shards]


def _readers(rows: KeyedRows) -> tuple[OnPS, OnPS, OnPS]:
    """Return functions that span a part, find the places that changed, and read their rows."""
    part, holder, number = rows.part, rows.table.holder, tf.TensorSpec([], tf.int64)
    find = functools.partial(changed_places, part, holder)
    read = functools.partial(rows_at, part, holder, rows.store)
    return (
        spanning(part, holder),
        OnPS(rows.device, find, number, number, number),
        OnPS(
            rows.device,
            read,
            tf.TensorSpec([None], tf.int64),
            mutex=rows.pool.mutex(rows.device),
        ),
    )


def version_in(version: tuple[int, ...], part: int) -> int:
    """Return the number of a version in one part; 0 if there is no version."""
    return version[2 + 3 * part] if version else 0


def checked_version(version: object) -> tuple[int, ...]:
    """Return a version; an empty one for None.

    Raises:
        InputError: it is no version.
    """
    if version is None:
        return ()
    try:
        return tuple(int(number) for number in cast(Sequence[Any], version))
    except (TypeError, ValueError):
        raise InputError(
            "Argument `version` of `changed_since` cannot be used. Expected: None, or the "
            f"`version` of an earlier answer. Received: {version!r}. Keep the version that "
            "`changed_since()` returns."
        ) from None
