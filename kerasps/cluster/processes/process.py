"""One child process: the server of one ps or worker task on this machine.

The parent holds two pipes to a child. Through `report` the child says that its server runs and on
which port, so that no log has to be parsed. The other is the child's stdin, on which nothing is
ever written. Its end tells the child that the parent is gone, also where that was killed. A
parent-death signal would not do here: Linux sends it when the *thread* that started the child ends,
and notebooks and test runners start clusters in threads that end early.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.processes.logs import open_log
from kerasps.cluster.server import REPORT_FD_FLAG, WATCH_PARENT_FLAG

# Enough for a traceback with its message, short enough to be read in an error.
LAST_LINES = 15
# A traceback of TensorFlow's has lines of a few hundred bytes; two thousand each are plenty.
_TAIL_BYTES = 32 * 1024
# How long a server gets to exit on SIGINT. It exits at once when it is healthy.
_TERMINATE_GRACE_S = 3.0
# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1


class TaskProcess:
    """The process of one ps or worker task.

    ```python
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        process = cluster.processes["worker", 0]
        print(process.pid, process.log_file, process.last_lines())
    ```

    Args:
        description: the cluster as this task sees it.
        log_file: the file for the process's stdout and stderr. It is appended to, so a restart
            keeps what was there.
        env: the whole environment of the process; TF_CONFIG is added to it.
    """

    def __init__(
        self, description: ClusterDescription, *, log_file: Path, env: Mapping[str, str]
    ) -> None:
        self._description = description
        self._log_file = log_file
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._report_fd: int | None = None
        self._report = b""
        self._started_at = 0.0
        # Where the log of this start begins. What earlier ones wrote explains no later end.
        self._log_begin = 0

    @property
    def task_type(self) -> str:
        """The job of the task: `"ps"` or `"worker"`."""
        return self._description.task_type

    @property
    def task_index(self) -> int:
        """The index of the task in its job."""
        return self._description.task_index

    @property
    def address(self) -> str:
        """The `"host:port"` at which the task's server listens."""
        return self._description.server_addresses[self.task_type, self.task_index]

    @property
    def log_file(self) -> Path:
        """The file that holds the process's stdout and stderr."""
        return self._log_file

    @property
    def pid(self) -> int:
        """The process id.

        Raises:
            RuntimeError: the process was not started.
        """
        return self._started().pid

    @property
    def started_at(self) -> float:
        """The time when the process was started, on the monotonic clock of the machine."""
        return self._started_at

    def start(self) -> None:
        """Start the process, without waiting for its server. See `is_ready`."""
        env = dict(self._env, TF_CONFIG=json.dumps(self._description.as_tf_config()))
        read_fd, write_fd = os.pipe()
        try:
            with open_log(self._log_file) as log:
                self._log_begin = log.tell()
                self._started_at = time.monotonic()
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "kerasps.cluster.server",
                        REPORT_FD_FLAG,
                        str(write_fd),
                        WATCH_PARENT_FLAG,
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    pass_fds=(write_fd,),
                    # A session of its own: Ctrl-C in the terminal is for the coordinator, which
                    # then closes the cluster.
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        os.set_blocking(read_fd, False)
        self._report_fd, self._report = read_fd, b""

    def is_ready(self) -> bool:
        """Return whether the child has said that its server accepts connections. Does not wait."""
        if self._report_fd is not None:
            try:
                chunk = os.read(self._report_fd, 64)
            except BlockingIOError:
                return False
            self._report += chunk
            if not chunk or self._report.endswith(b"\n"):
                self._close_report()
        return self._report.endswith(b"\n")

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None where the process has not ended."""
        return None if self._process is None else self._process.poll()

    def is_running(self) -> bool:
        """Return whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def has_ended(self) -> bool:
        """Return whether the process was started and has ended."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """End the process at once (SIGKILL), and wait until it has ended."""
        self.begin_to_kill()
        self._collect()

    def begin_to_kill(self) -> None:
        """End the process at once (SIGKILL), without waiting until it has ended. See `kill`."""
        if self.is_running():
            self._started().kill()

    def terminate(self) -> None:
        """Ask the process to end at once (SIGINT), without waiting. See `wait`.

        SIGTERM would have a worker finish what it does first.
        """
        if self.is_running():
            self._started().send_signal(signal.SIGINT)

    def wait(self, timeout_s: float = _TERMINATE_GRACE_S) -> None:
        """Wait until the process has ended; kill it where it has not after `timeout_s` seconds."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._collect()

    def last_lines(self, count: int = LAST_LINES) -> str:
        """Return the last `count` lines that the process has logged, empty where there are none."""
        return last_lines(self._log_file, count, begin=self._log_begin)

    def describe_exit(self) -> str:
        """Return how the process ended, in words: `"exit code 1"`, `"signal SIGKILL"`, not yet."""
        if self._process is None:
            return "not started"
        code = self._process.poll()
        return "still running" if code is None else describe_exit_code(code)

    def report(self) -> str:
        """Return all that helps to find out why this process ended, over several lines."""
        lines = self.last_lines() or "(the log is empty)"
        pid = "none" if self._process is None else str(self._process.pid)
        state = (
            f"ended by: {self.describe_exit()}"
            if self.has_ended()
            else f"state: {self.describe_exit()}"
        )
        return (
            f"  task: {self.task_type} {self.task_index} at {self.address}\n  pid: {pid}\n  "
            f"{state}\n  log file: {self.log_file}\n  last lines:\n"
            + "\n".join(f"    {line}" for line in lines.splitlines())
        )

    def __repr__(self) -> str:
        pid = None if self._process is None else self._process.pid
        return (
            f"<TaskProcess {self.task_type} {self.task_index} at {self.address} pid={pid} "
            f"({self.describe_exit()})>"
        )

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(
                f"The process of {self.task_type} {self.task_index} has no pid. Expected: a "
                "started process. Received: one that was not started. Call `start()` first."
            )
        return self._process

    def _collect(self) -> None:
        """Reap the process, and close our ends of its pipes."""
        self._close_report()
        if self._process is not None:
            self._process.wait()
            if self._process.stdin is not None:
                # The child may be gone already; nothing was written, so there is nothing to lose.
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def _close_report(self) -> None:
        if self._report_fd is not None:
            os.close(self._report_fd)
            self._report_fd = None


def child_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that must import this very kerasps.

    Args:
        base: the environment to start from, mostly `os.environ`.
    """
    env = dict(base)
    root = str(Path(__file__).resolve().parents[3])
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    # Site packages are on the child's path anyway; put in front of the standard library, they could
    # shadow its modules.
    if root not in installed:
        env["PYTHONPATH"] = os.pathsep.join(path for path in (root, env.get("PYTHONPATH")) if path)
    return env


def end_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` that has a child killed when this process ends, in whatever way.

    Thread: start the child from the main thread. Linux sends the signal when the thread that
    started the child ends.
    """
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def set_parent_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before the request.
        if os.getppid() != parent:
            os._exit(1)

    return set_parent_death_signal


def describe_exit_code(code: int) -> str:
    """Return an exit code of `subprocess` in words: `"exit code 1"`, `"signal SIGKILL"` for -9."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def last_lines(file: Path, count: int = LAST_LINES, *, begin: int = 0) -> str:
    """Return the last `count` lines of a text file without reading all of it, empty without one.

    Args:
        file: the file.
        count: the number of lines at most.
        begin: the byte before which nothing is read. Default: none.
    """
    try:
        with file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(begin, stream.tell() - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-count:])
