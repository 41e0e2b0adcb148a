"""Callbacks for training with parameter servers."""

from __future__ import annotations

import os
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from kerasps import checks
from kerasps.tracing import Trace

__all__ = ["BackupAndRestore", "StalenessLogger", "Trace"]


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` with a time between backups.

    Under a `ParameterServerStrategy` Keras's own callback does all that this one does: it backs up
    within epochs too, and `fit` goes on at the step of the backup. Use this one for another time
    between backups than KERASPS_BACKUP_INTERVAL says, or with `save_freq=False` for none but those
    at intervals and on SIGTERM. Without a strategy it is Keras's.

    ```python
    # `model` is one of a `ParameterServerStrategy`; run the script again after a loss.
    model.fit(
        np.ones((1000, 64)),
        np.ones(1000),
        epochs=3,
        callbacks=[kerasps.BackupAndRestore("backup", interval_s=300)],
    )
    ```

    Args:
        backup_dir: as for Keras's: a directory for the backups of this training alone. The ps write
            there, so it should be on a file system that all tasks share.
        save_freq: as for Keras's: `"epoch"`, a number of batches, or False. Default `"epoch"`.
        interval_s: seconds between backups, beside those that `save_freq` asks for. Default None:
            KERASPS_BACKUP_INTERVAL (60) where `save_freq` is `"epoch"`, else none.
        double_checkpoint: as for Keras's: whether to keep the last two backups. Default False.
        delete_checkpoint: as for Keras's: whether to delete the backups when `fit` has ended well.
            Default True.

    Raises:
        TypeError: `interval_s` is not a number.
        ValueError: it is not positive and finite, or another argument is not what Keras takes.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        *,
        interval_s: float | None = None,
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__(
            os.fspath(checks.path("backup_dir", backup_dir)),
            save_freq=save_freq,
            double_checkpoint=double_checkpoint,
            delete_checkpoint=delete_checkpoint,
        )
        if interval_s is not None:
            interval_s = checks.seconds(
                "Argument `interval_s` is not a time",
                interval_s,
                received=f"interval_s={interval_s!r}",
                advice="Give a number like 60, or leave it out.",
            )
        self.interval_s = interval_s


class StalenessLogger(keras.callbacks.Callback):
    """Adds to the logs of each epoch how stale its updates were.

    `staleness_mean` and `staleness_max` are of all pushes of the epoch (see
    `ParameterServerStrategy.staleness`). Callbacks behind this one in the list find them in their
    logs: `keras.callbacks.TensorBoard` draws them, `CSVLogger` writes them, and `History` keeps
    them. Without a `ParameterServerStrategy` nothing is added.

    ```python
    # `model` is one of a `ParameterServerStrategy`.
    model.fit(
        np.ones((1000, 64)),
        np.ones(1000),
        epochs=3,
        callbacks=[kerasps.StalenessLogger("logs"), keras.callbacks.TensorBoard("logs")],
    )
    ```

    Args:
        log_dir: a directory of TensorBoard's. A histogram for each worker is written there after
            each epoch, as the run `staleness`. Default None: no histogram.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._log_dir = None if log_dir is None else checks.path("log_dir", log_dir)
        self._writer: Any = None
        self._before: dict[int, tuple[np.ndarray, float]] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin anew."""
        self._before = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add to `logs`, and write histograms."""
        staleness = getattr(self.model._distribute_strategy, "staleness", None)
        if staleness is None:
            return
        report = staleness()
        counts, total = np.zeros(1, np.int64), 0.0
        for worker in report:
            before, total_before = self._before.get(worker.worker, (0, 0.0))
            own, own_total = np.array(worker.counts), worker.mean * worker.pushes
            self._before[worker.worker] = own, own_total
            counts, total = counts + own - before, total + own_total - total_before
            if (own - before).any():
                self._write(f"staleness/worker_{worker.worker}", own - before, epoch)
        if logs is not None and counts.any():
            largest = int(np.flatnonzero(counts)[-1])
            logs["staleness_mean"] = total / int(counts.sum())
            # The last count is of larger ones too, and then the largest of all epochs is one.
            logs["staleness_max"] = report.max if largest == len(counts) - 1 else largest

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _write(self, tag: str, counts: np.ndarray, epoch: int) -> None:
        """Write a histogram that has a bar for each staleness."""
        if self._log_dir is None:
            return
        if self._writer is None:
            directory = str(self._log_dir / "staleness")
            self._writer = tf.summary.create_file_writer(directory)
        # What TensorBoard calls a histogram: the two edges of each bar and its height.
        edges = np.arange(len(counts))
        bars = np.stack([edges - 0.5, edges + 0.5, counts], axis=1)[
            : np.flatnonzero(counts)[-1] + 1
        ]
        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="histograms")
        )
        with self._writer.as_default():
            tf.summary.write(tag, tf.constant(bars), step=epoch, metadata=metadata)
