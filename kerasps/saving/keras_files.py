"""Saves and loads Keras models and weights: large variables in chunks, files atomically.

A file is written beside the one that it replaces, and replaces it when all of it is on the disk. So
if a process is killed while it saves, the previous file remains.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import h5py
import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.dynamic.tables.row_files import TableRows
from kerasps.runtime.connected import check_not_closed, connected_host
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.errors import check_ps_of, translated_errors
from kerasps.saving.damage import naming_damaged_file
from kerasps.variables import ParameterServerVariable, current_phase, wait_for_steps
from kerasps.variables.keras.adoption import strategy_of
from kerasps.variables.placing.placing import is_ours
from kerasps.variables.rows.chunks import CHUNK_BYTES, StoredRows, chunks_of, num_bytes, read_rows

# The attribute of a weights file that holds the epoch and the batch of a backup.
_METADATA = "kerasps_training_metadata"


class _ThreadState(threading.local):
    # True while Keras loads into a model of the strategy. Otherwise Keras reads large entries.
    loading = False
    # The epoch and the batch that `save_weights` writes into the file, while a backup is made.
    metadata: dict[str, Any] | None = None


_STATE = _ThreadState()


def save_model(
    original: Callable[..., None],
    model: object,
    filepath: str | os.PathLike[str],
    overwrite: bool = True,
    zipped: bool | None = None,
    **kwargs: object,
) -> None:
    """Save a model of the strategy under a temporary name, and rename it when it is complete.

    Replaces `keras.saving.save_model`, which is behind `model.save`.
    """
    wait_for_steps()
    is_known = zipped is False or str(filepath).endswith((".keras", ".h5", ".hdf5"))
    if not (is_known and _writes_aside(model, filepath)):  # Keras's errors name the path
        original(model, filepath, overwrite, zipped, **kwargs)
        return
    check_not_closed("`save` of a model of the strategy")
    if not overwrite and os.path.exists(filepath) and not _compat.ask_to_overwrite(filepath):
        return
    with translated_errors(connected_host()), _written_aside(filepath) as partial:
        original(model, partial, True, zipped, **kwargs)


def save_weights(
    original: Callable[..., None],
    model: object,
    filepath: str | os.PathLike[str],
    max_shard_size: float | None = None,
    objects_to_skip: object = None,
) -> None:
    """Save the weights of a model of the strategy under a temporary name, then rename the file.

    Replaces Keras's function behind `model.save_weights`.
    """
    wait_for_steps()
    if not _writes_aside(model, filepath):
        original(model, filepath, max_shard_size, objects_to_skip)
        return
    check_not_closed("`save_weights` of a model of the strategy")
    with translated_errors(connected_host()):
        if max_shard_size is not None:
            _save_weights_in_files(original, model, Path(filepath), max_shard_size, objects_to_skip)
            return
        with _written_aside(filepath) as partial:
            original(model, partial, None, objects_to_skip)
            if _STATE.metadata is not None:
                with h5py.File(partial, "a") as file:
                    file.attrs[_METADATA] = json.dumps(_STATE.metadata)


def load_weights(
    original: Callable[..., None], model: object, filepath: object, *args: object, **kwargs: object
) -> None:
    """Load weights into a model of the strategy, large ones in chunks.

    Replaces Keras's function behind `model.load_weights`. Raises PSLostError if a ps is lost.
    """
    if not isinstance(model, keras.Model) or strategy_of(model) is None:
        original(model, filepath, *args, **kwargs)
        return
    check_not_closed("`load_weights` into a model of the strategy")
    with (
        translated_errors(connected_host()),
        _loading(True),
        naming_damaged_file(filepath),
    ):
        try:
            original(model, filepath, *args, **kwargs)
        except Exception:
            # Keras turns the errors of all layers into one, which names none of them.
            check_ps_of(connected_host())
            raise


def load_model(
    original: Callable[..., object], filepath: object, *args: object, **kwargs: object
) -> Any:
    """Load a model, its large weights in chunks if a strategy of kerasps is current.

    Replaces `keras.saving.load_model`, which reports a damaged file as missing.
    """
    with naming_damaged_file(filepath), _loading(is_ours(tf.distribute.get_strategy())):
        return original(filepath, *args, **kwargs)


@contextlib.contextmanager
def _loading(ours: bool) -> Iterator[None]:
    before, _STATE.loading = _STATE.loading, ours
    try:
        yield
    finally:
        _STATE.loading = before


def is_memory_sufficient(original: Callable[[keras.Model], bool], model: keras.Model) -> bool:
    """Return whether a `.keras` file may be composed in memory; large models of a strategy may not.

    Replaces Keras's function of that name. Other files are composed on the disk.
    """
    saved = [*model.variables, *getattr(getattr(model, "optimizer", None), "variables", [])]
    large = (
        sum(num_bytes(v.storage) for v in saved if isinstance(v, ParameterServerVariable))
        > CHUNK_BYTES
    )
    return not large and original(model)


def is_large(value: object) -> TypeGuard[ParameterServerVariable]:
    """Return whether a variable must be read and written in chunks."""
    if not isinstance(value, ParameterServerVariable) or current_phase() is not None:
        return False
    return (
        "/job:ps" in value.device
        and bool(value.shape.rank)
        and num_bytes(value.storage) > CHUNK_BYTES
    )


def set_entry(original: Callable[..., None], store: Any, key: str, value: object) -> None:
    """Write an entry of a weights file; a large variable, and a table's rows, in chunks.

    Replaces `H5IOStore.__setitem__`.
    """
    if isinstance(value, TableRows):
        dtype, shape, pieces = value.dtype, value.shape, value.pieces()
    elif is_large(value):
        dtype, shape = value.storage.dtype.as_numpy_dtype, tuple(value.shape)
        pieces = (
            (rows, read_rows(value.storage, rows, COORDINATOR_CPU).numpy())
            for rows in chunks_of(value.storage)
        )
    else:
        original(store, key, value)
        return
    # Keras makes the group, and an entry with its attributes for this dtype.
    original(store, key, np.zeros([0], dtype))
    group = store._h5_entry_group
    attributes = dict(group[key].attrs)
    del group[key]
    dataset = group.create_dataset(key, shape=shape, dtype=dtype)
    dataset.attrs.update(attributes)
    for rows, values in pieces:
        dataset[rows.start : rows.stop] = values


def get_entry(original: Callable[..., object], store: Any, key: str) -> Any:
    """Read an entry of a weights file; return `StoredRows` for a large one.

    A variable of the strategy reads these in chunks when it is assigned. Replaces
    `H5IOStore.__getitem__`.
    """
    # A sharded store closes each file before it opens the next, so rows cannot be read later.
    if not _STATE.loading or isinstance(store, _compat.ShardedH5IOStore):
        return original(store, key)
    group = store._h5_entry_group
    if not isinstance(group, h5py.Group) or not isinstance(
        group.get(key, getlink=True), h5py.HardLink
    ):
        return original(store, key)
    dataset = group[key]
    # Only plain numbers that are all in this file. Keras reads or refuses the others: numbers in
    # other files, or compressed ones, of which a slice costs a larger read.
    plain = isinstance(dataset, h5py.Dataset) and not dataset.external and not dataset.is_virtual
    if (
        not plain
        or not dataset.ndim
        or not CHUNK_BYTES < dataset.nbytes <= dataset.id.get_storage_size()
    ):
        return original(store, key)
    return StoredRows(
        dataset, tf.as_dtype(dataset.attrs.get("dtype", dataset.dtype)).as_numpy_dtype
    )


def back_up(original: Callable[..., None], callback: keras.callbacks.BackupAndRestore) -> None:
    """Back up a training, with its epoch in the file of the weights.

    Replaces `BackupAndRestore._save_model`. Keras writes the epoch into another file, after the
    weights. A training that is killed in between would repeat an epoch that its weights have seen,
    or find half a file.
    """
    _STATE.metadata = {"epoch": callback._current_epoch, "batch": callback._last_batch_seen}
    try:
        original(callback)
    finally:
        _STATE.metadata = None


def restore_backup(
    original: Callable[..., None], callback: keras.callbacks.BackupAndRestore
) -> None:
    """Restore a backup, with the epoch from the file of the weights.

    Replaces `BackupAndRestore._load_model`.
    """
    if strategy_of(callback.model) is not None and os.path.exists(callback._weights_path):
        with h5py.File(callback._weights_path, "r") as file:
            metadata = file.attrs.get(_METADATA)
        if metadata is not None:
            with _written_aside(callback._training_metadata_path) as partial:
                Path(partial).write_text(metadata)
    original(callback)


def _writes_aside(model: object, path: object) -> bool:
    """Return whether `model` is one of the strategy and `path` is in a directory of this machine.

    Keras handles other places (gs://, hf://).
    """
    if (
        not isinstance(model, keras.Model)
        or strategy_of(model) is None
        or not isinstance(path, str | os.PathLike)
    ):
        return False
    return "://" not in str(path) and os.path.isdir(os.path.dirname(os.path.realpath(path)))


@contextlib.contextmanager
def _written_aside(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary path to write to, which replaces `path` at the end of this context.

    If an exception is raised, `path` stays unchanged.

    Args:
        path: a file or a directory. In a directory, each file replaces the one of the same name.
    """
    target = Path(os.path.realpath(path))
    with _partial_directory(target) as directory:
        partial = directory / target.name
        yield str(partial)
        _put_in_place(partial, target)


@contextlib.contextmanager
def _partial_directory(target: Path) -> Iterator[Path]:
    """Make a directory beside `target` for the time of this context.

    If a save is killed, the directory remains, and the next save removes it. A lock tells it from
    that of a process which saves to the same path now.
    """
    # Beside the target, and so on the same file system: `os.replace` is atomic only there.
    directory = target.with_name(f".partial.{target.name}")
    try:
        if not directory.is_symlink() and directory.is_dir():
            with _locked(directory):
                shutil.rmtree(directory)
        directory.mkdir()
    except (FileExistsError, BlockingIOError):
        directory = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=target.parent))
    with _locked(directory):
        try:
            yield directory
        finally:
            shutil.rmtree(directory)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, where its file system has locks for directories.

    Raises BlockingIOError if another process holds it.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, target: Path) -> None:
    # All files are on the disk before the first one is renamed. So a mix of new and old files can
    # only come from a crash between two renames.
    files = [p for p in partial.rglob("*") if p.is_file()] if partial.is_dir() else [partial]
    places = [target / file.relative_to(partial) for file in files]
    for file, place in zip(files, places, strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            shutil.copymode(place, file)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    for file, place in zip(files, places, strict=True):
        os.replace(file, place)


def _save_weights_in_files(
    original: Callable[..., None],
    model: object,
    path: Path,
    max_shard_size: float,
    objects_to_skip: object,
) -> None:
    """Write weights into several files, and a JSON file that names them.

    The files have new names. So the files of the previous save remain until the new JSON file
    replaces the old one.
    """
    target = Path(os.path.realpath(path)).with_suffix(".json")
    base = path.stem.replace(".weights", "")  # Keras's names begin with it
    unique = f"{base}.{uuid.uuid4().hex}"
    # Keras opens this file even if the JSON file does not name it.
    first = target.with_name(f"{base}_00000.weights.h5")
    replaced = _named_files(target)
    is_first_ours = first.name in replaced or not first.exists()
    with _partial_directory(target) as directory:
        original(
            model,
            str(directory / f"{unique}.weights{path.suffix}"),
            max_shard_size,
            objects_to_skip,
        )
        index = directory / f"{unique}.weights.json"
        written = [file for file in directory.iterdir() if file != index]
        for file in written:
            _put_in_place(file, target.with_name(file.name))
        if not first.exists():
            h5py.File(first, "w").close()
        _put_in_place(index, target)
        if is_first_ours:
            h5py.File(directory / first.name, "w").close()
            _put_in_place(directory / first.name, first)
    # Delete old files only now that the JSON file names the new ones: those that the old one named,
    # and those of killed saves. Other files, such as `model_00001.weights.h5`, may be a callback's.
    numbered = r"_\d{5}\.weights\.h5"
    shards = re.compile(re.escape(base) + rf"(\.[0-9a-f]{{32}})?{numbered}")
    ours = re.compile(re.escape(base) + rf"\.[0-9a-f]{{32}}{numbered}")
    kept = {first.name, *(new.name for new in written)}
    for file in target.parent.iterdir():
        is_replaced = file.name in replaced and shards.fullmatch(file.name)
        if (is_replaced or ours.fullmatch(file.name)) and file.name not in kept:
            file.unlink()


def _named_files(index: Path) -> set[str]:
    """Return the names of the files that the JSON file of an earlier save names."""
    try:
        places = json.loads(index.read_text())["weight_map"].values()
        return {name for place in places for name in ([place] if isinstance(place, str) else place)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
