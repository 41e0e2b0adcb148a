"""The values of a checkpoint: rows that the ps hold, which they write and read in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import tensorflow as tf

from kerasps.dynamic.tables.row_access import access_to, pieces_of
from kerasps.dynamic.tables.row_files import IDS, ROWS, TableValue
from kerasps.variables.rows.chunks import chunks_of, read_rows, row_bytes, write_rows
from kerasps.variables.rows.sharding import ShardedStorage, WholeValue


class Stored(Protocol):
    """A tensor of rows that are on several ps."""

    shape: tf.TensorShape  # its shape in a checkpoint
    dtype: tf.DType  # its dtype there
    devices: list[str]  # the devices of the ps

    def chunks(self) -> list[range]:
        """Divide the rows into chunks."""

    def read(self, rows: range, device: str) -> tf.Tensor:
        """Return a chunk, on a device."""

    def write(self, rows: range, value: tf.Tensor, device: str) -> None:
        """Set a chunk to a value that is on a device."""

    def finish(self) -> None:
        """Complete the value when all chunks are written."""


class FixedRows:
    """The value of a sharded variable (see `Stored`)."""

    def __init__(self, storage: ShardedStorage) -> None:
        self._storage = storage
        self.shape, self.dtype = storage.shape, storage.dtype
        self.devices = [str(shard.device) for shard in storage.shards]

    def chunks(self) -> list[range]:
        return chunks_of(self._storage)

    def read(self, rows: range, device: str) -> tf.Tensor:
        return read_rows(self._storage, rows, device)

    def write(self, rows: range, value: tf.Tensor, device: str) -> None:
        write_rows(self._storage, rows, value, device)

    def finish(self) -> None:
        """Do nothing."""


class TableIds:
    """The ids of a table without a vocabulary (see `Stored`). They are written with the rows."""

    def __init__(self, value: TableValue, ids: np.ndarray) -> None:
        self._ids = ids
        self.shape, self.dtype = tf.TensorShape([len(ids)]), tf.int64
        self.devices = [str(shard.device) for shard in value.storage.shards]

    def chunks(self) -> list[range]:
        return pieces_of(len(self._ids), row_bytes(self)) or [range(0)]

    def read(self, rows: range, device: str) -> tf.Tensor:
        with tf.device(device):
            return tf.constant(self._ids[rows.start : rows.stop])

    def write(self, rows: range, value: tf.Tensor, device: str) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Do nothing."""


class TableRowsById:
    """The rows of a table without a vocabulary, or of a slot, by ascending ids (see `Stored`)."""

    def __init__(self, value: TableValue, ids: np.ndarray) -> None:
        self._ids, self._access = ids, access_to(value.storage)
        self.shape = tf.TensorShape([len(ids), self._access.width])
        self.dtype = self._access.dtype
        self.devices = [str(shard.device) for shard in value.storage.shards]

    def chunks(self) -> list[range]:
        return pieces_of(len(self._ids), row_bytes(self)) or [range(0)]

    def read(self, rows: range, device: str) -> tf.Tensor:
        return self._access.read_on(self._ids[rows.start : rows.stop], device)

    def write(self, rows: range, value: tf.Tensor, device: str) -> None:
        self._access.write_from(self._ids[rows.start : rows.stop], value, device)

    def finish(self) -> None:
        """Remove the rows of all other ids."""
        self._access.finish(self._ids)


def stored_now(values: Mapping[str, WholeValue | TableValue]) -> dict[str, Stored]:
    """Return, by their keys, values to write into a checkpoint."""
    # The ids of a table are those of its slots.
    ids: dict[int, np.ndarray] = {}
    found: dict[str, Stored] = {}
    for key, value in values.items():
        if isinstance(value, WholeValue):
            found[key] = FixedRows(value.storage)
            continue
        table = id(value.storage.table)
        if table not in ids:
            ids[table] = access_to(value.storage).sorted_ids()
        found[key] = (TableIds if value.is_ids else TableRowsById)(value, ids[table])
    return found


def stored_in_checkpoint(value: WholeValue | TableValue, ids: np.ndarray | None) -> Stored:
    """Return the value of a variable, to read from a checkpoint.

    Args:
        ids: for a table, its ids in the checkpoint.

    Raises InputError if the table has no room for so many rows.
    """
    if isinstance(value, WholeValue) or ids is None:
        return FixedRows(value.storage)
    access = access_to(value.storage)
    access.check(ids, (len(ids), access.width))
    return TableRowsById(value, ids)


def ids_key_of(key: str, value: WholeValue | TableValue) -> str | None:
    """Return the key of the ids of a table, given that of its rows; None for another variable."""
    return key.removesuffix(ROWS) + IDS if isinstance(value, TableValue) else None
