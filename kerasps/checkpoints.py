"""What TensorFlow's checkpoints and SavedModels do with variables on ps tasks.

TensorFlow has each ps write the variables that it holds. A variable in shards is written by the ps too, in pieces (see
`pieces.py`) that together are one logical tensor under the variable's own key: whoever reads it sees no shards. One piece per
ps is in the making at a time. Where the ps do not see the directory, the coordinator writes instead, piece by piece.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.pieces import PIECE_BYTES, pieces, read_rows, row_bytes, write_rows
from kerasps.placement import COORDINATOR_CPU
from kerasps.sharding import ShardedStorage, WholeValue
from kerasps.variables import come_to_rest

# As many ps have work at a time; each costs the coordinator a thread that waits.
_MOST_AT_ONCE = 64


@dataclass(frozen=True)
class _Piece:
    """Some rows of a sharded variable, its key in the checkpoint, and the device that writes or reads them there."""

    key: str
    storage: ShardedStorage
    rows: range
    device: str

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * row_bytes(self.storage)

    @property
    def spec(self) -> str:
        """What TensorFlow calls shape and slice."""
        shape = self.storage.shape.as_list()
        slices = [f"{self.rows.start},{len(self.rows)}", *("-" for _ in shape[1:])]
        return " ".join(map(str, shape)) + " " + ":".join(slices)


class ShardedSaver:
    """Writes and reads the sharded variables of one checkpoint; TensorFlow's own saver, which does the rest, calls it.

    Args:
        storages: the storages, by their keys in the checkpoint.
    """

    def __init__(self, storages: Mapping[str, ShardedStorage]) -> None:
        self._storages = dict(storages)
        self._prefix = ""
        self._io_device: str | None = None

    @property
    def devices(self) -> set[str]:
        """The devices of the shards."""
        return {str(shard.device) for storage in self._storages.values() for shard in storage.shards}

    def prepare(self, prefix: str, io_device: str | None) -> None:
        """Says where the checkpoint is, and which device reads or writes it; None for the ps that hold the shards."""
        self._prefix, self._io_device = prefix, io_device

    def save(self, unused_prefix: tf.Tensor) -> list[tf.Tensor]:
        """Writes the variables into files of their own; returns the prefixes of these, for TensorFlow to merge."""
        del unused_prefix
        batches: dict[str, list[list[_Piece]]] = {}
        for key, storage in self._storages.items():
            for piece in self._pieces(key, storage, pieces(storage)):
                of_device = batches.setdefault(piece.device, [[]])
                if of_device[-1] and sum(p.num_bytes for p in of_device[-1]) + piece.num_bytes > PIECE_BYTES:
                    of_device.append([])
                of_device[-1].append(piece)
        prefixes = {
            device: [f"{self._prefix}_temp/shards-{task}-{index}" for index in range(len(of_device))]
            for task, (device, of_device) in enumerate(batches.items())
        }

        def write(device: str) -> None:
            for prefix, batch in zip(prefixes[device], batches[device], strict=True):
                values = [read_rows(piece.storage, piece.rows, device) for piece in batch]
                with tf.device(device):
                    tf.raw_ops.SaveV2(
                        prefix=prefix,
                        tensor_names=[piece.key for piece in batch],
                        shape_and_slices=[piece.spec for piece in batch],
                        tensors=values,
                    )

        _at_once(write, batches)
        return [tf.constant(prefix) for of_device in prefixes.values() for prefix in of_device]

    def restore(self, unused_prefix: tf.Tensor) -> None:
        """Reads the variables."""
        del unused_prefix
        reader = tf.train.load_checkpoint(self._prefix)
        shapes, content = reader.get_variable_to_shape_map(), reader.debug_string()
        small: dict[str, list[_Piece]] = {}
        large: list[_Piece] = []
        for key, storage in self._storages.items():
            if shapes[key] != storage.shape.as_list():
                raise ValueError(
                    f"A checkpoint has a value of another shape than the variable '{storage.name}'. Expected: "
                    f"{tuple(storage.shape)}. Received: {tuple(shapes[key])} for '{key}' in {self._prefix}. Restore it into a "
                    "model of the size that was saved."
                )
            # TensorFlow reads what was written in one piece in one piece, however little of it is asked for.
            stored = _stored_rows(content, key)
            if stored * row_bytes(storage) <= 2 * PIECE_BYTES:
                for piece in self._pieces(key, storage, pieces(storage)):
                    small.setdefault(piece.device, []).append(piece)
            else:
                num_rows = shapes[key][0]
                ranges = [range(start, min(start + stored, num_rows)) for start in range(0, num_rows, stored)]
                large += self._pieces(key, storage, ranges)
        _at_once(self._read, small.values())
        _at_once(self._read, [large])  # one after the other, or several would be in memory

    def _read(self, work: Iterable[_Piece]) -> None:
        for piece in work:
            with tf.device(piece.device):
                (value,) = tf.raw_ops.RestoreV2(
                    prefix=self._prefix,
                    tensor_names=[piece.key],
                    shape_and_slices=[piece.spec],
                    dtypes=[piece.storage.dtype],
                )
            step = max(1, PIECE_BYTES // row_bytes(piece.storage))
            for start in range(piece.rows.start, piece.rows.stop, step):
                rows = range(start, min(start + step, piece.rows.stop))
                with tf.device(piece.device):
                    part = value[start - piece.rows.start : rows.stop - piece.rows.start]
                write_rows(piece.storage, rows, part, piece.device)

    def _pieces(self, key: str, storage: ShardedStorage, ranges: Sequence[range]) -> list[_Piece]:
        # The n-th part of the rows is the work of the ps with the n-th shard.
        shards = storage.shards
        devices = [str(shards[index * len(shards) // len(ranges)].device) for index in range(len(ranges))]
        return [_Piece(key, storage, rows, self._io_device or own) for rows, own in zip(ranges, devices, strict=True)]


def make_saver(original: Callable[..., None], saver: Any, serialized_tensors: Any, *args: Any, **kwargs: Any) -> None:
    """`MultiDeviceSaver.__init__`: what is in shards is left to a `ShardedSaver`."""
    others = type(serialized_tensors)()
    storages = {}
    for trackable, tensors in serialized_tensors.items():
        mine = {key: value.storage for key, value in tensors.items() if isinstance(value, WholeValue)}
        storages.update(mine)
        if not mine:
            others[trackable] = tensors
    original(saver, others, *args, **kwargs)
    if storages:
        sharded = ShardedSaver(storages)
        saver.kerasps_sharded = sharded
        saver._registered_savers["kerasps"] = sharded.save, sharded.restore


def save(original: Callable[..., Any], saver: Any, file_prefix: Any, options: Any = None) -> Any:
    """`MultiDeviceSaver.save`: to an absolute path, since each task has a working directory of its own."""
    come_to_rest()
    if not tf.executing_eagerly() or not _ps_devices(saver):
        return original(saver, file_prefix, options)
    prefix = _absolute(file_prefix)
    directory = os.path.dirname(prefix)
    tf.io.gfile.makedirs(directory)
    probe = os.path.join(directory, f".probe-{uuid.uuid4().hex}")
    with tf.io.gfile.GFile(probe, "w") as file:
        file.write("Made to learn which tasks see this directory; can be deleted.")
    try:
        options = _reaching(saver, options, probe)
    finally:
        tf.io.gfile.remove(probe)
    return _run(original, saver, prefix, options)


def restore(original: Callable[..., Any], saver: Any, file_prefix: Any, options: Any = None) -> Any:
    """`MultiDeviceSaver.restore`; the counterpart of `save`."""
    if not tf.executing_eagerly() or not _ps_devices(saver):
        return original(saver, file_prefix, options)
    prefix = _absolute(file_prefix)
    return _run(original, saver, prefix, _reaching(saver, options, f"{prefix}.index"))


def _run(original: Callable[..., Any], saver: Any, prefix: str, options: Any) -> Any:
    sharded = getattr(saver, "kerasps_sharded", None)
    if sharded is not None:
        sharded.prepare(prefix, options.experimental_io_device)
    with tf.device(COORDINATOR_CPU):
        file_prefix = tf.constant(prefix)
    return original(saver, file_prefix, options)


def _reaching(saver: Any, options: Any, path: str) -> Any:
    """The options, with the coordinator as the device that reads and writes files unless every ps sees `path`."""
    options = options or tf.train.CheckpointOptions()
    io_device = options.experimental_io_device
    if io_device is None:
        if all(_sees(device, path) for device in sorted(_ps_devices(saver))):
            return options
        io_device = COORDINATOR_CPU
    spec = tf.DeviceSpec.from_string(io_device)
    if spec.job in ("localhost", "chief"):  # what TensorFlow's documents name; it would fill in the task of a ps
        io_device = COORDINATOR_CPU
    return tf.train.CheckpointOptions(
        experimental_io_device=io_device, experimental_sharding_callback=options.experimental_sharding_callback
    )


def _sees(device: str, path: str) -> bool:
    try:
        with tf.device(device):
            tf.raw_ops.ReadFile(filename=path)
    except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.UnimplementedError):
        return False
    return True


def _ps_devices(saver: Any) -> set[str]:
    sharded = getattr(saver, "kerasps_sharded", None)
    whole = {task.to_string() for task in saver._shardable_tensors_by_task if task.job == "ps"}
    return whole if sharded is None else whole | sharded.devices


def _absolute(file_prefix: Any) -> str:
    prefix = str(tf.convert_to_tensor(file_prefix).numpy().decode())
    return prefix if "://" in prefix else os.path.abspath(prefix)


def _stored_rows(content: bytes, key: str) -> int:
    """The rows of the largest piece in which a checkpoint holds the tensor `key`.

    Args:
        content: what its reader says of it: a line per piece, with the key as it is or, for a slice, in TensorFlow's ordered
            code (zero, the name, the end of a string), the dtype and the shape.
        key: the key of the tensor.
    """
    name = re.escape(key.encode())
    lines = re.findall(rb"(?:^|\n)(?:%b|\x00%b\x00\x01.+?) \(DT_\w+\) \[(\d+)[\d,]*\]" % (name, name), content, re.DOTALL)
    return max(map(int, lines))


def _at_once(function: Callable[[Any], None], arguments: Iterable[Any]) -> None:
    # In threads of their own, which are eager also while this one traces a function.
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        list(pool.map(function, arguments))
