"""Makes log directories and opens log files that only their owner can read.

A task's log has the output of the user's functions, and paths and data in its errors.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from kerasps.checks import path


def make_log_dir(given: str | os.PathLike[str] | None) -> Path:
    """Make a directory for logs that only its owner can use; do not change an existing one.

    None takes a temporary one.
    """
    if given is None:
        return Path(tempfile.mkdtemp(prefix="kerasps-"))
    directory = path("log_dir", given, advice="Leave it out for a temporary one.").absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def open_log(file: Path) -> IO[bytes]:
    """Open a log file to append to it, unbuffered, readable only by its owner.

    An existing file of an earlier run gets the same permissions. Devices and other users' files are
    not changed.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
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
