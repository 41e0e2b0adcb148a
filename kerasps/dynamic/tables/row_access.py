"""Reads and writes rows of tables without a vocabulary by their ids, in pieces, from this process.

A piece has up to 16 MiB; this process holds the ids that it is given and a few pieces, and never
the table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import part_of
from kerasps.dynamic.ids.rows_of_ids import check_different
from kerasps.dynamic.parts.figures import norms_of_some
from kerasps.dynamic.parts.key_part import PIECE
from kerasps.dynamic.parts.keyed_rows import KeyedRows, KeyedStorage
from kerasps.dynamic.policies.stamps import stamp
from kerasps.dynamic.policies.terms import AskedKeys, SlotTerms
from kerasps.dynamic.tables.changed import RowChanges
from kerasps.dynamic.tables.table_access import Located, TableAccess, called_range, spanning
from kerasps.errors import InputError
from kerasps.runtime.calls import persist
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.fetching import fetch
from kerasps.runtime.on_ps import OnPS
from kerasps.variables.rows.chunks import CHUNK_BYTES


def pieces_of(num_rows: int, row_bytes: int) -> list[range]:
    """Divide rows into pieces of at most `CHUNK_BYTES`; all but the last have the same size."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    return [range(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


class RowAccess:
    """Reads and writes rows of a table, or of a slot, by their ids. Call outside of steps.

    Writes do nothing in a process whose values are not written (see `NamedVariable.takes_values`).
    Thread: any. Several may read, or write different ids, at the same time.

    Attributes:
        table: the access to the table, which its slots share.
        changes: tells which rows changed.
    """

    def __init__(self, storage: KeyedStorage) -> None:
        # Not the storage itself, which keeps this object alive.
        self._shards: tuple[KeyedRows, ...] = storage.shards
        self._record, self._slot = storage.table, storage.terms
        if self._record.access is None:
            self._record.access = TableAccess(storage)
        self.table: TableAccess = self._record.access
        self.changes = RowChanges(self._shards)

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the rows."""
        return self._shards[0].dtype

    @property
    def width(self) -> int:
        """The number of elements of a row."""
        return int(self._shards[0].shape[1])

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.width * int(self.dtype.size)

    def sorted_ids(self) -> np.ndarray:
        """Return the ids of the table, ascending."""
        return self.table.sorted_ids()

    def remove_unused(self, age: int, *, by_clock: bool) -> int:
        """Remove rows whose last use was longer ago; return how many there were."""
        if not self._takes_values:
            return 0
        return self.table.remove_unused(self._record.terms, age, by_clock=by_clock)

    def items(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over pieces of the ids that there are, and their rows, in no order."""
        batch = min(PIECE, batch)
        for rows in self._shards:
            read = _reader(rows)
            for first in called_range(spanning(rows.part, rows.table.holder), batch):
                ids, values = read.call(first, batch)
                if len(ids):
                    yield ids, values

    def some_norms(self, most: int) -> np.ndarray:
        """Return the norms of rows at up to `most` places of each part, drawn at random."""
        return np.concatenate([sample.call(most)[0] for sample in self._samplers])

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of ids, `[len(ids), width]`; an id without a row has its first one."""
        found = np.empty([len(ids), self.width], self.dtype.as_numpy_dtype)
        for piece in pieces_of(len(ids), self.row_bytes):
            here = found[piece.start : piece.stop]
            located = self._locate(ids[piece.start : piece.stop])

            def read(located: Located = located) -> list[np.ndarray]:
                return fetch(self._start_reading(located))

            for places, values in zip(located.places, persist(read), strict=True):
                here[places] = values
        return found

    def read_on(self, ids: np.ndarray, device: str) -> tf.Tensor:
        """Return the rows of a piece of ids as a tensor on a device; the ps send them there."""
        located = self._locate(ids)
        values = self._start_reading(located)
        with tf.device(device):
            if not values:
                return tf.zeros([0, self.width], self.dtype)
            places = [tf.constant(places, tf.int32) for places in located.places]
            return tf.dynamic_stitch(places, values)

    def write(self, ids: np.ndarray, rows: Any) -> None:
        """Set the rows of different ids; make those that are missing.

        Args:
            rows: an array, or an object that is sliced like one.

        Raises:
            InputError: a ps has no room for them.
        """
        for piece in pieces_of(len(ids), self.row_bytes):
            located = self._locate(ids[piece.start : piece.stop])
            values = np.asarray(rows[piece.start : piece.stop])
            self._write(located, [values[places] for places in located.places])

    def write_from(self, ids: np.ndarray, rows: tf.Tensor, device: str) -> None:
        """Set the rows of a piece of ids to those of a tensor on a device."""
        located = self._locate(ids)
        with tf.device(device):
            parts = [tf.gather(rows, tf.constant(places)) for places in located.places]
        self._write(located, parts)

    def write_within_limit(self, ids: np.ndarray, rows: Any) -> None:
        """Do the same as `write`, within `max_rows`.

        Raises:
            InputError: the table would have more rows than `max_rows`. Nothing is changed.
        """
        check_different(ids)
        most, num_rows = self._record.max_rows, len(ids) + self.table.num_rows()
        if most is not None and num_rows > most:
            starts = range(0, len(ids), PIECE)
            pieces = [self._locate(ids[start : start + PIECE]) for start in starts]
            num_new = sum(self.table.num_without_row(piece) for piece in pieces)
            self._check_room(num_rows - len(ids) + num_new)
        self.write(ids, rows)

    def remove(self, ids: np.ndarray) -> int:
        """Remove the rows of different ids, with their slots; return how many there were."""
        if not self._takes_values:
            return 0
        starts = range(0, len(ids), PIECE)
        return sum(self.table.remove(self._locate(ids[i : i + PIECE])) for i in starts)

    def replace(self, ids: np.ndarray, rows: Any) -> None:
        """Set the rows of different ids, and remove all others. See `finish`.

        Raises:
            InputError: these are more rows than `max_rows`. Nothing is changed.
        """
        self.check(ids, tuple(rows.shape))
        self.write(ids, rows)
        self.finish(ids)

    def check(self, ids: np.ndarray, shape: Sequence[int]) -> None:
        """Raise `InputError` if these ids, with rows of `shape`, cannot be all of the table."""
        if tuple(shape) != (len(ids), self.width):
            raise InputError(
                f"The new rows of the table '{self._record.name}' have another shape. Expected: "
                f"{(len(ids), self.width)}. Received: {tuple(shape)}. Load the rows of a table of "
                "this width."
            )
        check_different(ids)
        self._check_room(len(ids))

    def finish(self, ids: np.ndarray) -> None:
        """Remove the rows of all other ids from the table; in a slot, let them begin anew.

        Call when the rows of `ids` are written. Rows of these ids keep their slots, so tables and
        slots may be loaded in any order.
        """
        if not self._takes_values:
            return
        others = np.setdiff1d(self.sorted_ids(), ids, assume_unique=True)
        if self._slot is not None:
            begins_as = np.full([1, self.width], self._slot.begins_as, self.dtype.as_numpy_dtype)
            for piece in pieces_of(len(others), self.row_bytes):
                self.write(others[piece.start : piece.stop], np.repeat(begins_as, len(piece), 0))
            if self._slot == self._record.usage:
                self.table.set_ticks(self._record.terms)
            return
        self.remove(others)

    def _check_room(self, num_rows: int) -> None:
        most = self._record.max_rows
        if most is not None and num_rows > most:
            raise InputError(
                f"The table '{self._record.name}' has no room for all rows. Expected: at most "
                f"max_rows={most:,} rows. Received: {num_rows:,}. Make the layer with "
                f"max_rows={num_rows} or more."
            )

    @property
    def _takes_values(self) -> bool:
        return bool(self._shards[0].store.holder.takes_values)

    def _locate(self, ids: np.ndarray) -> Located:
        with tf.device(COORDINATOR_CPU):
            keys = self._record.keys(tf.constant(ids, tf.int64))
            keys, part = fetch([keys, part_of(keys, len(self._shards))])
        places = [np.flatnonzero(part == number) for number in range(len(self._shards))]
        parts = [number for number, here in enumerate(places) if len(here)]
        return Located(parts, [places[part] for part in parts], [keys[places[p]] for p in parts])

    def _start_reading(self, located: Located) -> list[tf.Tensor]:
        return [
            self._finders[part].start(keys)[0]
            for part, keys in zip(located.parts, located.keys, strict=True)
        ]

    def _write(self, located: Located, values: Sequence[Any]) -> None:
        if not self._takes_values:
            return
        places = _made(self, located)

        def write() -> list[np.ndarray]:
            return fetch(
                [
                    self._writers[part].start(here, rows)[0]
                    for part, here, rows in zip(located.parts, places, values, strict=True)
                ]
            )

        persist(write)  # rows that are written twice are the same

    @functools.cached_property
    def _samplers(self) -> list[OnPS]:
        return [_sampler(rows) for rows in self._shards]

    @functools.cached_property
    def _finders(self) -> list[OnPS]:
        return [_finder(rows, self._slot) for rows in self._shards]

    @functools.cached_property
    def _writers(self) -> list[OnPS]:
        return [_writer(rows) for rows in self._shards]


def access_to(storage: KeyedStorage) -> RowAccess:
    """Return the access to a storage, which keeps the functions that were traced for it."""
    access: RowAccess | None = storage.access
    if access is None:
        access = storage.access = RowAccess(storage)
    return access


def make_rows(access: RowAccess, ids: np.ndarray) -> None:
    """Make the rows of different ids that have none, as their first rows.

    Raises:
        InputError: a ps has no room for them.
    """
    if access._takes_values:
        for start in range(0, len(ids), PIECE):
            _made(access, access._locate(ids[start : start + PIECE]))


def _made(access: RowAccess, located: Located) -> list[np.ndarray]:
    """Return the places of rows in each part; make those that are missing.

    Raises:
        InputError: a ps has no room for them.
    """
    places = access.table.make(access._record.terms, located)
    for part, here in zip(located.parts, places, strict=True):
        num_missing = int(np.sum(here == 0))
        # Candidates without room replace others or none.
        if num_missing and access._record.counts_for is None:
            shard = access._shards[part]
            raise InputError(
                f"A ps has no room for all rows of the table '{access._record.name}'. Expected: "
                f"room on {shard.device}, where this and other tables of its width have up to "
                f"{shard.part.capacity:,} rows. Received: {num_missing:,} rows more. Use more "
                "ps, or ps with more memory."
            )
    return places


def _reader(rows: KeyedRows) -> OnPS:
    """Return a function from a range of places to the ids and rows of a table there."""

    def read(first: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
        places, ids = rows.part.piece(rows.table.holder, first, count)
        return [ids, rows.store.gather(places)]

    spec = tf.TensorSpec([], tf.int64)
    return OnPS(rows.device, read, spec, spec)


def _sampler(rows: KeyedRows) -> OnPS:
    """Return a function that returns norms of some rows."""
    norms = functools.partial(norms_of_some, rows.part, rows.table.holder, rows.store)
    return OnPS(rows.device, norms, tf.TensorSpec([], tf.int64))


def _finder(rows: KeyedRows, slot: SlotTerms | None) -> OnPS:
    """Return a function from keys to their rows."""

    def find(keys: tf.Tensor) -> tf.Tensor:
        if slot is not None:
            return rows.part.look_up_slot(rows.table.number, slot, keys)
        return rows.look_up([rows], AskedKeys(keys))[0]

    return OnPS(rows.device, find, tf.TensorSpec([None], tf.int64))


def _writer(rows: KeyedRows) -> OnPS:
    """Return a function that writes rows at their places."""

    def write(places: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        rows.store.scatter(places, values)
        stamp(rows.part, places)
        return tf.size(places)

    return OnPS(
        rows.device,
        write,
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([None, *rows.shape[1:]], rows.dtype),
        mutex=rows.pool.mutex(rows.device),
    )
