"""Patches of Keras and TensorFlow, all of them, which are installed with the first strategy.

Contract: importing this package patches nothing. `install` goes through one table, `PATCHES`, which
also feeds the `README.md` here and the canary. A model outside the scope takes Keras's own way
throughout: each function hands on to the original unless the strategy of this process is concerned.
"""

from __future__ import annotations

from kerasps.hooks.functions import leave_remote_functions
from kerasps.hooks.patch import check_patched, install
from kerasps.hooks.table import PATCHES

__all__ = [
    "PATCHES",
    "check_patched",
    "install",
    "leave_remote_functions",
]
