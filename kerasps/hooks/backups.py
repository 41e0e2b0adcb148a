"""The replacements of methods of `BackupAndRestore`."""

from __future__ import annotations

import os
from collections.abc import Callable

import keras

from kerasps import saving, training


def load(original: Callable[..., None], callback: keras.callbacks.BackupAndRestore) -> None:
    """`BackupAndRestore._load_model`: restore a backup of ours, or else one that Keras has made.

    If steps run eagerly, Keras's loop runs them, and Keras makes the backups.
    """
    fit = training.running_fit(callback.model)
    if fit is not None:
        store = saving.BackupStore(
            callback.backup_dir,
            callback.model,
            keep=2 if callback.double_checkpoint else 1,
            full_every=getattr(callback, "full_every", 0),
        )
        is_newer = _keras_is_newer(callback, store.modified_at)
        if fit.begin(callback, store, restores=not is_newer):
            return
    saving.restore_backup(original, callback)


def _keras_is_newer(callback: keras.callbacks.BackupAndRestore, ours: float | None) -> bool:
    """Return True if Keras has made a backup in the directory after the last one of ours."""
    path = callback._weights_path
    return ours is not None and os.path.exists(path) and os.path.getmtime(path) > ours


def save(original: Callable[..., None], callback: keras.callbacks.BackupAndRestore) -> None:
    """`BackupAndRestore._save_model`: ask the running `fit` for a backup; without one, make it."""
    fit = training.running_fit(callback.model)
    if fit is None:
        saving.back_up(original, callback)
    else:
        fit.ask(callback)
