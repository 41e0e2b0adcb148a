"""Files for TensorBoard, written without the package `tensorboard`."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasps.runtime.devices import COORDINATOR_CPU

_DATA_CLASS_SCALAR = 1


class EventFile:
    """A file of events for TensorBoard, which never ends the training that it watches.

    The first error of writing, such as that of a full disk, becomes a warning. The file is then
    closed, and later calls do nothing. Thread: any.

    Args:
        directory: its directory, which is made with the first write.
        writer: the callback that writes, by the name of its class. The warning names it.
    """

    def __init__(self, directory: str | os.PathLike[str], writer: str) -> None:
        self._directory = os.fspath(directory)
        self._name = writer
        self._writer: Any = None
        self._is_over = False
        self._lock = threading.Lock()

    def write(self, write: Callable[[], object]) -> None:
        """Call a function that writes with TensorFlow's default writer, and flush the file."""
        with self._lock:
            if not self._is_over:
                self._guarded(lambda: self._write(write))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._guarded(self._close)

    def _write(self, write: Callable[[], object]) -> None:
        with tf.device(COORDINATOR_CPU):
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(self._directory)
            with self._writer.as_default():
                write()
                self._writer.flush()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as exc:
            # Events behind an incomplete one could not be read, so nothing more is written.
            self._is_over, self._writer = True, None
            reason = exc.message if isinstance(exc, tf.errors.OpError) else str(exc)
            warnings.warn(
                f"{self._name} writes no more events for TensorBoard; the training goes on. "
                f"Expected: a directory with room at {self._directory}. Received: "
                f"{type(exc).__name__}: {reason}. Make room, or give another `log_dir`.",
                UserWarning,
                stacklevel=2,
            )


def write_scalar(tag: str, value: float, step: int) -> None:
    """Write a scalar with the default writer, as `tf.summary.scalar` does.

    TensorFlow's function is in the package `tensorboard`, which TensorFlow 2.21 does not require.
    """
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "scalars"
    metadata.data_class = _DATA_CLASS_SCALAR
    tf.summary.write(tag, tf.constant(value, tf.float32), step=step, metadata=metadata)
