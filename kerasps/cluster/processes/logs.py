"""Makes log directories and opens log files that only their owner can read.

A task's log has the output of the user's functions, and paths and data in its errors.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO


def make_log_dir(path: Path) -> None:
    """Make a directory for logs that only its owner can use; do not change an existing one."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_log(path: Path) -> IO[bytes]:
    """Open a log file to append to it, unbuffered, readable only by its owner.

    An existing file of an earlier run gets the same permissions. Devices and other users' files are
    not changed.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    stream = os.fdopen(descriptor, "ab", buffering=0)
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        with contextlib.suppress(PermissionError):
            os.fchmod(stream.fileno(), 0o600)
    return stream


def log_of(directory: Path, task: tuple[str, int]) -> Path:
    """Return the path of the log of a task."""
    return directory / f"{task[0]}-{task[1]}.log"


def remove_logs(directory: Path, tasks: Iterable[tuple[str, int]]) -> None:
    """Remove the logs of tasks, and their directory if it holds nothing else."""
    with contextlib.suppress(OSError):
        for task in tasks:
            log_of(directory, task).unlink(missing_ok=True)
        directory.rmdir()
