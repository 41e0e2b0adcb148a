"""Says of a file that cannot be read that it is damaged, and which one it is.

The readers of Keras, HDF5 and TensorFlow mostly name no file, or say that there is none.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import tensorflow as tf

_ADVICE = (
    "It was cut short when it was written or copied, or is another kind of file: copy or save it "
    "again, or take an earlier one."
)


def load_model(
    original: Callable[..., object], filepath: object, *args: object, **kwargs: object
) -> Any:
    """Load a model, and name a file that is damaged.

    Takes the place of `keras.saving.load_model`, which says that there is no such file.
    """
    with naming_damaged_file(filepath):
        return original(filepath, *args, **kwargs)


@contextlib.contextmanager
def naming_damaged_file(filepath: object) -> Iterator[None]:
    """In this context, an error of a reader of Keras's files says which file is damaged.

    Raises:
        OSError: it is an HDF5 file that is damaged.
        zipfile.BadZipFile: it is a `.keras` archive that is damaged.
        ValueError: it is one of them, and Keras's error was one.
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
    """Return what was expected of a file, and what is found; None where nothing is wrong."""
    try:
        if path.suffix == ".keras":
            if not zipfile.is_zipfile(path):
                return "a zip archive that `model.save` wrote", "no zip archive"
            with zipfile.ZipFile(path) as archive:
                entry = archive.testzip()
            if entry is not None:
                return "entries that are whole", f"{entry!r} with a wrong checksum"
        if path.suffix in (".h5", ".hdf5"):
            h5py.File(path, "r").close()
    except (OSError, zipfile.BadZipFile) as exc:
        return "an HDF5 file or a zip archive that Keras wrote", str(exc)
    return None


@contextlib.contextmanager
def naming_damaged_checkpoint(prefix: str) -> Iterator[None]:
    """In this context, an error of what reads a checkpoint says which one is damaged.

    Raises:
        tf.errors.OpError: of the kind that TensorFlow raised.
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
