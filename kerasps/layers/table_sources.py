"""Reads the rows of one table from files, in pieces, for a table with other ids, or other rows.

A piece is a vector of int64 ids, and their rows. Files are those of Keras, TensorFlow's
checkpoints, and those of TensorFlow Recommenders-Addons, whose format is:

- A variable `name` on n devices is n tables, `<name>_mht_<1 … n>of<n>`, with `_` for each `/` in
  the name. `Variable.save_to_file_system` adds `_rank<r>_size<s>`, of the processes that save.
- A table is two files: `…-keys` has its keys and `…-values` the rows in their order, both without a
  header, in the byte order of the machine. A later row of a key replaces an earlier one.
- In a checkpoint they are tensors: `…/tables_of_<name>/<0 … n-1>/.ATTRIBUTES/table-keys` and
  `-values`, with `.S` for each `/` in the name. An Estimator's have the names of the files.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from kerasps.dynamic.ids.keys import ids_of
from kerasps.dynamic.ids.rows_of_ids import check_different
from kerasps.dynamic.tables.row_access import pieces_of
from kerasps.dynamic.tables.row_files import IDS, ROWS
from kerasps.errors import InputError
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.variables.rows.chunks import StoredRows

Piece = tuple[np.ndarray, np.ndarray]

_WEIGHTS_IN_ARCHIVE = "model.weights.h5"
_ATTRIBUTES = "/.ATTRIBUTES/"
# The ends of the names of ids and of rows in a checkpoint: ours, and those of Recommenders-Addons.
_IDS, _ROWS, _KEYS, _VALUES = f"{_ATTRIBUTES}{IDS}", f"{_ATTRIBUTES}{ROWS}", "-keys", "-values"
_WHOLE = f"{_ATTRIBUTES}VARIABLE_VALUE"


def rows_in_file(
    path: str | os.PathLike[str], layer: str, vocabulary: ArrayLike | None = None
) -> Iterator[Piece]:
    """Iterate over the rows that a file has of one table: pieces `(ids, rows)`, of some 16 MB.

    Args:
        path: a `.weights.h5` or `.keras` file, or the prefix of a `tf.train.Checkpoint`.
        layer: the name of the layer, or its path in the file. In a checkpoint, the key of the
            table, as `tf.train.list_variables` lists it, up to `/.ATTRIBUTES/`; or the name of a
            variable of Recommenders-Addons, such as `items-parameter`.
        vocabulary: the ids of the rows, integers or strings in the order of the rows, if the file
            has a table with a fixed number of rows. Default None: the file has ids.

    Raises:
        InputError: the file has no such table, or another number of rows than the vocabulary. It is
            raised when the first piece is asked for.
        OSError: the file cannot be read.
    """
    known = None if vocabulary is None else ids_of(vocabulary)
    text = os.fspath(path)
    if text.endswith(".keras"):
        with (
            zipfile.ZipFile(text) as archive,
            archive.open(_WEIGHTS_IN_ARCHIVE) as weights,
            h5py.File(weights) as file,
        ):
            yield from _in_weights(file, text, layer, known)
    elif text.endswith(".h5"):
        with h5py.File(text) as file:
            yield from _in_weights(file, text, layer, known)
    else:
        yield from _in_checkpoint(text, layer, known)


def _in_weights(
    file: h5py.File, path: str, layer: str, known: np.ndarray | None
) -> Iterator[Piece]:
    found: dict[str, h5py.Group] = {}

    def visit(name: str, entry: object) -> None:
        if isinstance(entry, h5py.Group) and name.endswith("/vars") and len(entry):
            found[name.removesuffix("/vars")] = entry

    file.visititems(visit)
    named = [g for at, g in found.items() if layer in (at, g.attrs.get("name"))]
    tables = [group for group in named if {"ids", "rows"} <= set(group) or _is_fixed(group)]
    if len(tables) != 1:
        others = [f"{at} ({group.attrs.get('name')})" for at, group in found.items()]
        raise _no_table(path, layer, others)
    (group,) = tables
    name = "0" if _is_fixed(group) else "rows"
    rows = StoredRows(group[name], tf.as_dtype(_dtype_of(group[name])).as_numpy_dtype)
    ids = _checked(known, None if name == "0" else group["ids"][:], group[name].shape[0], layer)
    for piece in pieces_of(len(ids), group[name].shape[1] * rows.dtype.itemsize):
        yield ids[piece.start : piece.stop], np.asarray(rows[piece.start : piece.stop])


def _is_fixed(group: h5py.Group) -> bool:
    return set(group) == {"0"} and group["0"].ndim == 2


def _dtype_of(dataset: h5py.Dataset) -> Any:
    return dataset.attrs.get("dtype", dataset.dtype)


def _in_checkpoint(prefix: str, name: str, known: np.ndarray | None) -> Iterator[Piece]:
    reader = tf.train.load_checkpoint(prefix)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    # By the keys of rows, those of their ids, None for a table with a fixed number of rows.
    tables: dict[str, str | None] = {
        key.removesuffix(_KEYS) + _VALUES: key for key in sorted(shapes) if _is_of(name, key)
    }
    if name + _IDS in shapes:
        tables = {name + _ROWS: name + _IDS}
    elif len(shapes.get(name + _WHOLE, ())) == 2:
        tables = {name + _WHOLE: None}
    if not tables:
        ends = _IDS, _KEYS, _WHOLE
        raise _no_table(prefix, name, [key for key in sorted(shapes) if key.endswith(ends)])
    for key, ids_key in tables.items():
        num_rows, width = shapes[key]
        stored = None if ids_key is None else reader.get_tensor(ids_key).astype(np.int64)
        ids = _checked(known, stored, num_rows, name)
        for piece in pieces_of(num_rows, width * dtypes[key].size):
            with tf.device(COORDINATOR_CPU):
                (rows,) = tf.raw_ops.RestoreV2(
                    prefix=prefix,
                    tensor_names=[key],
                    shape_and_slices=[f"{num_rows} {width} {piece.start},{len(piece)}:-"],
                    dtypes=[dtypes[key]],
                )
            yield ids[piece.start : piece.stop], np.asarray(rows)


def _is_of(name: str, key: str) -> bool:
    """Return whether a tensor has keys of a variable of Recommenders-Addons."""
    tracked, plain = (re.escape(name.replace("/", other)) for other in (".S", "_"))
    pattern = rf"(.*/)?tables_of_{tracked}/\d+{_ATTRIBUTES}table|{plain}_mht_\d+of\d+"
    return re.fullmatch(f"(?:{pattern}){_KEYS}", key) is not None


def _checked(
    known: np.ndarray | None, stored: np.ndarray | None, num_rows: int, layer: str
) -> np.ndarray:
    """Return the ids of the rows: those of the file, or those of the vocabulary."""
    if (known is None) == (stored is None) or (known is not None and len(known) != num_rows):
        expected = f"a vocabulary of {num_rows:,} ids" if stored is None else "no vocabulary"
        received = "none" if known is None else f"one of {len(known):,} ids"
        raise InputError(
            f"The vocabulary does not fit the table of {layer!r} in the file, which has "
            f"{num_rows:,} rows {'in their order' if stored is None else 'with ids'}. Expected: "
            f"{expected}. Received: {received}. Give the ids of the rows in their order, if the "
            "file has none."
        )
    if stored is not None:
        return stored
    assert known is not None
    check_different(known)
    return known


def _no_table(path: str, layer: str, others: list[str]) -> InputError:
    return InputError(
        f"The file {path} has not one table of this name. Expected: the name of a layer with a "
        f"table, or its path or key in the file. Received: {layer!r}. Give one of: "
        f"{', '.join(others) or 'none, the file has no table'}."
    )


def rows_of_recommenders_addons(
    directory: str | os.PathLike[str],
    name: str,
    width: int,
    *,
    key_dtype: str = "int64",
    dtype: str = "float32",
) -> Iterator[Piece]:
    """Iterate over a table that TensorFlow Recommenders-Addons saved: pieces `(ids, rows)`.

    It reads the files `<name>_mht_1of2-keys` and so on that `Variable.save_to_file_system`, a
    `FileSystemSaver` or the callback `ModelCheckpoint` wrote.

    Args:
        directory: the directory of the files, such as `saved/variables/TFRADynamicEmbedding`.
        name: the name of the variable, such as `items-parameter` of a layer `items`; that of a
            slot is the beginning of the name of its files.
        width: the number of elements of a row.
        key_dtype: the dtype of keys, `"int64"` or `"int32"`. Default `"int64"`.
        dtype: the dtype of the rows, such as `"float32"` or `"float16"`. Default `"float32"`.

    Raises:
        InputError: files are missing or have other sizes. It is raised when the first piece is
            asked for.
    """
    text = os.fspath(directory)
    numbers = np.dtype(key_dtype).newbyteorder("<")
    rows_dtype = tf.as_dtype(dtype).as_numpy_dtype
    row_bytes = width * np.dtype(rows_dtype).itemsize
    shards = _shards(text, name.replace("/", "_"))
    sizes = {shard: _num_rows(f"{text}/{shard}", numbers.itemsize, row_bytes) for shard in shards}
    for shard, num_rows in sizes.items():
        path = f"{text}/{shard}"
        with (
            tf.io.gfile.GFile(f"{path}-keys", "rb") as keys,
            tf.io.gfile.GFile(f"{path}-values", "rb") as values,
        ):
            for piece in pieces_of(num_rows, row_bytes):
                ids = np.frombuffer(keys.read(len(piece) * numbers.itemsize), numbers)
                rows = np.frombuffer(values.read(len(piece) * row_bytes), rows_dtype)
                # Of rows of one id, the last counts.
                _, last = np.unique(ids[::-1], return_index=True)
                kept = len(ids) - 1 - last
                yield ids[kept].astype(np.int64), rows.reshape(-1, width)[kept]


def _shards(directory: str, name: str) -> list[str]:
    """Return the names of the tables of a variable.

    Raises:
        InputError: there are none, or some are missing, or they are of several saves.
    """
    pattern = re.compile(rf"({re.escape(name)}_mht_(\d+)of(\d+)(?:_rank(\d+)_size(\d+))?)-keys")
    names = tf.io.gfile.listdir(directory)
    found = [match for each in sorted(names) if (match := pattern.fullmatch(each))]
    shards = {(int(m[2]), int(m[4] or 0)): m[1] for m in found}
    if found:
        num_shards, num_ranks = int(found[0][3]), int(found[0][5] or 1)
        expected = {(i + 1, rank) for i in range(num_shards) for rank in range(num_ranks)}
        if set(shards) == expected and len({(m[3], m[5]) for m in found}) == 1:
            return list(shards.values())
    others = {each.partition("_mht_")[0] for each in names if each.endswith("-keys")}
    received = ", ".join(m[0] for m in found) or f"tables of {', '.join(sorted(others)) or 'none'}"
    raise InputError(
        f"The directory {directory} has not all files of one save of a variable of "
        f"Recommenders-Addons. Expected: {name}_mht_1of1-keys, or as many as its name says. "
        f"Received: {received}. Give the name of the variable, and a directory with one save of it."
    )


def _num_rows(path: str, key_bytes: int, row_bytes: int) -> int:
    sizes: Mapping[str, int] = {
        end: int(tf.io.gfile.stat(path + end).length) if tf.io.gfile.exists(path + end) else -1
        for end in ("-keys", "-values")
    }
    num_keys, rest = divmod(sizes["-keys"], key_bytes)
    if rest or sizes["-values"] != num_keys * row_bytes:
        raise InputError(
            f"The files of the table {path} do not fit each other. Expected: keys of {key_bytes} "
            f"bytes and as many rows of {row_bytes}. Received: {sizes['-keys']:,} and "
            f"{sizes['-values']:,} bytes. Give the `width`, `dtype` and `key_dtype` of the "
            "variable; if they are right, the files were cut short."
        )
    return num_keys
