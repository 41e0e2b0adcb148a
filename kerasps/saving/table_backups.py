"""Tables without a vocabulary in backups: copies of their rows, which the ps write meanwhile.

When no step is in flight, each ps copies the ids and rows that it holds of each table, and of its
slots. Then training continues, and the ps write the copies. A file of a backup has some ids that
one ps holds, in no order, and the rows of these ids, of the table and of its slots. If a ps does
not see the directory, the coordinator fetches the rows and writes its files. A delta has only the
rows that changed since the version of the backup before, and its manifest has the removed ids.
"""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import unmixed
from kerasps.dynamic.parts.keyed_rows import KeyedRows
from kerasps.dynamic.policies.stamps import all_changed_places
from kerasps.dynamic.policies.terms import SLOT_BITS, SlotTerms, salt_in_pool
from kerasps.dynamic.tables.changed import ChangedRows, version_in
from kerasps.dynamic.tables.row_access import pieces_of
from kerasps.dynamic.tables.table import KeyedVariable
from kerasps.runtime.calls import persist
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.fetching import fetch
from kerasps.runtime.on_ps import OnPS, call_on_each
from kerasps.saving.checkpoints import sees
from kerasps.saving.damage import naming_damaged_checkpoint
from kerasps.saving.variable_copies import on_each_device, save_values
from kerasps.variables import ParameterServerVariable

# Above the numbers of the files of other variables.
_FIRST_FILE = 100_000
# The version of each table (see `ChangedRows`), by the key of its first variable.
Versions = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TablePiece:
    """Some ids of a table, and their rows, in a file of a backup."""

    # The prefix of the file within the backup's directory. The tensor 0 in it has the ids, and the
    # following ones have rows.
    file: str
    tables: list[str]  # the keys of the variables that have these rows: the table, and its slots


def tables_of(
    variables: Mapping[str, ParameterServerVariable],
) -> dict[str, KeyedVariable]:
    """Return those of some variables that are tables without a vocabulary, or slots of one."""
    return {key: each for key, each in variables.items() if isinstance(each, KeyedVariable)}


@dataclass(frozen=True)
class _Copy:
    """The copy of a table, and of its slots, on one ps: variables with a name there.

    The first has the keys, and the others have their rows.

    Attributes:
        keys: the keys of the variables that have the rows: the table, and its slots.
        part: the number of the part that has them.
        rows: their rows, on this ps.
        slots: the terms of the slots; None for the table.
        name: the beginning of the names of the copies.
    """

    keys: list[str]
    part: int
    rows: list[KeyedRows]
    slots: list[SlotTerms | None]
    name: str

    @property
    def device(self) -> str:
        return self.rows[0].device

    @property
    def row_bytes(self) -> int:
        """The bytes of an id, and of its rows."""
        return 8 + sum(int(rows.shape[1]) * int(rows.dtype.size) for rows in self.rows)

    # What follows adds operations to a graph on the ps.

    def make(self, since: tf.Tensor) -> tf.Tensor:
        """Copy keys and rows that changed since a version, 0 for all; return how many."""
        part = self.rows[0].part
        places = all_changed_places(part, self.rows[0].table.holder, since)
        tags = part.store(part.tags).gather(places)
        begun = tf.bitwise.bitwise_and(tags, np.int32(2**SLOT_BITS - 1))
        values = [part.store(part.keys).gather(places)]
        for rows, slot in zip(self.rows, self.slots, strict=True):
            value = rows.store.gather(places)
            values.append(value if slot is None else _begun(value, begun, slot))
        for handle, value in zip(self._handles(), values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return tf.size(places, tf.int64)

    def read(self, begin: tf.Tensor, size: tf.Tensor) -> list[tf.Tensor]:
        """Return some of the ids, and their rows."""
        dtypes = [tf.int64, *(rows.dtype for rows in self.rows)]
        keys, *rows = [
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)[begin : begin + size]
            for handle, dtype in zip(self._handles(), dtypes, strict=True)
        ]
        return [unmixed(keys) - salt_in_pool(self.rows[0].table.number), *rows]

    def write(self, prefix: tf.Tensor, begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """Write them into a file."""
        # TensorFlow does not count `SaveV2` as stateful, so only a control dependency runs it.
        with tf.control_dependencies([save_values(prefix, self.read(begin, size))]):
            return tf.constant(0)

    def free(self) -> tf.Tensor:
        """Free the memory of the copies."""
        for handle in self._handles():
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
        return tf.constant(0)

    def _handles(self) -> list[tf.Tensor]:
        kinds = [([None], tf.int64)]
        kinds += [([None, *rows.shape[1:]], rows.dtype) for rows in self.rows]
        return [
            tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=shape, container="", shared_name=f"{self.name}/{index}"
            )
            for index, (shape, dtype) in enumerate(kinds)
        ]


def _begun(value: tf.Tensor, begun: tf.Tensor, slot: SlotTerms) -> tf.Tensor:
    """Return rows of a slot; those that have not begun are what they begin as."""
    has_begun = begun >= slot.number

    def with_others() -> tf.Tensor:
        return tf.where(has_begun[:, None], value, tf.cast(slot.begins_as, slot.dtype))

    return tf.cond(tf.reduce_all(has_begun), lambda: value, with_others)


