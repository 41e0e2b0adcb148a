"""Reads and writes tables without a vocabulary as files have them, in pieces, from this process.

In every file a table is its `ids`, int64 and ascending, and its `rows` in their order. A slot of an
optimizer is the same, with the ids of its table. So a file does not depend on the number of ps. A
piece has up to 16 MiB; this process holds the ids and a few pieces, and never the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from kerasps import _compat
from kerasps.dynamic.key_part import AskedKeys, SlotTerms, TableTerms
from kerasps.dynamic.keyed_rows import KeyedRows, KeyedStorage
from kerasps.dynamic.keys import part_of
from kerasps.errors import InputError, UnsupportedError
from kerasps.runtime.calls import persist
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.fetching import fetch
from kerasps.runtime.on_ps import OnPS
from kerasps.variables.rows.chunks import CHUNK_BYTES
from kerasps.variables.storage.kinds import MOST_ROWS

# The places that a ps looks through in one call.
PLACES = 1 << 18
# More in a list of `get_weights` would surprise: other variables are as large as users made them.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, eq=False, repr=False)
class RowsById:
    """The value of a table without a vocabulary, or of a slot: rows, and the ids they belong to.

    `model.get_weights()` returns one where another variable has an array, and
    `model.set_weights()` takes it. As a new value it replaces all rows of the table.

    Attributes:
        ids: different int64 ids.
        rows: an array of shape `[len(ids), width]`, or an object that is sliced like one.
    """

    ids: np.ndarray
    rows: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the variable, which has no number of rows that stays."""
        return (MOST_ROWS, *self.rows.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the rows."""
        return np.dtype(self.rows.dtype)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<RowsById rows={len(self.ids):,} width={self.rows.shape[1]} dtype={self.dtype}>"


class TableRows:
    """The rows of some ids of a table, as an array that is read in pieces.

    Args:
        find_rows: returns the rows of ids.
        ids: the ids, in the order of the rows.
    """

    def __init__(self, find_rows: Callable[[np.ndarray], np.ndarray], ids: np.ndarray) -> None:
        self._find_rows, self._ids = find_rows, ids
        empty = find_rows(ids[:0])
        self.dtype = empty.dtype
        self.shape = (len(ids), *empty.shape[1:])

    def __len__(self) -> int:
        return len(self._ids)

    def pieces(self) -> Iterator[tuple[range, np.ndarray]]:
        """Iterate over pieces: their places in the array, and the rows."""
        for places in pieces_of(len(self), self.shape[1] * self.dtype.itemsize):
            yield places, self._find_rows(self._ids[places.start : places.stop])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy  # rows that are read are a copy
        return np.asarray(self._find_rows(self._ids), dtype)


def save_table(store: Any, table: Any, *, ids_name: str = "ids", rows_name: str = "rows") -> None:
    """Write a table, or a slot, into two entries of Keras's weights file.

    Args:
        store: what Keras passes to `save_own_variables`.
        table: has the methods `sorted_ids` and `find_rows`.
    """
    ids = table.sorted_ids()
    store[ids_name] = ids
    store[rows_name] = TableRows(table.find_rows, ids)


def pieces_of(num_rows: int, row_bytes: int) -> list[range]:
    """Divide rows into pieces of at most `CHUNK_BYTES`; all but the last have the same size."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    return [range(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


class RowAccess:
    """Reads and writes rows of a table, or of a slot, by their ids. Call outside of steps.

    Thread: any. Several may read, or write different ids, at the same time.
    """

    def __init__(self, storage: KeyedStorage) -> None:
        # Not the storage itself, which keeps this object alive.
        self._shards: tuple[KeyedRows, ...] = storage.shards
        self._table, self._slot = storage.table, storage.terms
        self._writers: tuple[TableTerms, list[OnPS]] | None = None

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
        found = [np.zeros(0, np.int64)]
        for rows, read in zip(self._shards, self._id_readers, strict=True):
            (top,) = OnPS(rows.device, rows.part.top).call()
            found += [read.call(first, PLACES)[0] for first in range(1, int(top), PLACES)]
        return np.sort(np.concatenate(found))

    def items(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over pieces of the ids that there are, and their rows, in no order."""
        batch = min(PLACES, batch)
        for rows in self._shards:
            read = _reader_of_places(rows)
            (top,) = OnPS(rows.device, rows.part.top).call()
            for first in range(1, int(top), batch):
                ids, values = read.call(first, batch)
                if len(ids):
                    yield ids, values

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of ids, `[len(ids), width]`; an id without a row has its first one."""
        found = np.empty([len(ids), self.width], self.dtype.as_numpy_dtype)
        for piece in pieces_of(len(ids), self.row_bytes):
            here = found[piece.start : piece.stop]
            located = self._locate(ids[piece.start : piece.stop])

            def read(located: _Located = located) -> list[np.ndarray]:
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
            parts = [values[places] for places in located.places]
            self._write(located, parts)

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
        _check_different(ids)
        if self._table.max_rows is not None:
            self._check_room(len(np.union1d(self.sorted_ids(), ids)))
        self.write(ids, rows)

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
                f"The new rows of the table '{self._table.name}' have another shape. Expected: "
                f"{(len(ids), self.width)}. Received: {tuple(shape)}. Load the rows of a table of "
                "this width."
            )
        _check_different(ids)
        self._check_room(len(ids))

    def finish(self, ids: np.ndarray) -> None:
        """Remove the rows of all other ids from the table; in a slot, let them begin anew.

        Call when the rows of `ids` are written. Rows of these ids keep their slots, so tables and
        slots may be loaded in any order.
        """
        others = np.setdiff1d(self.sorted_ids(), ids, assume_unique=True)
        if self._slot is not None:
            begins_as = np.full([1, self.width], self._slot.begins_as, self.dtype.as_numpy_dtype)
            for piece in pieces_of(len(others), self.row_bytes):
                self.write(others[piece.start : piece.stop], np.repeat(begins_as, len(piece), 0))
            return
        for start in range(0, len(others), PLACES):
            located = self._locate(others[start : start + PLACES])
            for part, keys in zip(located.parts, located.keys, strict=True):
                self._removers[part].call(keys)

    def _check_room(self, num_rows: int) -> None:
        most = self._table.max_rows
        if most is not None and num_rows > most:
            raise InputError(
                f"The table '{self._table.name}' has no room for all rows. Expected: at most "
                f"max_rows={most:,} rows. Received: {num_rows:,}. Make the layer with "
                f"max_rows={num_rows} or more."
            )

    def _locate(self, ids: np.ndarray) -> _Located:
        with tf.device(COORDINATOR_CPU):
            keys = self._table.keys(tf.constant(ids, tf.int64))
            keys, part = fetch([keys, part_of(keys, len(self._shards))])
        places = [np.flatnonzero(part == number) for number in range(len(self._shards))]
        parts = [number for number, here in enumerate(places) if len(here)]
        return _Located(parts, [places[part] for part in parts], [keys[places[p]] for p in parts])

    def _start_reading(self, located: _Located) -> list[tf.Tensor]:
        return [
            self._finders[part].start(keys)[0]
            for part, keys in zip(located.parts, located.keys, strict=True)
        ]

    def _write(self, located: _Located, values: Sequence[Any]) -> None:
        writers = self._current_writers()

        def write() -> list[np.ndarray]:
            return fetch(
                [
                    writers[part].start(keys, rows)[0]
                    for part, keys, rows in zip(located.parts, located.keys, values, strict=True)
                ]
            )

        # Rows that are written twice are the same.
        written = persist(write)
        for part, keys, number in zip(located.parts, located.keys, written, strict=True):
            if number < len(keys):
                shard = self._shards[part]
                raise InputError(
                    f"A ps has no room for all rows of the table '{self._table.name}'. Expected: "
                    f"room on {shard.device}, where this and other tables of its width have up to "
                    f"{shard.part.capacity:,} rows. Received: {len(keys) - number:,} rows more. "
                    "Use more ps, or ps with more memory."
                )

    @functools.cached_property
    def _id_readers(self) -> list[OnPS]:
        return [_reader_of_ids(rows) for rows in self._shards]

    @functools.cached_property
    def _finders(self) -> list[OnPS]:
        return [_finder(rows, self._slot) for rows in self._shards]

    @functools.cached_property
    def _removers(self) -> list[OnPS]:
        return [_remover(rows) for rows in self._shards]

    def _current_writers(self) -> list[OnPS]:
        # A file may have rows that are spread less evenly than `max_rows` is.
        terms = replace(self._table.terms, max_rows=None)
        if self._writers is None or self._writers[0] != terms:
            self._writers = terms, [_writer(rows, terms) for rows in self._shards]
        return self._writers[1]


@dataclass(frozen=True)
class _Located:
    """The parts that have some ids.

    Attributes:
        parts: the numbers of these parts.
        places: for each, the places of its ids among those given.
        keys: for each, the keys of its ids.
    """

    parts: list[int]
    places: list[np.ndarray]
    keys: list[np.ndarray]


def access_to(storage: KeyedStorage) -> RowAccess:
    """Return the access to a storage, which keeps the functions that were traced for it."""
    if storage.access is None:
        storage.access = RowAccess(storage)
    return storage.access


def value_of(access: RowAccess, name: str) -> RowsById:
    """Return the value of a table, or of a slot.

    Raises:
        UnsupportedError: it is larger than 1 GiB.
    """
    ids = access.sorted_ids()
    num_bytes = len(ids) * (8 + access.row_bytes)
    if num_bytes > _MOST_BYTES:
        raise UnsupportedError(
            f"The value of '{name}', a table without a vocabulary, is too large for this process. "
            f"Expected: at most {_MOST_BYTES >> 30} GiB for `get_weights`. Received: {len(ids):,} "
            f"rows, {num_bytes / 2**30:.1f} GiB. Save the model into a file, which is written in "
            "pieces, or read pieces with the layer's `items()`."
        )
    return RowsById(ids, access.read(ids))


class TableValue(_compat.base_class("CheckpointCallable")):  # type: ignore[misc]
    """The ids, or the rows, of a table or of a slot in a checkpoint.

    The writer of checkpoints recognises this class and writes it in pieces.

    Args:
        storage: the table, or the slot.
        is_ids: whether it is the ids.
    """

    def __init__(self, storage: KeyedStorage, *, is_ids: bool) -> None:
        dtype = tf.int64 if is_ids else storage.dtype
        super().__init__(storage.read_value, dtype, storage.device)
        self.storage, self.is_ids = storage, is_ids


# The names of the two values of a table in a checkpoint.
IDS, ROWS = "IDS", "ROWS"


def values_for_checkpoint(storage: KeyedStorage) -> dict[str, TableValue]:
    """Return what a checkpoint has of a table, or of a slot, by its name there."""
    return {IDS: TableValue(storage, is_ids=True), ROWS: TableValue(storage, is_ids=False)}


def _check_different(ids: np.ndarray) -> None:
    if (ids[1:] > ids[:-1]).all():
        return
    num_different = len(np.unique(ids))
    if num_different < len(ids):
        raise InputError(
            "An id has more than one row. Expected: each id once. Received: "
            f"{len(ids):,} ids, {num_different:,} of them different. Leave out the repeated ids."
        )


def _reader_of_ids(rows: KeyedRows) -> OnPS:
    """Return a function from a range of places to the ids of a table there."""

    def read(first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        return rows.part.piece(rows.table.number, first, count)[1]

    spec = tf.TensorSpec([], tf.int64)
    return OnPS(rows.device, read, spec, spec)


def _reader_of_places(rows: KeyedRows) -> OnPS:
    """Return a function from a range of places to the ids and rows of a table there."""

    def read(first: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
        places, ids = rows.part.piece(rows.table.number, first, count)
        return [ids, rows.store.gather(places)]

    spec = tf.TensorSpec([], tf.int64)
    return OnPS(rows.device, read, spec, spec)


def _finder(rows: KeyedRows, slot: SlotTerms | None) -> OnPS:
    """Return a function from keys to their rows."""

    def find(keys: tf.Tensor) -> tf.Tensor:
        if slot is not None:
            return rows.part.look_up_slot(rows.table.number, slot, keys)
        return rows.look_up([rows], AskedKeys(keys, tf.reshape(tf.size(keys), [1])))

    return OnPS(rows.device, find, tf.TensorSpec([None], tf.int64))


def _writer(rows: KeyedRows, terms: TableTerms) -> OnPS:
    """Return a function that writes rows by their keys, and returns how many it has written."""

    def write(keys: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        places = rows.part.made([terms], AskedKeys(keys, tf.reshape(tf.size(keys), [1])))
        has_place = tf.where(places > 0)[:, 0]
        rows.store.scatter(tf.gather(places, has_place), tf.gather(values, has_place))
        return tf.size(has_place)

    return OnPS(
        rows.device,
        write,
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([None, *rows.shape[1:]], rows.dtype),
        mutex=rows.pool.mutex(rows.device),
    )


def _remover(rows: KeyedRows) -> OnPS:
    """Return a function that removes the rows of keys."""

    def remove(keys: tf.Tensor) -> tf.Tensor:
        return rows.part.remove_keys(rows.table.number, keys)

    return OnPS(
        rows.device,
        remove,
        tf.TensorSpec([None], tf.int64),
        mutex=rows.pool.mutex(rows.device),
    )
