"""Finds the newest checkpoint in a directory that another process writes to, and reads it."""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import keras
import tensorflow as tf

KERAS_SUFFIXES = (".weights.h5", ".keras")
# Keras's name for the weights inside a `.keras` archive.
_WEIGHTS_IN_ARCHIVE = "model.weights.h5"
# The names of an optimizer's counter in files of Keras and tf.train.Checkpoint; a
# LossScaleOptimizer has that of its inner optimizer.
_ITERATIONS_IN_H5 = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")
_ITERATIONS_IN_CHECKPOINT = "_iterations/.ATTRIBUTES/VARIABLE_VALUE"


@dataclass(frozen=True)
class WatchedCheckpoint:
    """One state of one checkpoint: a file that is overwritten is another `WatchedCheckpoint`."""

    # A file of Keras, or the prefix of the files of a `tf.train.Checkpoint`.
    path: Path
    # Of the file, or of the index of a `tf.train.Checkpoint`.
    modified_ns: int
    size: int
    inode: int

    @property
    def is_file(self) -> bool:
        """True if it is one file of Keras, and not a `tf.train.Checkpoint`."""
        return self.path.name.endswith(KERAS_SUFFIXES)

    @property
    def name(self) -> str:
        """The name without its ending: `epoch-07`, or `ckpt-7` of a `tf.train.Checkpoint`."""
        name = self.path.name
        for suffix in KERAS_SUFFIXES:
            name = name.removesuffix(suffix)
        return name

    @property
    def number(self) -> int | None:
        """The number that TensorFlow gave it (7 in `ckpt-7`); None for a file of Keras.

        Digits in the name of a Keras file may mean anything.
        """
        digits = self.path.name.rpartition("-")[2]
        return int(digits) if not self.is_file and digits.isdecimal() else None

    @property
    def order(self) -> tuple[int, list[Any]]:
        """The key that sorts by age; checkpoints of the same age, by the numbers in their names."""
        return self.modified_ns, [
            int(text) if text.isdecimal() else text for text in re.split(r"(\d+)", self.path.name)
        ]

    def is_newer_than(self, other: WatchedCheckpoint | None) -> bool:
        """Return whether it was written after `other`, possibly to the same file."""
        # A changed file is newer, even if the clock of its file system is wrong.
        if other is None or (self.path == other.path and self != other):
            return True
        return self.order > other.order


def newest_checkpoint(directory: Path) -> WatchedCheckpoint | None:
    """Return the checkpoint in `directory` that was written last; None if there is none.

    Keras's files have known endings. A `tf.train.CheckpointManager` lists its last checkpoint.
    """
    paths = []
    if directory.is_dir():
        paths = [
            path
            for path in directory.iterdir()
            if path.name.endswith(KERAS_SUFFIXES) and not path.name.startswith(".")
        ]
    prefix = tf.train.latest_checkpoint(str(directory))
    if prefix is not None:
        paths.append(Path(prefix))
    found = [checkpoint for path in paths if (checkpoint := _look_at(path)) is not None]
    return max(found, key=lambda checkpoint: checkpoint.order, default=None)


def load_checkpoint(model: keras.Model, checkpoint: WatchedCheckpoint) -> int | None:
    """Load the weights into `model`, and the counter of its optimizer.

    Returns:
        The optimizer's iterations; None if the checkpoint does not have them.

    Raises:
        OSError: the checkpoint was written while it was read.
        Exception: any error of a reader of files, if the checkpoint is incomplete or does not fit
            the model.
    """
    if not checkpoint.is_file:
        return _restore(model, str(checkpoint.path))
    # HDF5 locks a file while it reads it, and a training that overwrites its checkpoint at that
    # moment would end in an error. Reading a copy does not lock the file, and a copy does not
    # change meanwhile.
    with tempfile.TemporaryDirectory(prefix="kerasps-checkpoint-") as directory:
        copy = Path(directory) / checkpoint.path.name
        shutil.copyfile(checkpoint.path, copy)
        if _look_at(checkpoint.path) != checkpoint:
            raise OSError(f"{checkpoint.path} was written while it was read")
        with warnings.catch_warnings():
            # An evaluation needs no slots, so the optimizer need not be built.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(copy)
        iterations = _stored_iterations(copy)
    if iterations is not None and model.optimizer is not None:
        model.optimizer.iterations.assign(iterations)
    return iterations


def _look_at(path: Path) -> WatchedCheckpoint | None:
    written = path if path.name.endswith(KERAS_SUFFIXES) else path.with_name(f"{path.name}.index")
    try:
        status = written.stat()
    except FileNotFoundError:
        # A training that keeps only its last checkpoints has just removed it.
        return None
    return WatchedCheckpoint(path, status.st_mtime_ns, status.st_size, status.st_ino)


def _stored_iterations(path: Path) -> int | None:
    if path.suffix == ".keras":
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(_WEIGHTS_IN_ARCHIVE) as weights,
            h5py.File(weights) as store,
        ):
            return _iterations_in(store)
    with h5py.File(path) as store:
        return _iterations_in(store)


def _iterations_in(store: h5py.File) -> int | None:
    return next((int(store[key][()]) for key in _ITERATIONS_IN_H5 if key in store), None)


def _restore(model: keras.Model, prefix: str) -> int | None:
    """Restore a checkpoint of a `tf.train.Checkpoint` of the model.

    It is `tf.train.Checkpoint(model=model, optimizer=optimizer)` or `tf.train.Checkpoint(model)`.
    """
    checkpoints = [
        tf.train.Checkpoint(model),
        tf.train.Checkpoint(model=model, optimizer=model.optimizer),
    ]
    # The last one first: the form with the optimizer, which has more variables.
    while True:
        status = checkpoints.pop().restore(prefix).expect_partial()
        try:
            status.assert_existing_objects_matched()
            break
        except AssertionError as exc:
            if not checkpoints:
                raise ValueError(
                    "The checkpoint does not hold every variable of the model and its optimizer: "
                    f"{exc}. Expected: one that `tf.train.Checkpoint(model=model, "
                    "optimizer=model.optimizer)` or `tf.train.Checkpoint(model)` wrote, of the "
                    f"same model, compiled alike. Received: {prefix}. Save it so, or correct the "
                    "model."
                ) from exc
    if not any(
        key.endswith(_ITERATIONS_IN_CHECKPOINT) for key, _ in tf.train.list_variables(prefix)
    ):
        return None
    return int(model.optimizer.iterations.numpy())