class TableCopies:
    """Copies of tables and their slots, on their ps."""

    def __init__(self, variables: Mapping[str, KeyedVariable]) -> None:
        tables: dict[int, dict[str, KeyedVariable]] = {}
        for key, variable in variables.items():
            tables.setdefault(id(variable.storage.table), {})[key] = variable
        unique = uuid.uuid4().hex
        self._by_device: dict[str, list[_Copy]] = {}
        # One variable of each table, by its key.
        self._tables: dict[str, KeyedVariable] = {}
        for number, members in enumerate(tables.values()):
            slots = [variable.storage.terms for variable in members.values()]
            name = f"kerasps backup {unique}/{number}"
            self._tables[next(iter(members))] = next(iter(members.values()))
            shards = zip(*(v.storage.shards for v in members.values()), strict=True)
            for part, rows in enumerate(shards):
                copy = _Copy(list(members), part, list(rows), slots, name)
                self._by_device.setdefault(copy.device, []).append(copy)
        self._functions: dict[tuple[object, ...], OnPS] = {}
        # The number of ids in each copy.
        self._sizes: dict[int, int] = {}

    def changes(self, versions: Versions) -> dict[str, ChangedRows]:
        """Return the changes of each table since a version; begin new versions."""
        return {
            key: table.access.changes.since(versions.get(key), 1)
            for key, table in self._tables.items()
        }

    def make(self, versions: Versions) -> None:
        """Copy the rows that changed since some versions. Call when no step is in flight.

        Args:
            versions: the version of each table; a table without one is copied whole.
        """
        copies = [copy for of_device in self._by_device.values() for copy in of_device]

        def make() -> list[np.ndarray]:
            return fetch(
                [
                    self._on_ps(copy, _Copy.make).start(
                        version_in(versions.get(copy.keys[0], ()), copy.part)
                    )[0]
                    for copy in copies
                ]
            )

        sizes = persist(make)
        self._sizes = {id(copy): int(size) for copy, size in zip(copies, sizes, strict=True)}

    def free(self) -> None:
        """Free the memory of the copies on each ps."""
        copies = [copy for of_device in self._by_device.values() for copy in of_device]
        call_on_each([self._on_ps(copy, _Copy.free) for copy in copies])

    def write(self, directory: str, probe: str) -> list[TablePiece]:
        """Write the copies into files. Thread: any.

        Args:
            directory: the absolute path of a directory.
            probe: a file in it. The coordinator writes the copies of a ps that does not see it.

        Returns:
            The pieces in the files.
        """
        numbers = itertools.count(_FIRST_FILE)
        work = {
            device: [
                (copy, places, f"{next(numbers):06d}")
                for copy in copies
                for places in pieces_of(self._sizes[id(copy)], copy.row_bytes)
            ]
            for device, copies in self._by_device.items()
        }

        def write_all(device: str) -> None:
            writes_itself = sees(device, probe)
            for copy, places, file in work[device]:
                place = places.start, len(places)
                if writes_itself:
                    self._on_ps(copy, _Copy.write).call(f"{directory}/{file}", *place)
                    continue
                values = self._on_ps(copy, _Copy.read).call(*place)
                with tf.device(COORDINATOR_CPU):
                    save_values(
                        tf.constant(f"{directory}/{file}"), [tf.constant(v) for v in values]
                    )

        on_each_device(write_all, self._by_device)
        return [
            TablePiece(file, copy.keys) for written in work.values() for copy, _, file in written
        ]

    def _on_ps(self, copy: _Copy, act: Callable[..., object]) -> OnPS:
        """Return a function on the ps of a copy; trace it at the first call for it."""
        key = id(copy), act
        if key not in self._functions:
            place = [tf.TensorSpec([], tf.int64)] * 2
            specs = {
                _Copy.make: place[:1],
                _Copy.read: place,
                _Copy.write: [tf.TensorSpec([], tf.string), *place],
            }
            body = functools.partial(act, copy)
            self._functions[key] = OnPS(copy.device, body, *specs.get(act, []))
        return self._functions[key]


def read_tables(
    pieces: Iterable[TablePiece], variables: Mapping[str, KeyedVariable], directory: str
) -> None:
    """Read all files of tables, to learn whether they are damaged.

    Raises tf.errors.OpError if a file is damaged, or a ps is lost.
    """
    _read_all(pieces, variables, directory, lambda piece, values, device: None)


class TableRestorer:
    """Sets tables and their slots to the rows of a backup, or of one and its deltas in turn.

    Other rows are removed in the end.
    """

    def __init__(self, variables: Mapping[str, KeyedVariable]) -> None:
        self._variables = variables
        self._ids_of = {key: np.zeros(0, np.int64) for key in variables}

    def write(
        self, pieces: Iterable[TablePiece], removed: Mapping[str, np.ndarray], directory: str
    ) -> None:
        """Write the rows of a backup.

        Args:
            removed: the ids whose rows are removed first, by the key of a variable of their table.

        Raises:
            tf.errors.OpError: a file is damaged, or a ps is lost.
            InputError: a table has no room for its rows.
        """
        variables, written = self._variables, self._ids_of
        for key, ids in removed.items():
            variables[key].access.remove(ids)
            for each, variable in variables.items():
                if variable.table_of_rows is variables[key].table_of_rows:
                    written[each] = np.setdiff1d(written[each], ids, assume_unique=True)
        new: dict[str, list[np.ndarray]] = {key: [] for key in variables}

        def assign(piece: TablePiece, values: list[tf.Tensor], device: str) -> None:
            (ids,) = fetch(values[:1])
            for key, rows in zip(piece.tables, values[1:], strict=True):
                variables[key].access.write_from(ids, rows, device)
                new[key].append(ids)

        _read_all(pieces, variables, directory, assign)
        for key, of_files in new.items():
            written[key] = np.unique(np.concatenate([written[key], *of_files]))

    def finish(self) -> None:
        """Remove other rows."""
        for key, variable in self._variables.items():
            variable.access.finish(self._ids_of[key])


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
            with naming_damaged_checkpoint(f"{directory}/{piece.file}"):
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
