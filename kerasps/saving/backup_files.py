"""The directory of backups: finds the complete ones, and replaces old ones atomically.

A backup is a directory of files and, beside it, a *manifest*, a JSON file of the same name. The
manifest is written when all files are on the disk, and gets its name last. So a backup with a
manifest is complete, even if the process was killed; the next backup removes one without. If a
backup is damaged later, a warning names it, and the previous one is used, if there is one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.dynamic.tables.row_files import RowsById

FORMAT = 1
_ARRAYS = "arrays.npz"
_NAME = re.compile(r"backup-(\d{6,})(\.json)?(\.partial)?/?")
# A file that says which backup a directory was made for. A copy under another name is the user's.
_MARKER = "made_for"
# The file of `BackupStore` by which it learns which ps see the directory.
PROBE = "probe"
# The files that kerasps writes into the directory of a backup. TensorFlow's have another suffix
# while it writes them. Others in it are the user's.
_WRITTEN = re.compile(
    rf"{_MARKER}|{PROBE}|{re.escape(_ARRAYS)}|\d{{4,}}\.(index|data-\d+-of-\d+)(\.tempstate\d+)?"
)


@dataclass(frozen=True)
class Backup:
    """A backup whose manifest and file sizes are right."""

    number: int  # its number, higher than those of earlier backups
    directory: str  # the directory of its files
    record: dict[str, Any]  # its content beside variables
    pieces: list[dict[str, Any]]  # its parts of variables, see `variable_copies.Piece`
    specs: dict[str, dict[str, Any]]  # the path, shape and dtype of each variable, by its key


class BackupDirectory:
    """Backups in one directory, on any file system that TensorFlow can write."""

    def __init__(self, path: str, keep: int = 1) -> None:
        text = str(path)
        self.path = text if "://" in text else os.path.abspath(text)
        self._keep = keep

    def backups(self) -> Iterator[Backup]:
        """Yield the complete backups, the last one first; warn of damaged ones."""
        for number in sorted(self._numbers(manifests=True), reverse=True):
            try:
                backup = self._read(number)
            except (OSError, ValueError, KeyError, TypeError, tf.errors.OpError) as exc:
                self.warn_of_damage(number, exc)
            else:
                yield backup

    def warn_of_damage(self, number: int, error: Exception) -> None:
        """Warn that a backup is damaged and is not used."""
        warnings.warn(
            f"The backup {self._manifest(number)} is damaged and is not used: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. The previous "
            "one is used, if there is one; `double_checkpoint=True` keeps two. Delete it to "
            "silence this warning.",
            stacklevel=2,
        )

    def last_manifest(self) -> str | None:
        """Return the path of the last manifest; None if there is none."""
        numbers = self._numbers(manifests=True)
        return self._manifest(max(numbers)) if numbers else None

    def modified_at(self) -> float | None:
        """Return the time of the last manifest, in seconds since 1970; None if there is none."""
        path = self.last_manifest()
        return None if path is None else float(tf.io.gfile.stat(path).mtime_nsec / 1e9)

    def begin(self) -> tuple[int, str]:
        """Make the directory of a new backup; return the number and the path."""
        number = max(self._numbers(), default=0) + 1
        directory = self.directory(number)
        tf.io.gfile.makedirs(directory)
        with tf.io.gfile.GFile(f"{directory}/{_MARKER}", "w") as file:
            file.write(os.path.basename(directory))
        return number, directory

    def directory(self, number: int) -> str:
        """Return the path of the files of a backup."""
        return f"{self.path}/backup-{number:06d}"

    def commit(
        self,
        number: int,
        record: dict[str, Any],
        pieces: list[dict[str, Any]],
        specs: dict[str, dict[str, Any]],
    ) -> None:
        """Complete a backup whose variables are written, and delete the backups it replaces."""
        directory = self.directory(number)
        arrays: dict[str, np.ndarray] = {}
        packed = _without_arrays(record, arrays)
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        with tf.io.gfile.GFile(f"{directory}/{_ARRAYS}", "wb") as file:
            file.write(buffer.getvalue())
        names = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(directory))
        missing = {f"{piece['file']}.index" for piece in pieces} - set(names)
        if missing:
            raise OSError(
                f"the ps did not write {', '.join(sorted(missing))} where this process can see it"
            )
        for name in names:
            _sync(f"{directory}/{name}")
        _sync(directory)
        # TensorFlow has checksums of what is in its data files, and reads them with the values.
        checked = [name for name in names if ".data-" not in name]
        content = {
            "format": FORMAT,
            "record": packed,
            "pieces": pieces,
            "specs": specs,
            "files": {name: _size(f"{directory}/{name}") for name in names},
            "checksums": {name: _checksum(_bytes(f"{directory}/{name}")) for name in checked},
        }
        partial = f"{self._manifest(number)}.partial"
        with tf.io.gfile.GFile(partial, "w") as file:
            file.write(json.dumps({"sha256": _digest(content), "content": content}))
        _sync(partial)
        tf.io.gfile.rename(partial, self._manifest(number), overwrite=True)
        _sync(self.path)
        self._sweep()

    def discard(self, number: int) -> None:
        """Delete the files of a backup that kerasps wrote, as far as they can be deleted."""
        if not self._is_ours(number):
            return
        directory = self.directory(number)
        # The manifest first, since without it the other files are ignored; the marker last.
        written = sorted(filter(_WRITTEN.fullmatch, tf.io.gfile.listdir(directory)))
        written.sort(key=lambda name: name == _MARKER)
        manifest = self._manifest(number)
        for path in (
            manifest,
            f"{manifest}.partial",
            *(f"{directory}/{name}" for name in written),
        ):
            with contextlib.suppress(tf.errors.OpError):
                tf.io.gfile.remove(path)
        with contextlib.suppress(tf.errors.OpError):
            if not tf.io.gfile.listdir(directory):
                tf.io.gfile.rmtree(directory)

    def _is_ours(self, number: int) -> bool:
        """Return True if kerasps made the directory of a backup, or if it is empty."""
        directory = self.directory(number)
        if not tf.io.gfile.isdir(directory) or os.path.islink(directory):
            return False
        return not tf.io.gfile.listdir(directory) or self._made_for(number) == os.path.basename(
            directory
        )

    def _made_for(self, number: int) -> str | None:
        """Return the name of the backup for which a directory was made; None if none is written."""
        try:
            with tf.io.gfile.GFile(f"{self.directory(number)}/{_MARKER}", "r") as file:
                return str(file.read())
        except (tf.errors.OpError, UnicodeDecodeError):
            return None

    def _sweep(self) -> None:
        """Delete replaced backups, and incomplete ones of killed processes."""
        kept = sorted(self._numbers(manifests=True))[-self._keep :]
        for number in self._numbers() - set(kept):
            self.discard(number)

    def _manifest(self, number: int) -> str:
        return f"{self.directory(number)}.json"

    def _numbers(self, *, manifests: bool = False) -> set[int]:
        """Return the numbers of all backups, complete or not, or of those with a manifest.

        A copy that a user made under another name has no manifest that counts.
        """
        if not tf.io.gfile.isdir(self.path):
            return set()
        found = [_NAME.fullmatch(name) for name in tf.io.gfile.listdir(self.path)]
        if not manifests:
            return {int(match[1]) for match in found if match}
        numbers = {int(match[1]) for match in found if match and match[2] and not match[3]}
        names = {number: os.path.basename(self.directory(number)) for number in numbers}
        return {n for n, name in names.items() if self._made_for(n) in (None, name)}

    def _read(self, number: int) -> Backup:
        with tf.io.gfile.GFile(self._manifest(number), "r") as file:
            written = json.loads(file.read())
        content = written["content"]
        if written["sha256"] != _digest(content):
            raise ValueError("the checksum of the manifest is wrong")
        if content["format"] != FORMAT:
            raise ValueError(
                f"it is of format {content['format']}, and this version of kerasps reads {FORMAT}"
            )
        directory = self.directory(number)
        for name, size in content["files"].items():
            path = f"{directory}/{name}"
            if not tf.io.gfile.exists(path):
                raise ValueError(f"{path} is missing")
            if _size(path) != size:
                raise ValueError(f"{path} has {_size(path)} bytes, and had {size}")
        # Backups of earlier versions have none.
        for name, checksum in content.get("checksums", {}).items():
            if _checksum(_bytes(f"{directory}/{name}")) != checksum:
                raise ValueError(f"the checksum of {directory}/{name} is wrong")
        buffer = io.BytesIO(_bytes(f"{directory}/{_ARRAYS}"))
        try:
            with np.load(buffer, allow_pickle=False) as stored:
                arrays = dict(stored)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as exc:
            raise ValueError(f"{directory}/{_ARRAYS} cannot be read: {exc}") from exc
        record = _with_arrays(content["record"], arrays)
        return Backup(number, directory, record, content["pieces"], content["specs"])


def _without_arrays(value: object, arrays: dict[str, np.ndarray]) -> Any:
    """Return a record in which a description replaces each array; put the arrays into `arrays`."""
    if isinstance(value, dict):
        return {name: _without_arrays(item, arrays) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(item, arrays) for item in value]
    if isinstance(value, RowsById):
        return {name: _without_arrays(getattr(value, name), arrays) for name in ("ids", "rows")}
    if not isinstance(value, np.ndarray | np.generic):
        return value
    array = np.asarray(value)
    name = f"a{len(arrays)}"
    # As bytes, since `.npz` files do not support every dtype (bfloat16).
    arrays[name] = np.frombuffer(array.tobytes(), np.uint8)
    return {"array": name, "dtype": tf.as_dtype(array.dtype).name, "shape": list(array.shape)}


def _with_arrays(value: object, arrays: dict[str, np.ndarray]) -> Any:
    """Return the record from which `_without_arrays` took the arrays."""
    if isinstance(value, list):
        return [_with_arrays(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"array", "dtype", "shape"}:
        dtype = tf.as_dtype(value["dtype"]).as_numpy_dtype
        content = arrays[value["array"]].tobytes()
        return np.frombuffer(content, dtype).reshape(value["shape"]).copy()
    items = {name: _with_arrays(item, arrays) for name, item in value.items()}
    return RowsById(**items) if set(items) == {"ids", "rows"} else items


def _digest(content: dict[str, Any]) -> str:
    return _checksum(json.dumps(content, sort_keys=True).encode())


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _bytes(path: str) -> bytes:
    with tf.io.gfile.GFile(path, "rb") as file:
        content: bytes = file.read()
    return content


def _size(path: str) -> int:
    return int(tf.io.gfile.stat(path).length)


def _sync(path: str) -> None:
    """Flush a file or a directory to the disk, if it is on a file system of this machine."""
    if "://" in path:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
