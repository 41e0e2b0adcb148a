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
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from kerasps.dynamic.ids.keys import ids_of
from kerasps.dynamic.ids.rows_of_ids import check_different
from kerasps.dynamic.tables.row_access import pieces_of
from kerasps.errors import InputError
from kerasps.layers.stored_tables import (
    ATTRIBUTES,
    Piece,
    StoredTable,
    stored_tables,
    table_of_checkpoint,
)

_KEYS, _VALUES = "-keys", "-values"


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
    with stored_tables(path) as tables:
        named = [table for table in tables if table.has_name(layer)]
        others = [table.label for table in tables]
        if not named and tf.io.gfile.exists(f"{os.fspath(path)}.index"):
            named, keys = _of_recommenders_addons(os.fspath(path), layer)
            others += keys
        if len(named) != 1:
            raise InputError(
                f"The file {path} has not one table of this name. Expected: the name of a layer "
                f"with a table, or its path or key in the file. Received: {layer!r}. Give one of: "
                f"{', '.join(others) or 'none, the file has no table'}."
            )
        (table,) = named
        _check_vocabulary(known, table.num_rows, layer)
        for ids, rows in table.read():
            yield ids if known is None else known[ids], rows


def _of_recommenders_addons(prefix: str, name: str) -> tuple[list[StoredTable], list[str]]:
    """Return the table of a variable of Recommenders-Addons in a checkpoint, and all its keys."""
    reader = tf.train.load_checkpoint(prefix)
    keys = sorted(key for key in reader.get_variable_to_shape_map() if key.endswith(_KEYS))
    tracked, plain = (re.escape(name.replace("/", other)) for other in (".S", "_"))
    of_name = re.compile(
        rf"(?:(.*/)?tables_of_{tracked}/\d+{ATTRIBUTES}table|{plain}_mht_\d+of\d+){_KEYS}"
    )
    parts = [(key, key.removesuffix(_KEYS) + _VALUES) for key in filter(of_name.fullmatch, keys)]
    return [table_of_checkpoint(prefix, reader, [name], parts)] if parts else [], keys


def _check_vocabulary(known: np.ndarray | None, num_rows: int | None, layer: str) -> None:
    """Raise `InputError` if a vocabulary does not fit a table in a file."""
    if known is not None:
        check_different(known)
    if (None if known is None else len(known)) != num_rows:
        rows = "rows with ids" if num_rows is None else f"{num_rows:,} rows in their order"
        expected = "no vocabulary" if num_rows is None else f"a vocabulary of {num_rows:,} ids"
        received = "none" if known is None else f"one of {len(known):,} ids"
        raise InputError(
            f"The vocabulary does not fit the table of {layer!r} in the file, which has {rows}. "
            f"Expected: {expected}. Received: {received}. Give the ids of the rows in their order, "
            "if the file has none."
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
