"""Finds the tables in files of Keras and TensorFlow, backups and deltas, and reads them in pieces.

A piece is a vector of int64 ids, and their rows. A table with a fixed number of rows has no ids in
a file; those of its pieces are the numbers of its rows.

A file knows a table by several names: that of its layer, the path of its variable, and its place in
the file. Not every kind of file has all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from kerasps.dynamic.tables.row_access import pieces_of
from kerasps.dynamic.tables.row_files import IDS, ROWS
from kerasps.errors import InputError
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.saving.backup_files import Backup, BackupDirectory
from kerasps.saving.damage import naming_damaged_checkpoint, naming_damaged_file
from kerasps.serving.deltas import State
from kerasps.serving.manifests import numbers_in
from kerasps.serving.reader import DeltaReader
from kerasps.variables.rows.chunks import StoredRows
from kerasps.variables.storage.kinds import MOST_ROWS

Piece = tuple[np.ndarray, np.ndarray]

_WEIGHTS_IN_ARCHIVE = "model.weights.h5"
# The weights of Keras's `BackupAndRestore`, in its directory.
_WEIGHTS_OF_BACKUP = "latest.weights.h5"
# The last part of the path of a table's variable; what is before it is the name of the layer.
_TABLE = "/embeddings"
ATTRIBUTES = "/.ATTRIBUTES/"
_WHOLE = f"{ATTRIBUTES}VARIABLE_VALUE"
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_GRAPH_PROTO = importlib.import_module("tensorflow.core.protobuf.trackable_object_graph_pb2")


@dataclass(frozen=True, eq=False)
class StoredTable:
    """A table in a file.

    Attributes:
        layer: the name of its layer; None if the file does not have it.
        other_names: its other names.
        width: the number of elements of a row.
        dtype: the dtype of the rows.
        num_rows: the fixed number of its rows; None for a table with ids.
        read: returns an iterator over its pieces.
    """

    layer: str | None
    other_names: tuple[str, ...]
    width: int
    dtype: tf.DType
    num_rows: int | None
    read: Callable[[], Iterator[Piece]]

    @property
    def label(self) -> str:
        """The name by which a message calls it."""
        others = ", ".join(self.other_names)
        return f"{others} ({self.layer})" if self.layer else others

    def has_name(self, name: str) -> bool:
        """Return whether this is one of its names."""
        if name in (self.layer, *self.other_names):
            return True
        # Files of Keras have no paths of variables.
        has_path = any(other.endswith(_TABLE) for other in self.other_names)
        return self.layer is not None and not has_path and _layer_of(name) == self.layer


@contextlib.contextmanager
def stored_tables(path: str | os.PathLike[str]) -> Iterator[list[StoredTable]]:
    """Find the tables of a file or a directory, and read them within this context.

    Raises:
        InputError: it is of no kind that has tables.
        OSError: it cannot be read, or is damaged.
        tf.errors.OpError: a checkpoint, or a file of a backup, is damaged.
    """
    text = os.fspath(path)
    for is_of_kind, tables_in in _KINDS:
        if is_of_kind(text):
            with tables_in(text) as tables:
                yield tables
            return
    raise InputError(
        "There are no tables at this path. Expected: a `.weights.h5` or `.keras` file, the prefix "
        "of a `tf.train.Checkpoint`, the directory of a `tf.train.CheckpointManager`, a "
        f"`BackupAndRestore` or a `DeltaExport`. Received: {text!r}, which is "
        f"{'another kind of' if tf.io.gfile.exists(text) else 'no'} file or directory. Give the "
        "path as it was given to what saved it."
    )


@contextlib.contextmanager
def _in_archive(path: str) -> Iterator[list[StoredTable]]:
    with naming_damaged_file(path), zipfile.ZipFile(path) as archive:
        if archive.testzip() is not None:
            raise zipfile.BadZipFile(path)
        with archive.open(_WEIGHTS_IN_ARCHIVE) as weights, h5py.File(weights) as file:
            yield _tables_of_weights(file)


@contextlib.contextmanager
def _in_weights(path: str) -> Iterator[list[StoredTable]]:
    with naming_damaged_file(path), h5py.File(path) as file:
        yield _tables_of_weights(file)


def _tables_of_weights(file: h5py.File) -> list[StoredTable]:
    found: list[StoredTable] = []

    def visit(name: str, group: object) -> None:
        if not isinstance(group, h5py.Group) or not name.endswith("/vars"):
            return
        has_ids = {"ids", "rows"} <= set(group)
        if not has_ids and (set(group) != {"0"} or group["0"].ndim != 2):
            return
        values, ids = group["rows" if has_ids else "0"], group["ids"] if has_ids else None
        dtype = tf.as_dtype(values.attrs.get("dtype", values.dtype))
        rows = StoredRows(values, dtype.as_numpy_dtype)

        def read() -> Iterator[Piece]:
            for piece in pieces_of(len(rows), rows.shape[1] * rows.dtype.itemsize):
                numbers = np.asarray(piece) if ids is None else ids[piece.start : piece.stop]
                yield np.asarray(numbers, np.int64), rows[piece.start : piece.stop]

        found.append(
            StoredTable(
                group.attrs.get("name"),
                (name.removesuffix("/vars"),),
                rows.shape[1],
                dtype,
                None if has_ids else len(rows),
                read,
            )
        )

    file.visititems(visit)
    return found


@contextlib.contextmanager
def _in_checkpoint(prefix: str) -> Iterator[list[StoredTable]]:
    with naming_damaged_checkpoint(prefix):
        try:
            reader = tf.train.load_checkpoint(prefix)
        except tf.errors.OpError as exc:  # of a damaged index, often of no class that says so
            raise tf.errors.DataLossError(None, None, exc.message) from exc
        shapes = reader.get_variable_to_shape_map()
        paths = _paths_of_variables(reader) if _GRAPH in shapes else {}
        found = []
        for key in sorted(shapes):
            end = next((end for end in (f"{ATTRIBUTES}{IDS}", _WHOLE) if key.endswith(end)), "")
            base, has_ids = key.removesuffix(end), end != _WHOLE
            rows_key = f"{base}{ATTRIBUTES}{ROWS}" if has_ids else key
            if end and len(shapes[rows_key]) == 2:
                names = [name for name in (base, paths.get(key)) if name]
                keys = [(key if has_ids else None, rows_key)]
                found.append(table_of_checkpoint(prefix, reader, names, keys))
        yield found


def table_of_checkpoint(
    prefix: str, reader: Any, names: Iterable[str], keys: Iterable[tuple[str | None, str]]
) -> StoredTable:
    """Return a table in a checkpoint, or in the files of one.

    Args:
        reader: the reader of the checkpoint.
        names: its names, the path of the variable as the last one.
        keys: the keys of the ids, None for none, and of the rows. There are several if the table
            was saved in parts.
    """
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    keys, (*_, path) = list(keys), (names := tuple(names))
    ids_key, rows_key = keys[0]
    num_rows, width = shapes[rows_key]
    dtype = dtypes[rows_key]

    def read() -> Iterator[Piece]:
        for ids_key, rows_key in keys:
            count = shapes[rows_key][0]
            for piece in pieces_of(count, width * dtype.size):
                place = f"{piece.start},{len(piece)}"
                rows = _restored(prefix, rows_key, f"{count} {width} {place}:-", dtype)
                ids = np.asarray(piece)
                if ids_key is not None:
                    ids = _restored(prefix, ids_key, f"{count} {place}", dtypes[ids_key])
                yield ids.astype(np.int64), rows

    return StoredTable(
        _layer_of(path), names, width, dtype, num_rows if ids_key is None else None, read
    )


def _paths_of_variables(reader: Any) -> dict[str, str]:
    """Return the paths of the variables in a checkpoint, by the keys of their values."""
    graph = _GRAPH_PROTO.TrackableObjectGraph.FromString(reader.get_tensor(_GRAPH))
    entries = itertools.chain.from_iterable(node.attributes for node in graph.nodes)
    return {entry.checkpoint_key: entry.full_name for entry in entries}


def _layer_of(path: str) -> str | None:
    """Return the name of the layer of a table, given the path of its variable."""
    if not path.endswith(_TABLE):
        return None
    return path.removesuffix(_TABLE).rpartition("/")[2]


def _restored(prefix: str, key: str, part: str, dtype: tf.DType) -> np.ndarray:
    with tf.device(COORDINATOR_CPU):
        (value,) = tf.raw_ops.RestoreV2(
            prefix=prefix, tensor_names=[key], shape_and_slices=[part], dtypes=[dtype]
        )
    return np.asarray(value)


@contextlib.contextmanager
def _in_latest_checkpoint(path: str) -> Iterator[list[StoredTable]]:
    with _in_checkpoint(tf.train.latest_checkpoint(path)) as tables:
        yield tables


@contextlib.contextmanager
def _in_backup(path: str) -> Iterator[list[StoredTable]]:
    backup = next(BackupDirectory(path).backups(), None)
    if backup is None:
        raise InputError(
            f"The directory {path} has no backup that can be read. Expected: a complete one. "
            "Received: damaged ones. Give another directory, or a file."
        )
    yield [
        _table_of_backup(backup, key, spec)
        for key, spec in backup.specs.items()
        if key.startswith("model/") and len(spec["shape"]) == 2
    ]


def _table_of_backup(backup: Backup, key: str, spec: Mapping[str, Any]) -> StoredTable:
    dtype, (num_rows, width) = tf.as_dtype(spec["dtype"]), spec["shape"]
    has_ids = num_rows == MOST_ROWS
    # The backups that it is a delta on come first.
    chain = backup.chain
    groups = [entry.get("tables", ()) for each in chain for entry in each.pieces]
    # The keys of the table and its slots.
    members = {key}.union(*(group for group in groups if key in group))

    def read() -> Iterator[Piece]:
        # Of a backup that is a delta, the last version of each row counts, so the last is first.
        later = np.zeros(0, np.int64)
        for each in reversed(chain if has_ids else chain[-1:]):
            found = [later, *(ids for name, ids in each.removed.items() if name in members)]
            for ids, rows in _pieces_of_backup(each, key, dtype):
                kept = np.isin(ids, later, invert=True)
                found.append(ids if each is not chain[0] else later[:0])
                yield ids[kept], rows[kept]
            later = np.unique(np.concatenate(found))

    path = spec["path"]
    return StoredTable(_layer_of(path), (path,), width, dtype, None if has_ids else num_rows, read)


def _pieces_of_backup(backup: Backup, key: str, dtype: tf.DType) -> Iterator[Piece]:
    for entry in backup.pieces:
        prefix = f"{backup.directory}/{entry['file']}"
        with naming_damaged_checkpoint(prefix):
            if key in entry.get("tables", ()):
                number = 1 + entry["tables"].index(key)
                rows = _restored(prefix, f"{number}", "", dtype)
                yield _restored(prefix, "0", "", tf.int64), rows
            elif entry.get("key") == key:
                rows = _restored(prefix, entry["name"], "", dtype)
                yield np.arange(*entry["rows"], dtype=np.int64), rows


@contextlib.contextmanager
def _in_weights_of_backup(path: str) -> Iterator[list[StoredTable]]:
    with _in_weights(f"{path}/{_WEIGHTS_OF_BACKUP}") as tables:
        yield tables


@contextlib.contextmanager
def _in_deltas(path: str) -> Iterator[list[StoredTable]]:
    state, fixed = State(), set()
    for delta in DeltaReader(path).new():
        state.apply(delta)
        fixed |= {name for name, table in delta.tables.items() if table.default is None}
    whole = {
        name: (np.arange(len(value)), value)
        for name, value in state.weights.items()
        if name.endswith(_TABLE) and value.ndim == 2
    }
    yield [
        _table_of_deltas(name, *content, is_fixed=name in fixed or name in whole)
        for name, content in (state.tables | whole).items()
    ]


def _table_of_deltas(
    path: str, ids: np.ndarray, rows: np.ndarray, *, is_fixed: bool
) -> StoredTable:
    def read() -> Iterator[Piece]:
        for piece in pieces_of(len(rows), rows.shape[1] * rows.dtype.itemsize):
            place = slice(piece.start, piece.stop)
            yield ids[place], rows[place]

    num_rows, dtype = len(rows) if is_fixed else None, tf.as_dtype(rows.dtype)
    return StoredTable(_layer_of(path), (path,), rows.shape[1], dtype, num_rows, read)


# How each kind of file or directory is recognized, and what reads it. The first that fits is taken.
_KINDS: tuple[
    tuple[
        Callable[[str], object],
        Callable[[str], contextlib.AbstractContextManager[list[StoredTable]]],
    ],
    ...,
] = (
    (lambda path: path.endswith(".keras"), _in_archive),
    (lambda path: path.endswith(".h5"), _in_weights),
    (lambda path: BackupDirectory(path).last_manifest(), _in_backup),
    (lambda path: tf.io.gfile.exists(f"{path}/{_WEIGHTS_OF_BACKUP}"), _in_weights_of_backup),
    (lambda path: numbers_in(Path(path)), _in_deltas),
    (tf.train.latest_checkpoint, _in_latest_checkpoint),
    (lambda path: tf.io.gfile.exists(f"{path}.index"), _in_checkpoint),
)
