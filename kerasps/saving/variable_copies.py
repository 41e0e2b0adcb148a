"""Copies of variables on their ps, which the ps write into a backup while the training continues.

Between two updates each ps assigns its variables to copies on the same ps. That takes no time if
TensorFlow lets both share a buffer until one of them changes; otherwise it takes a copy in memory.
Then training continues. The ps write the copies in parts of `PART_BYTES`, so that no write blocks
one of their threads for long. If a ps does not see the directory, the coordinator fetches the parts
and writes them.
"""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from kerasps.runtime.calls import call_uncancellable, persist, separate_executor
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.fetching import fetch
from kerasps.saving.backup_files import Backup
from kerasps.saving.checkpoints import sees
from kerasps.saving.damage import naming_damaged_checkpoint
from kerasps.variables import ParameterServerVariable
from kerasps.variables.rows.chunks import num_bytes, row_bytes
from kerasps.variables.rows.pooled_rows import PooledRows, store_of
from kerasps.variables.rows.sharding import ShardedStorage

# A disk writes a part in a fraction of a second, and it fits into the coordinator's memory.
PART_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """A range of rows of a variable, in a file of a backup."""

    key: str  # the key of the variable
    file: str  # the prefix of the file within the backup's directory
    name: str  # the name of the tensor in it
    rows: list[int] | None = None  # start, stop and step of the rows; None for the whole variable


@dataclass(frozen=True)
class _Held:
    """A shard and its copy, which has a name on the ps."""

    key: str
    shard: Any
    rows: range | None
    copy_name: str

    def copy_handle(self) -> tf.Tensor:
        """Return the handle of the copy. Call in the graph of a function on its ps."""
        return tf.raw_ops.VarHandleOp(
            dtype=self.shard.dtype,
            shape=self.shard.shape,
            container="",
            shared_name=self.copy_name,
        )

    def copy(self) -> None:
        if isinstance(self.shard, PooledRows):
            value = self.shard.read_value()
        else:
            value = tf.raw_ops.ReadVariableOp(resource=self.shard.handle, dtype=self.shard.dtype)
        tf.raw_ops.AssignVariableOp(resource=self.copy_handle(), value=value)

    def read(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self.copy_handle(), dtype=self.shard.dtype)

    def free(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self.copy_handle(), ignore_lookup_error=True)


@dataclass(frozen=True)
class _Part:
    """Values that are written together: some shards of one ps, or some rows of a large shard."""

    device: str  # the device of the ps
    held: tuple[_Held, ...]  # the shards
    rows: range | None = None  # the places in the only shard; None for all rows of all shards

    def pieces(self, file: str) -> list[Piece]:
        """Return the pieces in a file with this part."""
        return [
            Piece(held.key, file, f"{index}", self._rows_of(held))
            for index, held in enumerate(self.held)
        ]

    def _rows_of(self, held: _Held) -> list[int] | None:
        if held.rows is None:
            return None
        rows = held.rows if self.rows is None else held.rows[self.rows.start : self.rows.stop]
        return [rows.start, rows.stop, rows.step]


