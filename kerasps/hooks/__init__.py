"""All patches of Keras and TensorFlow, which the first strategy installs.

Contract: importing this package patches nothing. `install` goes through one table, `PATCHES`, from
which the `README.md` here and the canary are also made. A model outside the scope runs Keras's code
throughout: each patch calls the original unless the call concerns the strategy of this process.
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
