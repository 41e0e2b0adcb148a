"""Files of tensors (`.safetensors`), and their dtypes in NumPy."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kerasps.serving.manifests import Record, damaged, digest, read_bytes

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "U64": np.uint64,
    "I32": np.int32,
    "U32": np.uint32,
    "I16": np.int16,
    "U16": np.uint16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def check_installed() -> None:
    """Raise ImportError if the package `safetensors` is not installed."""
    _package()


def _package() -> types.ModuleType:
    try:
        import safetensors.numpy
    except ImportError as exc:
        raise ImportError(
            "Deltas need the package `safetensors`. Expected: a package that imports. Received: "
            f"{exc}. Install it with `pip install 'safetensors>=0.5'`."
        ) from exc
    package: types.ModuleType = safetensors
    return package


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Write tensors into a file under a temporary name, and rename it; return its entry.

    The entry is that of a manifest: the bytes and the SHA-256 digest.
    """
    contiguous = {name: np.ascontiguousarray(tensors[name]) for name in tensors}
    shapes = {name: value.reshape(tensors[name].shape) for name, value in contiguous.items()}
    content: bytes = _package().numpy.save(shapes)
    write_file(path, content)
    return {"bytes": len(content), "sha256": digest(content)}


def write_file(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_tensors(path: Path, entry: Record) -> dict[str, np.ndarray]:
    """Return the tensors of a file whose checksum is that of its entry in the manifest.

    Raises:
        DeltaError: the file is missing or damaged, or another one.
    """
    content = read_bytes(path)
    if len(content) != entry["bytes"]:
        raise damaged(path, f"{entry['bytes']} bytes", f"{len(content)} bytes", "Restore the file")
    if digest(content) != entry["sha256"]:
        raise damaged(path, "the checksum of its manifest", "another one", "Restore the file")
    found = {}
    for name, record in _package().deserialize(content):
        dtype = _DTYPES[record["dtype"]]
        found[name] = np.frombuffer(record["data"], dtype).reshape(record["shape"])
    return found
