"""Makes a task keep freed memory for its next steps.

A step of a large model receives and computes tensors of many MiB, and frees them. The C library
returns such blocks to the kernel, which has to clear every page of the next ones: a seventh of the
time of a step with 67 MB of weights. So tasks keep freed memory, up to a limit.
"""

from __future__ import annotations

import ctypes
import os

# From <malloc.h> of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Larger blocks are allocated from the kernel and returned to it: mostly tables, which stay.
_LARGEST_KEPT_BYTES = 2**28
# Free memory at the end of the heap beyond this is returned to the kernel.
_MOST_KEPT_BYTES = 2**30
# If one of these is set, the user has chosen already.
_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Make this process keep freed memory for later; return whether it does.

    It does not if the C library is not glibc, or if the environment configures glibc
    (`MALLOC_TRIM_THRESHOLD_` and the like). Call before TensorFlow is imported.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(
        set_option(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        and set_option(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
    )
