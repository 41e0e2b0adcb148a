"""Saves and loads models: Keras's files, and TensorFlow's checkpoints and SavedModels.

Contract: the files have the formats of plain Keras and TensorFlow, and can be read without kerasps.
A file gets its name when it is complete. Large variables are sent in chunks of rows, so no process
has to hold one.
"""

from __future__ import annotations

from kerasps.saving.backups import BackupStore
from kerasps.saving.checkpoints import make_saver
from kerasps.saving.keras_files import (
    back_up,
    get_entry,
    is_memory_sufficient,
    load_model,
    load_weights,
    restore_backup,
    save_model,
    save_weights,
    set_entry,
)
from kerasps.saving.optimizer_files import load_optimizer, save_optimizer

__all__ = [
    "BackupStore",
    "back_up",
    "get_entry",
    "is_memory_sufficient",
    "load_model",
    "load_optimizer",
    "load_weights",
    "make_saver",
    "restore_backup",
    "save_model",
    "save_optimizer",
    "save_weights",
    "set_entry",
]