class VariableCopies:
    """Copies of variables on their ps."""

    def __init__(self, variables: Mapping[str, ParameterServerVariable]) -> None:
        unique = uuid.uuid4().hex
        self._by_device: dict[str, list[_Held]] = {}
        numbers = itertools.count()
        for key, variable in variables.items():
            for shard, rows in _shards(variable):
                held = _Held(key, shard, rows, f"kerasps backup {unique}/{next(numbers)}")
                self._by_device.setdefault(str(shard.device), []).append(held)
        self._parts = [
            part for device, copies in self._by_device.items() for part in _parts(device, copies)
        ]
        self._functions: dict[Any, Any] = {}

    def make(self) -> None:
        """Copy the variables. Call when no step is in flight."""
        self._on_all("copy", _Held.copy)

    def free(self) -> None:
        """Free the memory of the copies on each ps."""
        self._on_all("free", _Held.free)

    def write(self, directory: str, probe: str) -> list[Piece]:
        """Write the copies into files. Thread: any.

        Args:
            directory: the absolute path of a directory.
            probe: a file in it. The coordinator writes the copies of a ps that does not see it.

        Returns the pieces in the files.
        """
        files = {id(part): f"{number:04d}" for number, part in enumerate(self._parts)}

        def write_all(device: str) -> None:
            writes_itself = sees(device, probe)
            for part in self._parts:
                if part.device == device:
                    prefix = f"{directory}/{files[id(part)]}"
                    write = self._write if writes_itself else self._write_here
                    persist(functools.partial(write, part, prefix))

        on_each_device(write_all, self._by_device)
        return [piece for part in self._parts for piece in part.pieces(files[id(part)])]

    def _on_all(self, name: str, act: Callable[[_Held], object]) -> None:
        """Call `act` for each copy, on all ps at the same time."""
        done = []
        for device, copies in self._by_device.items():

            def act_on_all(copies: Sequence[_Held] = copies) -> tf.Tensor:
                for held in copies:
                    act(held)
                # TensorFlow does not wait for a remote call that returns nothing.
                return tf.constant(0)

            call = functools.partial(self._call, (name, device), device, act_on_all, [])
            done += persist(call)
        persist(functools.partial(fetch, done))

    def _write(self, part: _Part, prefix: str) -> None:
        """Make a ps write a part."""

        def write(prefix: tf.Tensor, begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
            # TensorFlow does not count `SaveV2` as stateful, so only a control dependency runs it.
            with tf.control_dependencies([save_values(prefix, _values(part, begin, size))]):
                return tf.constant(0)

        with tf.device(part.device):
            place = [tf.constant(prefix), *_place(part)]
        fetch(self._call(("write", part.held[0].copy_name), part.device, write, place))

    def _write_here(self, part: _Part, prefix: str) -> None:
        """Fetch a part, and write it on the coordinator."""

        def read(begin: tf.Tensor, size: tf.Tensor) -> list[tf.Tensor]:
            return _values(part, begin, size)

        with tf.device(part.device):
            place = _place(part)
        values = fetch(self._call(("read", part.held[0].copy_name), part.device, read, place))
        with tf.device(COORDINATOR_CPU):
            save_values(tf.constant(prefix), [tf.constant(value) for value in values])

    def _call(
        self,
        key: Hashable,
        device: str,
        function: Callable[..., object],
        arguments: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Call a function on a device; trace it at the first call for `key`."""
        if key not in self._functions:

            def on_device(*tensors: tf.Tensor) -> Any:
                with tf.device(device):
                    return function(*tensors)

            with tf.init_scope():
                specs = [tf.TensorSpec(argument.shape, argument.dtype) for argument in arguments]
                self._functions[key] = tf.function(
                    on_device, autograph=False
                ).get_concrete_function(*specs)
        with tf.device(device):
            return call_uncancellable(self._functions[key], arguments)


def _shards(
    variable: ParameterServerVariable,
) -> list[tuple[Any, range | None]]:
    """Return each shard of a variable with its rows, which are None for a scalar."""
    sharding, shards = variable.sharding, variable.shards
    if sharding is not None:
        return [(shard, sharding.rows(index)) for index, shard in enumerate(shards)]
    (whole,) = shards
    return [(whole, range(int(whole.shape[0])) if whole.shape.rank else None)]


def _parts(device: str, copies: Sequence[_Held]) -> list[_Part]:
    """Divide the copies of a ps into parts."""
    parts: list[_Part] = []
    small: list[_Held] = []
    size = 0
    for held in copies:
        held_bytes = num_bytes(held.shard)
        if held_bytes > PART_BYTES and held.rows is not None:
            step = max(1, PART_BYTES // row_bytes(held.shard))
            parts += [
                _Part(device, (held,), range(start, min(start + step, len(held.rows))))
                for start in range(0, len(held.rows), step)
            ]
            continue
        if small and size + held_bytes > PART_BYTES:
            parts.append(_Part(device, tuple(small)))
            small, size = [], 0
        small.append(held)
        size += held_bytes
    return [*parts, _Part(device, tuple(small))] if small else parts


def _place(part: _Part) -> list[tf.Tensor]:
    rows = part.rows or range(0)
    return [tf.constant(rows.start), tf.constant(len(rows))]


def _values(part: _Part, begin: tf.Tensor, size: tf.Tensor) -> list[tf.Tensor]:
    """Return the values of a part. Call in the graph of a function on its ps."""
    values = [held.read() for held in part.held]
    return values if part.rows is None else [values[0][begin : begin + size]]


def save_values(prefix: tf.Tensor, values: Sequence[tf.Tensor]) -> Any:
    """Write tensors into a file, under their numbers."""
    return tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[f"{index}" for index in range(len(values))],
        shape_and_slices=[""] * len(values),
        tensors=values,
    )


def specs_of(variables: Mapping[str, ParameterServerVariable]) -> dict[str, dict[str, Any]]:
    """Return the spec of each variable in a backup: its path, shape and dtype."""
    return {
        key: {
            "path": variable.path,
            "shape": [int(size) for size in variable.shape],
            "dtype": variable.shards[0].dtype.name,
        }
        for key, variable in variables.items()
    }


def restore(backup: Backup, variables: Mapping[str, ParameterServerVariable]) -> None:
    """Restore variables from a backup; ps that see its files read them.

    All files are read twice. The first time shows damage before a variable has changed. Raises
    tf.errors.OpError if a file is damaged, or a ps is lost.
    """
    files: dict[str, list[Piece]] = {}
    for entry in backup.pieces:
        piece = Piece(**entry)
        files.setdefault(piece.file, []).append(piece)
    by_device: dict[str, list[list[Piece]]] = {}
    for pieces in files.values():
        by_device.setdefault(_reader(pieces[0], variables), []).append(pieces)

    def read_all(device: str, *, assigns: bool) -> None:
        of_device = by_device[device]
        probe = f"{backup.directory}/{of_device[0][0].file}.index"
        reader = device if sees(device, probe) else COORDINATOR_CPU
        for pieces in of_device:
            prefix = f"{backup.directory}/{pieces[0].file}"
            with naming_damaged_checkpoint(prefix):
                values = persist(functools.partial(_values_of, prefix, pieces, variables, reader))
            for piece, value in zip(pieces, values, strict=True) if assigns else ():
                persist(functools.partial(_assign, variables[piece.key], piece, value, reader))

    for assigns in (False, True):
        on_each_device(functools.partial(read_all, assigns=assigns), by_device)


def _reader(piece: Piece, variables: Mapping[str, ParameterServerVariable]) -> str:
    """Return the device of the ps that has the first row of a piece."""
    variable = variables[piece.key]
    if piece.rows is None or variable.sharding is None:
        return variable.device
    first = piece.rows[0]
    index = next(i for i, (_, rows) in enumerate(_shards(variable)) if rows and first in rows)
    return str(variable.shards[index].device)


def _values_of(
    prefix: str,
    pieces: Sequence[Piece],
    variables: Mapping[str, ParameterServerVariable],
    device: str,
) -> list[tf.Tensor]:
    """Return the values of pieces in a file, on the device that reads them."""
    with tf.device(device):
        values: list[tf.Tensor] = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[piece.name for piece in pieces],
            shape_and_slices=[""] * len(pieces),
            dtypes=[variables[piece.key].shards[0].dtype for piece in pieces],
        )
    return values


def _assign(variable: ParameterServerVariable, piece: Piece, value: tf.Tensor, device: str) -> None:
    """Assign a piece to the shards that have its rows."""
    rows = None if piece.rows is None else range(*piece.rows)
    for shard, shard_rows in _shards(variable):
        if shard_rows == rows:
            with tf.device(shard.device):
                shard.assign(value, read_value=False)
            return
        if (
            rows
            and shard_rows
            and rows.step == shard_rows.step
            and rows[0] in shard_rows
            and rows[-1] in shard_rows
        ):
            begin = shard_rows.index(rows[0])
            store_of(shard).write(range(begin, begin + len(rows)), value)
            return
    assert rows is not None  # a scalar has one shard
    storage = variable.storage
    with tf.device(device):
        indices = tf.range(*(tf.constant(n, tf.int64) for n in (rows.start, rows.stop, rows.step)))
        slices = tf.IndexedSlices(value, indices)
        if isinstance(storage, ShardedStorage):
            storage.scatter_update(slices)
        else:
            with tf.device(storage.device):
                storage.scatter_update(slices)


def on_each_device(function: Callable[[str], None], devices: Collection[str]) -> None:
    """Call a function for each device, each in a separate thread and executor."""

    def call(device: str) -> None:
        with separate_executor():
            function(device)

    with ThreadPoolExecutor(max(1, len(devices))) as pool:
        list(pool.map(call, devices))


def to_record(pieces: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the pieces in the form of a manifest."""
    return [asdict(piece) for piece in pieces]
