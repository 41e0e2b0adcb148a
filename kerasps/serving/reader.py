"""Reads the deltas of a directory, in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kerasps import checks
from kerasps.errors import DeltaError
from kerasps.serving.deltas import Delta, TableDelta
from kerasps.serving.manifests import (
    Record,
    check_follows,
    damaged,
    manifest_name,
    numbers_in,
    read_manifest,
)
from kerasps.serving.tensor_files import check_installed, read_tensors


class DeltaReader:
    """Reads the deltas of a directory, each once: a base, and then what follows it.

    It needs NumPy and `safetensors`, and nothing of the training.

    ```python
    reader, state = kerasps.serving.DeltaReader("deltas"), kerasps.serving.State()
    for delta in reader.new():  # call it again and again
        state.apply(delta)
    ```

    Args:
        directory: that of a `kerasps.DeltaExport`. It need not exist yet.

    Raises:
        ImportError: the package `safetensors` is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        check_installed()
        self._directory = checks.path("directory", directory, advice="Give one like 'deltas'.")
        # The chain that is read, and the manifest that was read last.
        self._chain: int | None = None
        self._last: dict[str, Any] | None = None

    def new(self) -> Iterator[Delta]:
        """Iterate over the deltas since the last one that was read, the oldest first.

        If the training has begun a new chain, its base comes next. A delta counts as read when the
        next one is asked for. All files of a delta are checked before it is returned.

        Raises:
            DeltaError: a file is missing, damaged, or belongs to another chain. The next call
                tries it again.
        """
        while True:
            found = numbers_in(self._directory)
            if not found:
                return
            chain = max(found)
            try:
                delta = self._next(chain, found[chain])
            except DeltaError:
                # The training removes old chains when it has begun a new one.
                if max(numbers_in(self._directory), default=chain) > chain:
                    continue
                raise
            if delta is None:
                return
            content, record = delta
            yield record
            self._chain, self._last = chain, content

    def _next(self, chain: int, numbers: list[int]) -> tuple[dict[str, Any], Delta] | None:
        before = self._last if self._chain == chain else None
        number = 0 if before is None else before["number"] + 1
        if number > numbers[-1]:
            return None
        content = read_manifest(self._directory, chain, number)
        if before is not None:
            check_follows(self._directory, chain, content, before)
        return content, self._read(chain, content)

    def _read(self, chain: int, content: Record) -> Delta:
        manifest = self._directory / manifest_name(chain, content["number"])
        parts: dict[str, list[np.ndarray]] = {}
        for name, entry in content["files"].items():
            for key, tensor in read_tensors(self._directory / name, entry).items():
                parts.setdefault(key, []).append(tensor)
        try:
            tables = {path: _table(path, entry, parts) for path, entry in content["tables"].items()}
            weights = {path: parts[f"weights/{path}"][0] for path in content["weights"]}
        except (KeyError, ValueError, TypeError) as exc:
            raise damaged(
                manifest, "tables and weights that its files have", str(exc), "Restore the file"
            ) from exc
        return Delta(
            version=content["version"],
            is_base=content["number"] == 0,
            read_at=content["read_at"],
            step=content["step"],
            tables=tables,
            weights=weights,
            name=manifest.name,
        )


def _table(path: str, entry: Record, parts: dict[str, list[np.ndarray]]) -> TableDelta:
    ids = [np.zeros(0, np.int64), *parts.get(f"tables/{path}/ids", [])]
    rows = parts.get(f"tables/{path}/rows", [])
    removed = [np.zeros(0, np.int64), *parts.get(f"tables/{path}/removed", [])]
    empty = np.zeros((0, entry["width"]), rows[0].dtype if rows else np.float32)
    delta = TableDelta(
        ids=np.concatenate(ids),
        rows=np.concatenate([empty, *rows]),
        removed=np.concatenate(removed),
        is_whole=entry["is_whole"],
        default=entry["default"],
    )
    if len(delta.ids) != entry["rows"] or len(delta.rows) != entry["rows"]:
        raise ValueError(f"{len(delta.ids)} rows of {path}")
    return delta


def read_chain(directory: Path) -> tuple[int, list[dict[str, Any]]] | None:
    """Return the newest chain and its manifests, in order; None if there is none.

    Raises:
        DeltaError: a manifest is missing or damaged, or a file has another size.
    """
    found = numbers_in(directory)
    if not found:
        return None
    chain = max(found)
    manifests: list[dict[str, Any]] = []
    for number in range(found[chain][-1] + 1):
        content = read_manifest(directory, chain, number)
        if manifests:
            check_follows(directory, chain, content, manifests[-1])
        for name, entry in content["files"].items():
            path = directory / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise damaged(path, f"{entry['bytes']} bytes", "another file", "Restore the file")
        manifests.append(content)
    return chain, manifests
