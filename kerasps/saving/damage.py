"""Errors that name a damaged file.

The readers of Keras, HDF5 and TensorFlow mostly name no file, or report a missing one.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import tensorflow as tf

_ADVICE = (
    "It is incomplete, or is another kind of file: copy or save it again, or use an earlier one."
)


@contextlib.contextmanager
def naming_damaged_file(filepath: object) -> Iterator[None]:
    """Name the damaged file in an error of a reader of Keras's files within this context.

    Raises:
        OSError: an HDF5 file is damaged.
        zipfile.BadZipFile: a `.keras` archive is damaged.
        ValueError: one of them is damaged, and Keras raised neither of these errors.
    """
    try:
        yield
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as exc:
        if not isinstance(filepath, (str, os.PathLike)) or not os.path.isfile(filepath):
            raise
        path = Path(filepath)
        damage = _damage_of(path)
        if damage is None:
            raise
        expected, received = damage
        kind = next(k for k in (zipfile.BadZipFile, OSError, Exception) if isinstance(exc, k))
        raise (ValueError if kind is Exception else kind)(
            f"The file {path} is damaged. Expected: {expected}. Received: {received}, in a file of "
            f"{path.stat().st_size:,} bytes. {_ADVICE}"
        ) from exc


def _damage_of(path: Path) -> tuple[str, str] | None:
    """Return the expected and the actual content of a damaged file, as text; None if it is good."""
    try:
        if path.suffix == ".keras":
            if not zipfile.is_zipfile(path):
                return "a zip archive that `model.save` wrote", "no zip archive"
            with zipfile.ZipFile(path) as archive:
                entry = archive.testzip()
            if entry is not None:
                return "complete entries", f"{entry!r} with a wrong checksum"
        if path.suffix in (".h5", ".hdf5"):
            h5py.File(path, "r").close()
    except (OSError, zipfile.BadZipFile) as exc:
        return "an HDF5 file or a zip archive that Keras wrote", str(exc)
    return None


@contextlib.contextmanager
def naming_damaged_checkpoint(prefix: str) -> Iterator[None]:
    """Name the damaged checkpoint in an error of its reader within this context.

    Raises an error of the same class as TensorFlow's.
    """
    try:
        yield
    except (tf.errors.OutOfRangeError, tf.errors.DataLossError) as exc:
        first_line = (exc.message.splitlines() or [""])[0]
        raise type(exc)(
            exc.node_def,
            exc.op,
            f"The checkpoint {prefix} is damaged. Expected: `{prefix}.index` and "
            f"`{prefix}.data-…` as they were written. Received: {first_line}. {_ADVICE}",
        ) from exc
