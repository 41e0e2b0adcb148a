"""Callbacks for training with parameter servers."""

from __future__ import annotations

from typing import Any

import keras

from kerasps import checks


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
        backup_dir: Any,
        save_freq: Any = "epoch",
        *,
        interval_s: float | None = None,
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__(
            backup_dir,
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
