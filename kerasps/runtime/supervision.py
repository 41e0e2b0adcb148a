"""The pipe from a script to its supervisor, for notices of tasks that are lost or hang.

A supervisor sees that a process ends. It does not see that a process hangs, why a script failed, or
if it uses the cluster; the coordinator does. So `kerasps launch` passes one end of a pipe to its
script, and the coordinator sends notices through it. If the tasks belong to a `LocalCluster` of
this process, that cluster gets the notices about tasks instead.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

# "lost": an error about this task is about to be raised. "hung": it does not answer, and the script
# may continue without it. "absent": the script waited for it at the start, and it did not answer in
# time. "connected": the script has a strategy of the supervisor's cluster. "elsewhere": it has one
# of a `LocalCluster` that it started.
What = Literal["lost", "hung", "absent", "connected", "elsewhere"]
_WHATS: dict[str, What] = {what: what for what in get_args(What)}
# Of the notices about the script itself.
_CHIEF = "chief"
# How often a worker that drives its own steps reports that it waits for the chief.
TELL_ABSENT_EVERY_S = 1.0
# The pipe as "descriptor:inode:process", where the last is the supervisor's process id. A process
# that the script starts inherits the variable, but has another parent, and may have another file
# under that descriptor.
SUPERVISOR_FD = "KERASPS_SUPERVISOR_FD"
# More than a script writes between two reads of the launcher.
_READ_BYTES = 64 * 1024


@dataclass(frozen=True)
class Notice:
    """A coordinator's notice about a task, with its time on the machine's monotonic clock."""

    what: What
    task_type: str
    task_index: int
    time: float


# The supervisor within this process, if there is one.
_supervisor_here: Callable[[Notice], None] | None = None


def tell_supervisor(what: What, task_type: str, task_index: int) -> None:
    """Tell the supervisor that a task is lost or hangs. Does nothing without a supervisor.

    Never waits and never fails: it is called before an error is raised, or during a training.
    Thread: any.
    """
    notice = Notice(what, task_type, task_index, time.monotonic())
    here = _supervisor_here
    if here is not None:
        here(notice)
    else:
        _write(notice)


def tell_connected(*, elsewhere: bool) -> None:
    """Tell the supervisor of this process, if there is one, that it has a strategy.

    Never waits and never fails.
    """
    _write(Notice("elsewhere" if elsewhere else "connected", _CHIEF, 0, time.monotonic()))


def _write(notice: Notice) -> None:
    """Write a notice into the pipe, if there is one."""
    fd = _pipe_to_supervisor()
    if fd is not None:
        line = f"{notice.what} {notice.task_type} {notice.task_index} {notice.time!r}\n"
        # The pipe does not block. Ignore the error of a full pipe, or of one without a reader.
        with contextlib.suppress(OSError):
            os.write(fd, line.encode())


def supervise_here(callback: Callable[[Notice], None]) -> None:
    """Send notices to a supervisor in this process.

    Args:
        callback: called in the thread that calls `tell_supervisor`; it must neither wait nor fail.
    """
    global _supervisor_here
    _supervisor_here = callback


def supervise_no_more(callback: Callable[[Notice], None]) -> None:
    """Undo `supervise_here`, if it was called with this callback last."""
    global _supervisor_here
    if _supervisor_here == callback:
        _supervisor_here = None


def _pipe_to_supervisor() -> int | None:
    """Return the descriptor of the pipe, None if this process has no supervisor."""
    try:
        fd, inode, supervisor = (int(part) for part in os.environ[SUPERVISOR_FD].split(":"))
        status = os.fstat(fd)
    except (KeyError, ValueError, OSError):
        return None
    if os.getppid() != supervisor or not stat.S_ISFIFO(status.st_mode) or status.st_ino != inode:
        return None
    with contextlib.suppress(OSError):
        # Programs that this process starts later must not write there.
        os.set_inheritable(fd, False)
    return fd


class SupervisorPipe:
    """The supervisor's end of the pipe. Make one for each start of the script.

    ```python
    with contextlib.closing(SupervisorPipe()) as pipe:
        script = subprocess.Popen(command, env=env | pipe.variables, pass_fds=[pipe.fd_to_pass])
        pipe.has_been_passed()
        for notice in pipe.read():
            print(notice.what, notice.task_type, notice.task_index)
    ```
    """

    def __init__(self) -> None:
        # The script inherits the second one.
        self._read_fd, self.fd_to_pass = os.pipe()
        os.set_blocking(self._read_fd, False)
        # This applies to every process with this end: the script must not wait for its supervisor.
        os.set_blocking(self.fd_to_pass, False)
        self._inode = os.fstat(self.fd_to_pass).st_ino
        self._rest = b""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variable that tells the script about the pipe."""
        return {SUPERVISOR_FD: f"{self.fd_to_pass}:{self._inode}:{os.getpid()}"}

    def has_been_passed(self) -> None:
        """Close the script's end in this process. Call when the script has been started."""
        if self.fd_to_pass >= 0:
            os.close(self.fd_to_pass)
            self.fd_to_pass = -1

    def read(self) -> list[Notice]:
        """Return the script's notices since the last call. Does not wait."""
        try:
            chunk = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [notice for line in lines if (notice := _parsed(line)) is not None]

    def close(self) -> None:
        """Close both ends. A second call does nothing."""
        self.has_been_passed()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1


def _parsed(line: bytes) -> Notice | None:
    """Return the notice in a line of the pipe, None for other text: any program may write there."""
    try:
        what, task_type, index, when = line.decode().split(" ")
        notice = Notice(_WHATS[what], task_type, int(index), float(when))
    except (ValueError, KeyError):
        return None
    is_of_script = notice.what in ("connected", "elsewhere")
    return notice if task_type in ((_CHIEF,) if is_of_script else ("worker", "ps")) else None
