"""Takes tables from a file into a new model, by name: `warm_start`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import keras
import numpy as np
from numpy.typing import ArrayLike

from kerasps.checks import path as checked_path
from kerasps.dynamic.ids.rows_of_ids import check_different
from kerasps.dynamic.local.local_rows import LocalRows
from kerasps.dynamic.tables.row_access import make_rows
from kerasps.dynamic.tables.row_files import VariableById
from kerasps.dynamic.tables.table import KeyedVariable
from kerasps.errors import InputError
from kerasps.layers.loading import Vocabulary, read_fixed, table_of, write_fixed
from kerasps.layers.stored_tables import StoredTable, stored_tables
from kerasps.runtime.connected import check_not_closed, connected_host
from kerasps.runtime.errors import translated_errors
from kerasps.variables import ParameterServerVariable, wait_for_steps
from kerasps.words import times


class TakenTable(NamedTuple):
    """Rows that `warm_start` took into a table.

    Attributes:
        source: the name of the table in the file.
        rows: the number of rows that it took.
        columns: the number of columns of each that it took: the first ones.
        left_rows: the number of rows of the file that have no place in the table.
        left_columns: the number of columns of the file that have none: the last ones.
        new_columns: the number of columns of the table that the file does not have. They keep their
            values, the first ones in a new model.
    """

    source: str
    rows: int
    columns: int
    left_rows: int
    left_columns: int
    new_columns: int

    def __str__(self) -> str:
        text = f"{times(self.rows, 'row')} of {times(self.columns, 'column')} of {self.source!r}"
        if self.new_columns:
            text += f"; {times(self.new_columns, 'more column')} as before"
        left = [
            times(number, noun)
            for number, noun in ((self.left_rows, "row"), (self.left_columns, "column"))
            if number
        ]
        return f"{text}; no place for {' and '.join(left)}" if left else text


class WarmStart(NamedTuple):
    """Tables that `warm_start` took from a file. As text it has a line for each.

    Attributes:
        tables: a `TakenTable` for each table that took rows, by its name in the model.
        left: the names of other tables of the file. With a file of weights these may be other
            matrices too, which look the same.
        unchanged: the names of other tables of the model.
    """

    tables: dict[str, TakenTable]
    left: list[str]
    unchanged: list[str]

    def __str__(self) -> str:
        lines = [f"{name}: {taken}" for name, taken in self.tables.items()]
        for words, names in (("left", self.left), ("unchanged", self.unchanged)):
            lines += [f"{words}: {', '.join(names)}"] if names else []
        return "\n".join(lines)


def warm_start(
    model: keras.layers.Layer,
    from_: str | os.PathLike[str],
    *,
    tables: Mapping[str, str] | Iterable[str] | None = None,
    vocabulary: Mapping[str, ArrayLike] | None = None,
) -> WarmStart:
    """Set tables of a new model to those of a file, by name.

    The file may be of another number of ps, of another model and of another optimizer. All else of
    the model stays: other weights, and slots. Ids that a table has and the file has not keep their
    rows. A wider table takes its first columns from the file, and a narrower one the first columns
    of the file. It works under a strategy and without one, and reads the file in pieces.

    ```python
    old = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(3, 8, name="words")])
    old.save_weights("old.weights.h5")
    table = kerasps.layers.DynamicEmbedding(12, name="any_words")
    new = keras.Sequential([keras.Input((2,), dtype="string"), table])
    taken = kerasps.warm_start(
        new,
        "old.weights.h5",
        tables={"words": "any_words"},
        vocabulary={"any_words": ["[UNK]", "tea", "salt"]},
    )
    print(taken)  # any_words: 3 rows of 8 columns of 'words'; 4 more columns as before
    ```

    Args:
        model: a built model. Each layer with a variable `embeddings` of two axes has a table.
        from_: a `.weights.h5` or `.keras` file, the prefix of a `tf.train.Checkpoint` or the
            directory of a `tf.train.CheckpointManager`, or that of a `BackupAndRestore`, whose last
            backup is taken.
        tables: the tables to take. A mapping has for each name in the file the one in the model;
            other iterables have names that are the same in both. A name is that of a layer, or the
            path of its variable, or its place in the file. Default None: all tables whose layers
            have the same name in both.
        vocabulary: where a table without a vocabulary becomes one with a fixed number of rows, or
            the other way round: by the name of the table in the model, the id of each row, integers
            or strings. It may be shorter than the table. Default None, and for tables that it does
            not have: ids are the numbers of rows.

    Returns:
        A `WarmStart`: what each table took, and what had no place.

    Raises:
        InputError: a name or a vocabulary does not fit, or a table has no room. Nothing is changed,
            except if a ps has too little memory.
        OSError, tf.errors.OpError: the file is damaged. Nothing is changed.
    """
    checked_path("from_", from_)
    in_model = _tables_of(model)
    if any(isinstance(table.variable, ParameterServerVariable) for table in in_model):
        check_not_closed("`warm_start` of a model of the strategy")
    wait_for_steps()
    with translated_errors(connected_host()), stored_tables(from_) as in_file:
        pairs = _pairs(tables, in_file, in_model, from_)
        ids = _vocabularies(vocabulary, pairs)
        takings = {name: _Taking(*pair, ids.get(name)) for name, pair in pairs.items()}
        return _take(takings, in_file, in_model)


def _take(
    takings: dict[str, _Taking], in_file: list[StoredTable], in_model: list[_Table]
) -> WarmStart:
    # All is read twice. The first time shows damage, and what has no place, before a table has
    # changed.
    for taking in takings.values():
        taking.check()
    taken = {name: taking.take() for name, taking in takings.items()}
    used = [taking.stored for taking in takings.values()]
    changed = [taking.table for taking in takings.values()]
    return WarmStart(
        taken,
        [stored.layer for stored in in_file if stored.layer and stored not in used],
        [table.layer for table in in_model if table not in changed],
    )


@dataclass(frozen=True, eq=False)
class _Table:
    """A table of the model."""

    layer: str
    variable: Any

    @property
    def label(self) -> str:
        return f"{self.variable.path} ({self.layer})"

    def has_name(self, name: str) -> bool:
        return name in (self.layer, self.variable.path)


def _tables_of(model: object) -> list[_Table]:
    if not isinstance(model, keras.layers.Layer):
        _refuse("model", f"a {type(model).__name__}", "a built model", "Give the new model")
    tables = {}
    for layer in model._flatten_layers():
        variable = table_of(layer)
        if variable is not None:
            tables[id(variable)] = _Table(layer.name, variable)
    if not tables:
        _refuse(
            "model",
            f"{model.name!r}, which has none",
            "a built model with tables",
            "Build it before, such as by a call on a batch",
        )
    return list(tables.values())


def _pairs(
    names: Mapping[str, str] | Iterable[str] | None,
    in_file: list[StoredTable],
    in_model: list[_Table],
    path: object,
) -> dict[str, tuple[StoredTable, _Table]]:
    """Return the tables to take, by the names in the model: those of the file and of the model."""
    if names is None:
        of_file = {stored.layer for stored in in_file}
        names = list(dict.fromkeys(t.layer for t in in_model if t.layer in of_file))
    elif isinstance(names, str):
        _refuse("tables", repr(names), "a mapping or a list of names", f"Give [{names!r}]")
    renamed = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    for name in [*renamed, *renamed.values()]:
        if not isinstance(name, str):
            _refuse("tables", repr(name), "names of tables", "Give the names of layers")
    if not renamed:
        _refuse(
            "tables",
            f"none that {path} and the model both have. The file has "
            f"{_listed(in_file)}; the model has {_listed(in_model)}",
            "the names of some tables",
            "Give a mapping from names in the file to those in the model",
        )
    pairs: dict[str, tuple[StoredTable, _Table]] = {}
    for old, new in renamed.items():
        stored, table = _named(old, in_file, f"the file {path}"), _named(new, in_model, "the model")
        if any(table is other for _, other in pairs.values()):
            _refuse(
                "tables",
                f"{new!r} more than once",
                "a table of the model once",
                "Give each table one table of the file",
            )
        if not stored.dtype.is_floating:
            _refuse(
                "tables",
                f"{old!r}, of {stored.dtype.name}, in {path}",
                "a table of floating-point numbers",
                "Save the model before it is quantized",
            )
        pairs[new] = stored, table
    return pairs


_Found = TypeVar("_Found", StoredTable, _Table)


def _named(name: str, tables: Sequence[_Found], where: str) -> _Found:
    found = [table for table in tables if table.has_name(name)]
    if len(found) != 1:
        how_many = f"{len(found)} tables" if found else "no table"
        _refuse(
            "tables",
            f"{name!r}, the name of {how_many} of {where}",
            "a name of one table, or the path of its variable",
            f"Give one of: {_listed(tables)}",
        )
    return found[0]


def _listed(tables: Sequence[StoredTable] | Sequence[_Table]) -> str:
    # Of the matrices of a checkpoint, tables are those whose layer is known.
    known = [table for table in tables if table.layer] or tables
    return ", ".join(table.label for table in known) or "no table"


def _vocabularies(
    vocabulary: Mapping[str, ArrayLike] | None, pairs: Mapping[str, tuple[StoredTable, _Table]]
) -> dict[str, Vocabulary]:
    if vocabulary is None:
        return {}
    if not isinstance(vocabulary, Mapping):
        _refuse(
            "vocabulary",
            f"a {type(vocabulary).__name__}",
            "a mapping from names of tables in the model to ids of rows",
            "Give one such as {'items': ids}",
        )
    found = {}
    for name, ids in vocabulary.items():
        if name not in pairs:
            taken = ", ".join(map(repr, pairs))
            _refuse("vocabulary", f"{name!r}", f"one of {taken}", "Give the name in the model")
        stored, table = pairs[name]
        by_id = isinstance(table.variable, VariableById)
        if by_id == (stored.num_rows is None):
            _refuse(
                "vocabulary",
                f"one for {name!r}, where both tables have "
                f"{'ids' if by_id else 'a fixed number of rows'}",
                "a vocabulary where one of both tables has a fixed number of rows",
                "Leave it out"
                if by_id
                else "Use `load_rows(layer, rows_in_file(path, old, vocabulary=old_ids), "
                "vocabulary=new_ids)` of `kerasps.layers`",
            )
        found[name] = Vocabulary(ids)
        num_rows = stored.num_rows or 0 if by_id else int(table.variable.shape[0])
        if len(found[name]) > num_rows:
            _refuse(
                "vocabulary",
                f"{len(found[name]):,} ids for {name!r}",
                f"at most {num_rows:,} ids, one for each row of the table",
                "Give the ids of the rows in their order",
            )
    return found


class _Taking:
    """The way of the rows of one table from a file into the model.

    Args:
        vocabulary: the ids of the rows of the one that has none; None if they are numbers of rows.
    """

    def __init__(self, stored: StoredTable, table: _Table, vocabulary: Vocabulary | None) -> None:
        self.stored, self.table = stored, table
        self._vocabulary = vocabulary
        self._variable = table.variable
        self._by_id = isinstance(self._variable, VariableById)
        self._width = int(self._variable.shape[1])
        self._columns = min(self._width, stored.width)
        self._num_rows = self._num_left = 0

    def check(self) -> None:
        """Read all pieces; count the rows, and refuse those that do not fit."""
        most = _most_rows(self._variable)
        before = self._variable.sorted_ids() if most is not None else np.zeros(0, np.int64)
        num_after = len(before)
        for ids, rows in self.stored.read():
            if rows.shape != (len(ids), self.stored.width):
                _refuse(
                    "from_",
                    f"a damaged table {self.stored.label}: rows of shape {rows.shape} for "
                    f"{len(ids):,} ids",
                    f"rows of {self.stored.width} elements, one for each id",
                    "Save it again, or give an earlier file",
                )
            check_different(ids)
            keys, _ = self._places(ids)
            self._num_rows += len(keys)
            self._num_left += len(ids) - len(keys)
            num_after += len(keys) if most is None else int(np.sum(~np.isin(keys, before)))
        if most is not None and num_after > most:
            _refuse(
                "tables",
                f"{self.stored.label}, after which the table would have {num_after:,} rows",
                f"at most max_rows={most:,} rows in {self.table.label}",
                f"Make the layer with max_rows={num_after} or more",
            )

    def take(self) -> TakenTable:
        """Write all pieces."""
        for ids, rows in self.stored.read():
            keys, kept = self._places(ids)
            if len(keys):
                self._write(keys, rows[kept][:, : self._columns])
        return TakenTable(
            self.stored.layer or self.stored.label,
            self._num_rows,
            self._columns,
            self._num_left,
            self.stored.width - self._columns,
            self._width - self._columns,
        )

    def _places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, or numbers of rows, in the model, and which of those given have one."""
        if self.stored.num_rows is not None and self._by_id:
            if self._vocabulary is None:
                return ids, np.ones(len(ids), np.bool_)
            kept = ids < len(self._vocabulary)
            return self._vocabulary.ids[ids[kept]], kept
        if self._by_id:
            return ids, np.ones(len(ids), np.bool_)
        places = ids if self._vocabulary is None else self._vocabulary.rows_of(ids)
        kept = (places >= 0) & (places < int(self._variable.shape[0]))
        return places[kept], kept

    def _write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        if self._columns < self._width:
            if self._by_id:
                _make_rows(self._variable, keys)
            now = (
                self._variable.find_rows(keys) if self._by_id else read_fixed(self._variable, keys)
            )
            rows = np.concatenate([rows.astype(now.dtype), now[:, self._columns :]], axis=1)
        if self._by_id:
            self._variable.write_rows(keys, rows)
        else:
            write_fixed(self._variable, keys, rows)


def _make_rows(variable: LocalRows | KeyedVariable, ids: np.ndarray) -> None:
    """Make the rows of ids that have none: an id without a row may read zeros."""
    if isinstance(variable, LocalRows):
        variable.table.places_of(ids, makes=True)
    else:
        make_rows(variable.access, ids)


def _most_rows(variable: object) -> int | None:
    if isinstance(variable, LocalRows):
        return int(variable.table.num_places)
    begins = variable.rows_of_ids if isinstance(variable, KeyedVariable) else None
    return None if begins is None else begins.max_rows


def _refuse(argument: str, received: str, expected: str, advice: str) -> NoReturn:
    raise InputError(
        f"Argument `{argument}` of warm_start has a value that cannot be used. Expected: "
        f"{expected}. Received: {argument}={received}. {advice}."
    )
