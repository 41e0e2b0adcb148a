"""One child process: the server of one ps or worker task on this machine.

The parent holds two pipes to a child. On the report pipe the child reports that its server runs and
on which port, so that nobody has to parse a log. The other pipe is the child's stdin, to which
nobody writes. Its end tells the child that the parent has ended, also if it was killed. A
parent-death signal does not work here: Linux sends it when the *thread* that started the child
ends, and notebooks and test runners start clusters in threads that end early.
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
from kerasps.cluster.processes.gpus import visible_gpus, worker_gpus
from kerasps.cluster.processes.logs import open_log
from kerasps.cluster.server import REPORT_FD_FLAG, WATCH_PARENT_FLAG
from kerasps.errors import TaskStartError

# Enough for a traceback with its message, short enough to be read in an error.
LAST_LINES = 15
# A traceback of TensorFlow has lines of a few hundred bytes; two thousand each are plenty.
_TAIL_BYTES = 32 * 1024
# The time that a server gets to exit on SIGINT. A healthy one exits at once.
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
        log_file: the file for the process's stdout and stderr. The process appends to it, so a
            restart keeps its content.
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
        # The position in the log at which this start begins. Earlier lines are of earlier
        # processes.
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
        """The time at which the process was started, on the machine's monotonic clock."""
        return self._started_at

    def start(self) -> None:
        """Start the process. Does not wait for its server; see `is_ready`."""
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
                    # A separate session: Ctrl-C in the terminal is for the coordinator, which then
                    # closes the cluster.
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
        """Return whether the child reported that its server accepts connections. Does not wait."""
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
        """Return the exit code, negative for a signal; None if the process has not ended."""
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
        """End the process at once (SIGKILL). Does not wait until it has ended; see `kill`."""
        if self.is_running():
            self._started().kill()

    def terminate(self) -> None:
        """Ask the process to end at once (SIGINT). Does not wait; see `wait`.

        After SIGTERM, a worker would finish its steps first.
        """
        if self.is_running():
            self._started().send_signal(signal.SIGINT)

    def wait(self, timeout_s: float = _TERMINATE_GRACE_S) -> None:
        """Wait until the process has ended; kill it if it has not after `timeout_s` seconds."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._collect()

    def last_lines(self, count: int = LAST_LINES) -> str:
        """Return the last `count` lines that the process has logged, empty if there are none."""
        return last_lines(self._log_file, count, begin=self._log_begin)

    def describe_exit(self) -> str:
        """Return how the process ended, in words such as `"exit code 1"` or `"signal SIGKILL"`.

        Return `"not started"` or `"still running"` if it has not ended.
        """
        if self._process is None:
            return "not started"
        code = self._process.poll()
        return "still running" if code is None else describe_exit_code(code)

    def report(self) -> str:
        """Return several lines of text that help to find out why this process ended."""
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

    def start_error(self, what: str) -> TaskStartError:
        """Return the error for a process that cannot start. Its message has the log's end.

        Args:
            what: the failure, a clause such as "ended before it was ready".
        """
        return TaskStartError(
            f"The process of {self.task_type} {self.task_index} {what}. Expected: a server at "
            f"{self.address}. Received:\n{self.report()}\nCorrect the error in the last lines, or "
            "raise `start_timeout` on a slow machine.",
            task_type=self.task_type,
            task_index=self.task_index,
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
                # The child may have ended already; nothing was written, so nothing is lost.
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def _close_report(self) -> None:
        if self._report_fd is not None:
            os.close(self._report_fd)
            self._report_fd = None


def child_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that must import the same kerasps as this process."""
    env = dict(base)
    root = str(Path(__file__).resolve().parents[3])
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    # Site packages are on the child's path anyway. In front of the standard library, they could
    # shadow its modules.
    if root not in installed:
        env["PYTHONPATH"] = os.pathsep.join(path for path in (root, env.get("PYTHONPATH")) if path)
    return env


def task_environment(task_type: str, task_index: int, num_workers: int) -> dict[str, str]:
    """Return the environment of the process of a task, without TF_CONFIG."""
    env = child_environment(os.environ)
    # Log errors only: else a server's warnings about this machine's processor fill the log.
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if task_type == "ps":
        # Variables are in the ps's main memory. A ps that saw the GPU would take GPU memory from
        # the workers.
        env["CUDA_VISIBLE_DEVICES"] = "-1"
        # oneDNN's allocator takes 3% of memory that tables without a vocabulary only reserve.
        env.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    else:
        # By default the first process on a GPU takes all of its memory; workers may share one.
        env.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        gpus = worker_gpus(num_workers, visible_gpus(os.environ))
        if gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpus[task_index]
    return env


def end_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` that makes Linux kill the child when this process ends in any way.

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
    """Return the last `count` lines of a text file, without reading all of it; empty if missing."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(begin, stream.tell() - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-count:])
