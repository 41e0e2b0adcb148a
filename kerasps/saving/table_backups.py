"""Tables without a vocabulary in backups. They have no copy on the ps, so training waits for them.

A file of a backup has a range of a table's ids, ascending, and the rows of these ids, of the table
and of its slots. The ps write the files in turn, each with rows that all ps send it. If a ps does
not see the directory, the coordinator writes its files.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from kerasps.dynamic.row_access import pieces_of
from kerasps.dynamic.table import KeyedVariable
from kerasps.runtime.calls import persist
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.fetching import fetch
from kerasps.saving.checkpoints import sees
from kerasps.saving.variable_copies import on_each_device
from kerasps.variables import ParameterServerVariable

# Above the numbers of the files of other variables.
_FIRST_FILE = 100_000


@dataclass(frozen=True)
class TablePiece:
    """Some ids of a table, and their rows, in a file of a backup."""

    # The prefix of the file within the backup's directory. The tensor 0 in it has the ids, and the
    # following ones have rows.
    file: str
    tables: list[str]  # the keys of the variables that have these rows: the table, and its slots
    first: int  # the place of the first id among all ids of the table
    num_ids: int  # the number of ids


@dataclass(frozen=True)
class _Group:
    """The variables of one table: itself, and its slots."""

    variables: dict[str, KeyedVariable]

    @property
    def devices(self) -> list[str]:
        """The devices of the ps."""
        first, *_ = self.variables.values()
        return [str(shard.device) for shard in first.shards]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row and its slots, without those of the id."""
        return sum(variable.access.row_bytes for variable in self.variables.values())

    def sorted_ids(self) -> np.ndarray:
        """Return the ids of the table, ascending."""
        first, *_ = self.variables.values()
        return first.sorted_ids()


def tables_of(
    variables: Mapping[str, ParameterServerVariable],
) -> dict[str, KeyedVariable]:
    """Return those of some variables that are tables without a vocabulary, or slots of one."""
    return {key: each for key, each in variables.items() if isinstance(each, KeyedVariable)}


def write_tables(
    variables: Mapping[str, KeyedVariable], directory: str, probe: str
) -> list[TablePiece]:
    """Write tables and their slots into files. Call when no step is in flight.

    Args:
        directory: the absolute path of a directory.
        probe: a file in it. The coordinator writes for a ps that does not see it.
    """
    work: dict[str, list[tuple[TablePiece, _Group, np.ndarray]]] = {}
    numbers = itertools.count(_FIRST_FILE)
    for group in _groups(variables):
        ids = group.sorted_ids()
        devices = itertools.cycle(group.devices)
        for places in pieces_of(len(ids), 8 + group.row_bytes):
            keys = list(group.variables)
            piece = TablePiece(f"{next(numbers):06d}", keys, places.start, len(places))
            of_device = work.setdefault(next(devices), [])
            of_device.append((piece, group, ids[places.start : places.stop]))

    def write_all(device: str) -> None:
        writer = device if sees(device, probe) else COORDINATOR_CPU
        for piece, group, ids in work[device]:
            prefix = f"{directory}/{piece.file}"
            persist(functools.partial(_write, prefix, group, ids, writer))

    on_each_device(write_all, work)
    return [piece for of_device in work.values() for piece, _, _ in of_device]


def read_tables(
    pieces: Iterable[TablePiece], variables: Mapping[str, KeyedVariable], directory: str
) -> None:
    """Read all files of tables, to learn whether they are damaged.

    Raises tf.errors.OpError if a file is damaged, or a ps is lost.
    """
    _read_all(pieces, variables, directory, lambda piece, values, device: None)


def restore_tables(
    pieces: Sequence[TablePiece], variables: Mapping[str, KeyedVariable], directory: str
) -> None:
    """Set tables and their slots to the rows of a backup; other rows are removed.

    Raises:
        tf.errors.OpError: a file is damaged, or a ps is lost.
        InputError: a table has no room for its rows.
    """
    ids_of: dict[str, list[np.ndarray]] = {key: [] for key in variables}

    def assign(piece: TablePiece, values: list[tf.Tensor], device: str) -> None:
        (ids,) = fetch(values[:1])
        for key, rows in zip(piece.tables, values[1:], strict=True):
            variables[key].access.write_from(ids, rows, device)
            ids_of[key].append(ids)

    _read_all(pieces, variables, directory, assign)
    for key, variable in variables.items():
        variable.access.finish(np.concatenate([np.zeros(0, np.int64), *ids_of[key]]))


def _groups(variables: Mapping[str, KeyedVariable]) -> list[_Group]:
    groups: dict[int, _Group] = {}
    for key, variable in variables.items():
        table = variable.storage.table
        groups.setdefault(id(table), _Group({})).variables[key] = variable
    return list(groups.values())


def _write(prefix: str, group: _Group, ids: np.ndarray, device: str) -> None:
    rows = [variable.access.read_on(ids, device) for variable in group.variables.values()]
    with tf.device(device):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[f"{index}" for index in range(1 + len(rows))],
            shape_and_slices=[""] * (1 + len(rows)),
            tensors=[tf.constant(ids), *rows],
        )


def _read_all(
    pieces: Iterable[TablePiece],
    variables: Mapping[str, KeyedVariable],
    directory: str,
    use: Callable[[TablePiece, list[tf.Tensor], str], None],
) -> None:
    """Read all files, and call `use` with the tensors of each and the device that they are on."""
    work: dict[str, list[TablePiece]] = {}
    for piece, device in zip(pieces, _devices(variables), strict=False):
        work.setdefault(device, []).append(piece)

    def read_all(device: str) -> None:
        reader = device if sees(device, f"{directory}/{work[device][0].file}.index") else None
        reader = reader or COORDINATOR_CPU
        for piece in work[device]:
            values = persist(functools.partial(_read, directory, piece, variables, reader))
            use(piece, values, reader)

    on_each_device(read_all, work)


def _devices(variables: Mapping[str, KeyedVariable]) -> Iterator[str]:
    return itertools.cycle(
        str(shard.device) for variable in list(variables.values())[:1] for shard in variable.shards
    )


def _read(
    directory: str, piece: TablePiece, variables: Mapping[str, KeyedVariable], device: str
) -> list[tf.Tensor]:
    with tf.device(device):
        values: list[tf.Tensor] = tf.raw_ops.RestoreV2(
            prefix=f"{directory}/{piece.file}",
            tensor_names=[f"{index}" for index in range(1 + len(piece.tables))],
            shape_and_slices=[""] * (1 + len(piece.tables)),
            dtypes=[tf.int64, *(variables[key].access.dtype for key in piece.tables)],
        )
    return values
