"""The directory of backups: finds the complete ones, and replaces old ones atomically.

A backup is a directory of files and, beside it, a *manifest*, a JSON file of the same name. The
manifest is written when all files are on the disk, and gets its name last. So a backup with a
manifest is complete, even if the process was killed; the next backup removes one without. If a
backup is damaged later, a warning names it, and the previous one is used, if there is one.

A *delta* is a backup that has, of tables without a vocabulary, only the rows that changed since the
backup before; all other variables are whole. Its manifest names the one before by number and
digest. So it can be used as long as all of its *chain* is good: the whole backup that it begins
with, and the deltas between.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.dynamic.tables.row_files import RowsById
from kerasps.saving.damage import naming_damaged_checkpoint

FORMAT, DELTA_FORMAT = 1, 2
# Errors that mean that a backup is damaged.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, tf.errors.OpError)
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
    """A backup whose manifest and file sizes are right, and those of its chain."""

    number: int  # its number, higher than those of earlier backups
    directory: str  # the directory of its files
    record: dict[str, Any]  # its content beside variables
    pieces: list[dict[str, Any]]  # its parts of variables, see `variable_copies.Piece`
    specs: dict[str, dict[str, Any]]  # the path, shape and dtype of each variable, by its key
    digest: str  # the checksum of its manifest
    num_bytes: int  # the size of its files
    # Of a delta: ids whose rows were removed, by the key of a variable of their table.
    removed: dict[str, np.ndarray] = field(default_factory=dict)
    # The number and the digest of the backup before; None if it is whole.
    previous: tuple[int, str] | None = None
    # The backups that a delta is on, the whole one first.
    before: tuple[Backup, ...] = ()

    @property
    def chain(self) -> tuple[Backup, ...]:
        """The backups that make it up: the whole one first, itself last."""
        return (*self.before, self)


class BackupDirectory:
    """Backups in one directory, on any file system that TensorFlow can write."""

    def __init__(self, path: str, keep: int = 1) -> None:
        text = str(path)
        self.path = text if "://" in text else os.path.abspath(text)
        self._keep = keep
        # Whether backups are whole, by their numbers.
        self._are_whole: dict[int, bool] = {}

    def backups(self) -> Iterator[Backup]:
        """Yield the complete backups, the last one first; warn of damaged ones."""
        for number, found in self.all():
            if isinstance(found, Backup):
                yield found
            else:
                self.warn_of_damage(number, found)

    def all(self) -> Iterator[tuple[int, Backup | Exception]]:
        """Yield the number of each backup, the last one first, and it or why it cannot be used."""
        known: dict[int, Backup | Exception] = {}
        for number in sorted(self._numbers(manifests=True), reverse=True):
            try:
                yield number, self._with_chain(number, known)
            except _DAMAGE as exc:
                yield number, exc

    def checked(self) -> Iterator[tuple[int, Backup | Exception]]:
        """Yield what `all` yields, after all values of each were read."""
        known: dict[int, Exception | None] = {}
        for number, found in self.all():
            if not isinstance(found, Backup):
                yield number, found
                continue
            for each in found.chain:
                if each.number not in known:
                    known[each.number] = _damage_of_values(each)
            problems = [problem for each in found.chain if (problem := known[each.number])]
            yield number, problems[0] if problems else found

    def has(self, number: int) -> bool:
        """Return True if there is the manifest of a backup."""
        return bool(tf.io.gfile.exists(self._manifest(number)))

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

    def modified_at(self, number: int | None = None) -> float | None:
        """Return the time of a manifest, in seconds since 1970; None if there is none.

        Args:
            number: that of the backup. Default None: the last one.
        """
        path = self.last_manifest() if number is None else self._manifest(number)
        if path is None or not tf.io.gfile.exists(path):
            return None
        return float(tf.io.gfile.stat(path).mtime_nsec / 1e9)

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
        *,
        removed: Mapping[str, np.ndarray] | None = None,
        previous: Backup | None = None,
    ) -> Backup:
        """Complete a backup whose variables are written, and delete the backups it replaces.

        Args:
            removed: of a delta, the ids whose rows were removed.
            previous: the backup that it is a delta on; None for a whole one.
        """
        directory = self.directory(number)
        arrays: dict[str, np.ndarray] = {}
        packed = _without_arrays(record, arrays)
        delta: dict[str, Any] = {}
        if previous is not None:
            delta["previous"] = [previous.number, previous.digest]
            delta["removed"] = _without_arrays(dict(removed or {}), arrays)
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
            # Earlier versions of kerasps read no delta.
            "format": DELTA_FORMAT if delta else FORMAT,
            "number": number,
            **delta,
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
        self._are_whole[number] = not delta
        self._sweep()
        return _backup(directory, content, None, _digest(content))

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
        complete = sorted(self._numbers(manifests=True))
        # A delta replaces none: it needs those before it.
        whole = [number for number in complete if self._is_whole(number)]
        first = whole[-self._keep :][0] if whole else 0
        kept = {number for number in complete if number >= first}
        # Deltas before those that they are on.
        for number in sorted(self._numbers() - kept, reverse=True):
            self.discard(number)

    def _is_whole(self, number: int) -> bool:
        """Return True if a backup is no delta; False if that cannot be read."""
        if number not in self._are_whole:
            try:
                self._are_whole[number] = "previous" not in self._content(number)[0]
            except _DAMAGE:
                return False
        return self._are_whole[number]

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

    def _with_chain(self, number: int, known: dict[int, Backup | Exception]) -> Backup:
        """Return a backup with its chain; raise an error if one of them cannot be used."""
        chain = [self._known(number, known)]
        while (previous := chain[0].previous) is not None:
            name = self._manifest(previous[0])
            if previous[0] >= chain[0].number:
                raise ValueError(f"it says that it is a delta on {name}, which is no earlier one")
            try:
                before = self._known(previous[0], known)
            except _DAMAGE as exc:
                raise ValueError(f"it needs {name}, which cannot be used: {exc}") from exc
            if before.digest != previous[1]:
                raise ValueError(
                    f"{self._manifest(chain[0].number)} is a delta on another backup than {name}"
                )
            chain.insert(0, before)
        return replace(chain[-1], before=tuple(chain[:-1]))

    def _known(self, number: int, known: dict[int, Backup | Exception]) -> Backup:
        """Return a backup without its chain; read it once."""
        if number not in known:
            try:
                known[number] = self._read(number)
            except _DAMAGE as exc:
                known[number] = exc
        found = known[number]
        if isinstance(found, Exception):
            raise found
        return found

    def _content(self, number: int) -> tuple[dict[str, Any], str]:
        """Return the content of a manifest, and its checksum."""
        path = self._manifest(number)
        if not tf.io.gfile.exists(path):
            raise ValueError(f"{path} is missing")
        with tf.io.gfile.GFile(path, "r") as file:
            written = json.loads(file.read())
        content, digest = written["content"], _digest(written["content"])
        if written["sha256"] != digest:
            raise ValueError("the checksum of the manifest is wrong")
        if content["format"] not in (FORMAT, DELTA_FORMAT):
            raise ValueError(
                f"it is of format {content['format']}, and this version of kerasps reads {FORMAT} "
                f"and {DELTA_FORMAT}"
            )
        # Backups of earlier versions have none.
        if content.get("number", number) != number:
            raise ValueError(f"{path} is the manifest of backup {content['number']}")
        return content, digest

    def _read(self, number: int) -> Backup:
        content, digest = self._content(number)
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
        return _backup(directory, content, arrays, digest)


def _backup(
    directory: str, content: dict[str, Any], arrays: dict[str, np.ndarray] | None, digest: str
) -> Backup:
    """Return the backup of a manifest; without arrays, its record and removed ids have none."""
    previous = content.get("previous")
    return Backup(
        content.get("number", int(directory.rpartition("-")[2])),
        directory,
        {} if arrays is None else _with_arrays(content["record"], arrays),
        content["pieces"],
        content["specs"],
        digest,
        sum(content["files"].values()),
        {} if arrays is None else _with_arrays(content.get("removed", {}), arrays),
        None if previous is None else (int(previous[0]), str(previous[1])),
    )


def _damage_of_values(backup: Backup) -> Exception | None:
    """Read all values of a backup, without its chain; return the error of a damaged file."""
    for file in sorted({piece["file"] for piece in backup.pieces}):
        prefix = f"{backup.directory}/{file}"
        try:
            with naming_damaged_checkpoint(prefix):
                reader = tf.train.load_checkpoint(prefix)
                for name in reader.get_variable_to_shape_map():
                    reader.get_tensor(name)
        except (*_DAMAGE, RuntimeError) as exc:  # TensorFlow's reader raises RuntimeError too
            return exc
    return None


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
