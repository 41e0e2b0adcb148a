"""Writes variables on ps tasks into TensorFlow's checkpoints and SavedModels, and reads them.

In TensorFlow each ps writes its variables. The ps also write sharded variables, in chunks
(`variables/rows/chunks.py`). Together the chunks are one logical tensor under the variable's key,
so a reader sees no shards. Each ps writes one chunk at a time. If the ps do not see the directory,
the coordinator writes the chunks.

A table without a vocabulary has two keys, `…/IDS` and `…/ROWS`, and so has each of its slots: int64
ids, ascending, and rows in their order. The ps write and read them in chunks too.
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

from kerasps import _compat
from kerasps.dynamic.tables.row_files import TableValue
from kerasps.runtime.calls import persist
from kerasps.runtime.connected import connected_host, connected_strategy
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.errors import lost_ps, translated_errors
from kerasps.saving.damage import naming_damaged_checkpoint
from kerasps.saving.stored_values import (
    Stored,
    ids_key_of,
    stored_in_checkpoint,
    stored_now,
)
from kerasps.variables import wait_for_steps
from kerasps.variables.rows.chunks import CHUNK_BYTES, row_bytes
from kerasps.variables.rows.sharding import WholeValue

# The most ps that work at the same time. Each costs the coordinator a waiting thread, and few
# clusters have more ps.
_MOST_AT_ONCE = 64


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a value that the ps hold together."""

    key: str
    stored: Stored
    rows: range
    device: str

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * row_bytes(self.stored)

    @property
    def spec(self) -> str:
        """The shape of the whole value and the slice of the chunk, as text of TensorFlow's."""
        shape = self.stored.shape.as_list()
        if not len(self.rows):
            return ""  # a whole without rows, as TensorFlow has no slice without
        slices = [f"{self.rows.start},{len(self.rows)}", *("-" for _ in shape[1:])]
        return " ".join(map(str, shape)) + " " + ":".join(slices)

    def restore(self, prefix: str) -> None:
        """Read the chunk from a checkpoint, and write it to the variable."""
        with tf.device(self.device):
            (value,) = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=[self.key],
                shape_and_slices=[self.spec],
                dtypes=[self.stored.dtype],
            )
        # A slice that another program wrote may be larger than a chunk, so write it in steps.
        step = max(1, CHUNK_BYTES // row_bytes(self.stored))
        for start in range(self.rows.start, self.rows.stop, step):
            rows = range(start, min(start + step, self.rows.stop))
            with tf.device(self.device):
                rows_value = value[start - self.rows.start : rows.stop - self.rows.start]
            self.stored.write(rows, rows_value, self.device)


class ShardedSaver:
    """Writes and reads the sharded variables, and tables without a vocabulary, of one checkpoint.

    TensorFlow's saver writes the other variables.
    """

    def __init__(self, values: Mapping[str, WholeValue | TableValue]) -> None:
        self._values = dict(values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def devices(self) -> set[str]:
        """The devices of the shards."""
        return {
            str(shard.device) for value in self._values.values() for shard in value.storage.shards
        }

    def save(self, prefix: str, io_device: str | None) -> list[str]:
        """Write the variables into separate files, on `io_device` or else on the ps.

        Returns the prefixes of these files, for TensorFlow to merge.
        """
        # An optimizer has many variables, so small chunks share a file, up to the size of a chunk.
        batches: dict[str, list[list[_Chunk]]] = {}
        for key, stored in stored_now(self._values).items():
            for chunk in _chunks(key, stored, stored.chunks(), io_device):
                of_device = batches.setdefault(chunk.device, [[]])
                if (
                    of_device[-1]
                    and sum(c.num_bytes for c in of_device[-1]) + chunk.num_bytes > CHUNK_BYTES
                ):
                    of_device.append([])
                of_device[-1].append(chunk)
        prefixes = {
            device: [f"{prefix}_temp/shards-{task}-{index}" for index in range(len(of_device))]
            for task, (device, of_device) in enumerate(batches.items())
        }

        def write(device: str) -> None:
            for part, batch in zip(prefixes[device], batches[device], strict=True):
                tensors = [chunk.stored.read(chunk.rows, device) for chunk in batch]
                with tf.device(device):
                    tf.raw_ops.SaveV2(
                        prefix=part,
                        tensor_names=[chunk.key for chunk in batch],
                        shape_and_slices=[chunk.spec for chunk in batch],
                        tensors=tensors,
                    )

        _at_once(write, batches)
        return [part for of_device in prefixes.values() for part in of_device]

    def restore(self, prefix: str, io_device: str | None) -> None:
        """Read the variables, on `io_device` or else on the ps.

        Raises ValueError if a value in the checkpoint has another shape than its variable.
        """
        reader = tf.train.load_checkpoint(prefix)
        shapes, content = reader.get_variable_to_shape_map(), reader.debug_string()
        small: dict[str, list[_Chunk]] = {}
        large: list[_Chunk] = []
        restored = []
        for key, value in self._values.items():
            if isinstance(value, TableValue) and value.is_ids:
                continue  # read with the rows
            ids_key = ids_key_of(key, value)
            ids = None if ids_key is None else reader.get_tensor(ids_key)
            stored = stored_in_checkpoint(value, ids)
            if shapes[key] != stored.shape.as_list():
                raise ValueError(
                    "A checkpoint has a value of another shape than the variable "
                    f"'{value.storage.name}'. Expected: {tuple(stored.shape)}. Received: "
                    f"{tuple(shapes[key])} for '{key}' in {prefix}. Restore it into a model "
                    "of the size that was saved."
                )
            restored.append(stored)
            if not shapes[key][0]:
                continue
            # TensorFlow always reads a stored slice as a whole. If it is at most twice as large as
            # a chunk, all ps may read at the same time.
            num_stored = _stored_rows(content, key)
            if num_stored * row_bytes(stored) <= 2 * CHUNK_BYTES:
                for chunk in _chunks(key, stored, stored.chunks(), io_device):
                    small.setdefault(chunk.device, []).append(chunk)
            else:
                num_rows = shapes[key][0]
                ranges = [
                    range(start, min(start + num_stored, num_rows))
                    for start in range(0, num_rows, num_stored)
                ]
                large += _chunks(key, stored, ranges, io_device)

        def read(chunks: Iterable[_Chunk]) -> None:
            for chunk in chunks:
                chunk.restore(prefix)

        _at_once(read, small.values())
        _at_once(read, [large])  # one after the other, to have only one in memory
        _at_once(_finish, [restored])


def _chunks(
    key: str, stored: Stored, ranges: Sequence[range], io_device: str | None
) -> list[_Chunk]:
    # With two shards, the first shard's ps handles the first half of the ranges, and so on. In
    # the `div` layout these are mostly its own rows.
    on = stored.devices
    devices = [on[index * len(on) // len(ranges)] for index in range(len(ranges))]
    return [
        _Chunk(key, stored, rows, io_device or device)
        for rows, device in zip(ranges, devices, strict=True)
    ]


class CheckpointSaver(_compat.base_class("MultiDeviceSaver")):  # type: ignore[misc]
    """TensorFlow's saver of a checkpoint, at an absolute path, with sharded variables.

    The ps write and read the checkpoint if they all see its directory, and else the coordinator.
    The path is absolute since working directories of tasks differ.
    """

    kerasps_sharded: ShardedSaver
    # The devices of ps that have a value of the checkpoint.
    kerasps_devices: set[str]

    def save(self, file_prefix: object, options: tf.train.CheckpointOptions | None = None) -> Any:
        """Save the checkpoint."""
        with translated_errors(connected_host()):
            wait_for_steps()
            if not tf.executing_eagerly() or not self.kerasps_devices:
                return super().save(file_prefix, options)
            prefix = _absolute(file_prefix)
            directory = os.path.dirname(prefix)
            tf.io.gfile.makedirs(directory)
            # A directory of this name on a ps may be another one: is a new file there too?
            probe = os.path.join(directory, f".probe-{uuid.uuid4().hex}")
            with tf.io.gfile.GFile(probe, "w") as file:
                file.write("Made to learn which tasks see this directory; can be deleted.")
            try:
                reaching = _reaching(self.kerasps_devices, options, probe)
            finally:
                tf.io.gfile.remove(probe)
            return _persist(lambda: self._save(prefix, reaching))

    def _save(self, prefix: str, options: tf.train.CheckpointOptions) -> Any:
        if not self.kerasps_sharded:
            return super().save(_here(prefix), options)
        parts = self.kerasps_sharded.save(prefix, options.experimental_io_device)
        parts.append(f"{prefix}_temp/whole")
        super().save(_here(parts[-1]), options)
        with tf.device(options.experimental_io_device or min(self.kerasps_devices)):
            return tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=True
            )

    def restore(
        self, file_prefix: object, options: tf.train.CheckpointOptions | None = None
    ) -> Any:
        """Restore the checkpoint."""
        with translated_errors(connected_host()):
            if not tf.executing_eagerly() or not self.kerasps_devices:
                return super().restore(file_prefix, options)
            if not connected_strategy().extended.restores:
                return {}  # another process restores it
            prefix = _absolute(file_prefix)
            with naming_damaged_checkpoint(prefix):
                reaching = _reaching(self.kerasps_devices, options, f"{prefix}.index")
                return _persist(lambda: self._restore(prefix, reaching))

    def _restore(self, prefix: str, options: tf.train.CheckpointOptions) -> Any:
        restored = super().restore(_here(prefix), options)
        if self.kerasps_sharded:
            self.kerasps_sharded.restore(prefix, options.experimental_io_device)
        return restored


def make_saver(
    original: Callable[..., None],
    saver: Any,
    serialized_tensors: Any,
    *args: object,
    **kwargs: object,
) -> None:
    """Initialize a `MultiDeviceSaver` as a `CheckpointSaver`. Replaces its `__init__`."""
    # The same type as TensorFlow's argument: a dictionary of objects by identity.
    others = type(serialized_tensors)()
    values = {}
    for trackable, tensors in serialized_tensors.items():
        mine = {
            key: value
            for key, value in tensors.items()
            if isinstance(value, WholeValue | TableValue)
        }
        values.update(mine)
        if not mine:
            others[trackable] = tensors
    original(saver, others, *args, **kwargs)
    saver.__class__ = CheckpointSaver
    saver.kerasps_sharded = ShardedSaver(values)
    saver.kerasps_devices = saver.kerasps_sharded.devices | _ps_devices(others.values())


def _ps_devices(tensors: Iterable[object]) -> set[str]:
    """Return the CPUs of the ps that hold tensors, or what stands for them in a checkpoint."""
    devices = {str(tensor.device) for tensor in tf.nest.flatten(list(tensors))}
    specs = map(tf.DeviceSpec.from_string, devices)
    return {
        spec.replace(device_type="CPU", device_index=0).to_string()
        for spec in specs
        if spec.job == "ps"
    }


def _here(prefix: str) -> tf.Tensor:
    with tf.device(COORDINATOR_CPU):
        return tf.constant(prefix)


def _persist(call: Callable[[], object]) -> Any:
    """Call a function; retry it if the connection to a ps broke and the ps answers."""
    return persist(call, when=lambda error: lost_ps(error) is not None)


def _reaching(devices: Iterable[str], options: tf.train.CheckpointOptions | None, path: str) -> Any:
    """Return the options, with the coordinator as I/O device unless every ps sees `path`."""
    options = options or tf.train.CheckpointOptions()
    io_device = options.experimental_io_device
    if io_device is None:
        if all(sees(device, path) for device in sorted(devices)):
            return options
        io_device = COORDINATOR_CPU
    spec = tf.DeviceSpec.from_string(io_device)
    # TensorFlow's documents use these names. TensorFlow would resolve them to a ps.
    if spec.job in ("localhost", "chief"):
        io_device = COORDINATOR_CPU
    return tf.train.CheckpointOptions(
        experimental_io_device=io_device,
        experimental_sharding_callback=options.experimental_sharding_callback,
    )


def sees(device: str, path: str) -> bool:
    """Return whether the task of a device can read a file."""
    try:
        with tf.device(device):
            _persist(lambda: tf.raw_ops.ReadFile(filename=path))
    except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.UnimplementedError):
        return False
    return True


def _absolute(file_prefix: object) -> str:
    prefix = str(tf.convert_to_tensor(file_prefix).numpy().decode())
    return prefix if "://" in prefix else os.path.abspath(prefix)


def _stored_rows(content: bytes, key: str) -> int:
    """Return the number of rows of the largest stored slice of the tensor `key`.

    Args:
        content: the reader's `debug_string()`. It has a line per slice, with the key, the dtype and
            the shape. The key is plain or, for a slice, in TensorFlow's ordered code (zero, the
            name, the end of a string).
    """
    name = re.escape(key.encode())
    lines = re.findall(
        rb"(?:^|\n)(?:%b|\x00%b\x00\x01.+?) \(DT_\w+\) \[(\d+)[\d,]*\]" % (name, name),
        content,
        re.DOTALL,
    )
    return max(map(int, lines))


def _finish(values: Iterable[Stored]) -> None:
    for stored in values:  # one after the other, as a slot must not make rows of removed ids
        stored.finish()


def _at_once(function: Callable[[Any], None], arguments: Iterable[object]) -> None:
    # Other threads are eager even while this one traces a function.
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        list(pool.map(function, arguments))
