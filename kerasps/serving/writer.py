"""Writes bases and deltas into a directory."""

from __future__ import annotations

import contextlib
import os
import uuid
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kerasps.errors import DeltaError
from kerasps.serving.manifests import (
    FORMAT,
    Record,
    file_name,
    files_of_chains,
    manifest_name,
    sealed,
)
from kerasps.serving.reader import read_chain
from kerasps.serving.tensor_files import check_installed, write_file, write_tensors

# A file of this size fits into the memory of the reader and the writer, beside a few others.
_FILE_BYTES = 64 << 20
# A new reader applies at most so many deltas, or as many as take the bytes of a base.
_DELTAS_OF_CHAIN = 100


@dataclass(frozen=True)
class TableContent:
    """The part of a delta that a table has.

    Attributes:
        pieces: pieces `(ids, rows)`, which can be iterated once.
        removed: int64: ids that have no row now.
        is_whole: True if the pieces are all rows.
        entry: the entries of the manifest that do not change: `width`, `dtype`, `default`.
    """

    pieces: Iterable[tuple[np.ndarray, np.ndarray]]
    removed: np.ndarray
    is_whole: bool
    entry: dict[str, Any]


class DeltaWriter:
    """Writes a chain, and goes on with the one that it finds. Thread: one at a time.

    Args:
        directory: made if it does not exist.
        keep: the number of chains that stay; older ones are removed.
        row_dtype: the dtype of rows in files; None for their own.

    Raises:
        ImportError: the package `safetensors` is not installed.
    """

    def __init__(self, directory: Path, keep: int, row_dtype: DTypeLike | None = None) -> None:
        check_installed()
        self._directory, self._keep, self._row_dtype = directory, keep, row_dtype
        self._chain, self._version = 0, 0
        self._last: dict[str, Any] | None = None
        # The bytes of the base, and those of its deltas.
        self._base_bytes = self._delta_bytes = 0

    def go_on(self) -> dict[str, Any] | None:
        """Take up the newest chain; return the `since` of its last manifest, None without one.

        Warns of a chain that is damaged. The next delta then begins another one.
        """
        os.makedirs(self._directory, exist_ok=True)
        numbers = files_of_chains(self._directory).values()
        self._chain = max((chain for chain, _ in numbers), default=0)
        try:
            found = read_chain(self._directory)
        except DeltaError as exc:
            warnings.warn(f"{exc} A new chain begins.", UserWarning, stacklevel=2)
            return None
        if found is None:
            return None
        self._chain, manifests = found
        self._last, self._version = manifests[-1], manifests[-1]["version"]
        self._base_bytes, *of_deltas = [_bytes_of(content) for content in manifests]
        self._delta_bytes = sum(of_deltas)
        since: dict[str, Any] = self._last["since"]
        return since

    @property
    def wants_base(self) -> bool:
        """True if the next delta should be a base: there is no chain yet, or it is long enough."""
        if self._last is None:
            return True
        is_long = self._last["number"] >= _DELTAS_OF_CHAIN
        return is_long and self._delta_bytes > self._base_bytes

    def write(
        self,
        *,
        is_base: bool,
        read_at: float,
        step: int,
        tables: dict[str, TableContent],
        weights: dict[str, np.ndarray],
        since: Record,
    ) -> None:
        """Write the next delta of the chain, or the base of the next chain.

        If it fails, the directory has no part of it, and the next call writes it anew.

        Args:
            read_at: when its content was read, in seconds since 1970.
            step: the updates of the optimizer by then.
            tables: the changes of tables, by their paths.
            weights: values that changed, by their paths.
            since: what `go_on` returns in a later process. JSON can represent it.
        """
        begins = is_base or self._last is None
        chain = self._chain + 1 if begins else self._chain
        number = 0 if begins or self._last is None else self._last["number"] + 1
        manifest = self._directory / manifest_name(chain, number)
        if manifest.exists():
            raise DeltaError(
                f"The directory {self._directory} has a delta that this training did not write. "
                f"Expected: one training for a directory. Received: the file {manifest.name}. Give "
                "each training a directory for its deltas alone."
            )
        files = _Files(self._directory, chain, number)
        entries = {path: self._add(files, path, content) for path, content in tables.items()}
        for path, value in weights.items():
            files.add(f"weights/{path}", value)
        files.close()
        content = {
            "format": FORMAT,
            "chain": uuid.uuid4().hex if begins or self._last is None else self._last["chain"],
            "number": number,
            "version": self._version + 1,
            "previous": None if begins or self._last is None else self._last["sha256"],
            "read_at": float(read_at),
            "step": int(step),
            "files": files.entries,
            "tables": entries,
            "weights": {path: _spec(value) for path, value in weights.items()},
            "since": since,
        }
        text, found = sealed(content)
        write_file(manifest, text)
        _sync(self._directory)
        content["sha256"] = found
        self._chain, self._version, self._last = chain, self._version + 1, content
        if begins:
            self._base_bytes, self._delta_bytes = _bytes_of(content), 0
            self._sweep()
        else:
            self._delta_bytes += _bytes_of(content)

    def _add(self, files: _Files, path: str, content: TableContent) -> dict[str, Any]:
        num_rows = 0
        if len(content.removed):
            files.add(f"tables/{path}/removed", content.removed.astype(np.int64))
        for ids, rows in content.pieces:
            stored = rows if self._row_dtype is None else rows.astype(self._row_dtype)
            files.add(f"tables/{path}/ids", ids.astype(np.int64))
            files.add(f"tables/{path}/rows", stored)
            files.flush_if_large()
            num_rows += len(ids)
        return {
            **content.entry,
            "is_whole": content.is_whole,
            "rows": num_rows,
            "removed": len(content.removed),
        }

    def _sweep(self) -> None:
        """Remove old chains, the last files of each first, and what killed processes left."""
        least = self._chain - self._keep
        for name, (chain, _) in sorted(files_of_chains(self._directory).items(), reverse=True):
            is_old = chain <= least
            is_partial = name.endswith(".partial")
            if is_old or is_partial:
                with contextlib.suppress(OSError):
                    os.remove(self._directory / name)


class _Files:
    """The files of tensors of one delta, while they are written."""

    def __init__(self, directory: Path, chain: int, number: int) -> None:
        self._directory, self._chain, self._number = directory, chain, number
        self._parts: dict[str, list[np.ndarray]] = {}
        self._size = 0
        self.entries: dict[str, dict[str, Any]] = {}

    def add(self, key: str, value: np.ndarray) -> None:
        """Add a tensor, or some more rows of it."""
        self._parts.setdefault(key, []).append(value)
        self._size += value.nbytes

    def flush_if_large(self) -> None:
        if self._size >= _FILE_BYTES:
            self.close()

    def close(self) -> None:
        """Write what was added since the last file."""
        if not self._parts:
            return
        tensors = {
            key: values[0] if len(values) == 1 else np.concatenate(values)
            for key, values in self._parts.items()
        }
        name = file_name(self._chain, self._number, len(self.entries))
        self.entries[name] = write_tensors(self._directory / name, tensors)
        self._parts, self._size = {}, 0


def _spec(value: np.ndarray) -> dict[str, Any]:
    return {"shape": list(value.shape), "dtype": value.dtype.name}


def _bytes_of(content: Record) -> int:
    return sum(entry["bytes"] for entry in content["files"].values())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
