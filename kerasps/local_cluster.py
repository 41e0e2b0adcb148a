"""A whole cluster on this machine: one process per worker and ps, with this process as the chief."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from kerasps.cluster import ClusterDescription
from kerasps.errors import TaskStartError
from kerasps.process import TaskProcess, child_environment

_HOST = "127.0.0.1"
# Short next to the half second that a server takes to start.
_POLL_INTERVAL_S = 0.02
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


class LocalCluster:
    """Worker and ps processes on this machine, with this process as their chief.

    For development, for tests, and for models whose large tables make parameter servers the faster choice on one machine too.
    The processes end when the cluster is closed and also when this process dies, however it dies. Ports are picked when the
    cluster starts and are held until it is closed, so clusters never collide and a restarted task gets its old address.

    TensorFlow's servers have no access control and listen on every network interface of the machine: on an untrusted network,
    put a firewall in front.

    ```python
    import kerasps

    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
    ```

    Args:
        num_workers: How many worker processes, at least 1. Default 2.
        num_ps: How many ps processes, at least 1. Default 1.
        log_dir: The directory for one log file per process, made where missing. None (default) takes a temporary directory,
            which is removed by `close` unless a task died by itself.
        start_timeout: The time limit in seconds for all processes to be ready. Default 60.

    Raises:
        TypeError: Where an argument is not of its type.
        ValueError: Where an argument is out of its range.
        TaskStartError: Where a process ended, or was not ready in time; it names the task and holds the end of its log.
    """

    def __init__(
        self,
        num_workers: int = 2,
        num_ps: int = 1,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        # Set first, so that a cluster whose arguments are refused can be forgotten in silence.
        self._closed = True
        _check_count("num_workers", num_workers)
        _check_count("num_ps", num_ps)
        _check_timeout("start_timeout", start_timeout)
        self._log_dir_is_ours = log_dir is None
        self._log_dir = Path(tempfile.mkdtemp(prefix="kerasps-")) if log_dir is None else Path(log_dir).absolute()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._start_timeout = float(start_timeout)
        # Tasks whose death the user knows of: killed through `kill`, or named by a TaskStartError.
        self._explained: set[tuple[str, int]] = set()
        self._keep_logs = False
        self._processes: dict[tuple[str, int], TaskProcess] = {}
        self._ports: list[socket.socket] = []
        self._close_callbacks: list[Callable[[], None]] = []
        self._owner = os.getpid()
        self._closed = False
        try:
            self._description = ClusterDescription(
                {
                    "chief": self._reserve_addresses(1),
                    "worker": self._reserve_addresses(num_workers),
                    "ps": self._reserve_addresses(num_ps),
                },
                "chief",
                0,
            )
            self._start_all()
        except BaseException:
            # Tasks that died are the subject of the error that is on its way, so no warning.
            self._end_all()
            raise

    @property
    def description(self) -> ClusterDescription:
        """The tasks of the cluster and their addresses, as the chief sees them."""
        return self._description

    @property
    def tf_config(self) -> dict[str, Any]:
        """What TF_CONFIG holds for the chief of this cluster."""
        return self._description.as_tf_config()

    @property
    def cluster_resolver(self) -> Any:
        """A `tf.distribute.cluster_resolver.SimpleClusterResolver` of the chief, for `ParameterServerStrategy`."""
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({job: list(tasks) for job, tasks in self._description.jobs.items()}),
            task_type="chief",
            task_id=0,
            rpc_layer="grpc",
        )
        # So `ParameterServerStrategy(LocalCluster(2, 1).cluster_resolver)` has a cluster for as long as the strategy lives.
        resolver.cluster = self
        return resolver

    @property
    def log_dir(self) -> Path:
        """The directory with one log file per process."""
        return self._log_dir

    @property
    def processes(self) -> Mapping[tuple[str, int], TaskProcess]:
        """The process of each task, keyed by (task type, task index)."""
        return MappingProxyType(self._processes)

    def kill(self, task_type: str, task_index: int) -> None:
        """Kills the process of a task with SIGKILL, for fault tests and demonstrations.

        Args:
            task_type: `"worker"` or `"ps"`.
            task_index: The index of the task in its job.

        Raises:
            ValueError: Where the cluster has no such task, or is closed.
        """
        process = self._process(task_type, task_index)
        self._explained.add((task_type, task_index))
        process.kill()

    def restart(self, task_type: str, task_index: int) -> None:
        """Starts a task again at its old address, and waits until it is ready. Kills its process first where that runs.

        Args:
            task_type: `"worker"` or `"ps"`.
            task_index: The index of the task in its job.

        Raises:
            ValueError: Where the cluster has no such task, or is closed.
            TaskStartError: Where the new process ended, or was not ready in time.
        """
        process = self._process(task_type, task_index)
        process.kill()
        process.start()
        self._explained.discard((task_type, task_index))
        self._wait_until_ready([process], time.monotonic() + self._start_timeout)

    def end_with_process(self, before_close: Callable[[], None]) -> None:
        """Keeps the cluster until this process ends, and ends it then without a warning, unless it is closed before.

        A strategy calls this. A process that is connected stays so, and whoever made the cluster may have no name for it.

        Args:
            before_close: What is to be done before the tasks go.
        """
        self._close_callbacks.append(before_close)
        atexit.register(self._end)

    def close(self) -> None:
        """Ends all processes and removes the temporary log directory. Can be called again."""
        died = self._end()
        if died:
            names = ", ".join(f"{process.task_type} {process.task_index} ({process.describe_exit()})" for process in died)
            warnings.warn(
                f"Tasks of the cluster died before it was closed: {names}. Their logs are kept in {self._log_dir}.",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._owner:
            warnings.warn(
                f"{self!r} was not closed. Use it in a `with` statement, or call `close()`.",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
            self.close()

    def __repr__(self) -> str:
        jobs = self._description.jobs
        state = "closed" if self._closed else "open"
        return f"<LocalCluster num_workers={len(jobs['worker'])} num_ps={len(jobs['ps'])} {state}>"

    def _end(self) -> list[TaskProcess]:
        while self._close_callbacks:
            self._close_callbacks.pop()()
        return self._end_all()

    def _end_all(self) -> list[TaskProcess]:
        """Ends all processes, frees the ports and the log directory, and returns the tasks that had died by themselves."""
        if self._closed:
            return []
        self._closed = True
        if os.getpid() != self._owner:
            # A fork of the process that started the cluster has a copy of this object, but the cluster is not its own to end.
            return []
        died = [process for task, process in self._processes.items() if process.has_ended() and task not in self._explained]
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()
        for port in self._ports:
            port.close()
        if self._log_dir_is_ours and not died and not self._keep_logs:
            shutil.rmtree(self._log_dir, ignore_errors=True)
        return died

    def _reserve_addresses(self, count: int) -> tuple[str, ...]:
        """Picks free ports and keeps them from everyone but the servers that are told them.

        Linux lets two sockets with SO_REUSEADDR share a port while neither listens. TensorFlow's server sets that option. So a
        socket that is bound and never listens holds the port against everyone who asks for a free one, before the server
        starts and while a killed one is being restarted, and leaves it to the server.
        """
        addresses = []
        for _ in range(count):
            port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._ports.append(port)
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind((_HOST, 0))
            addresses.append(f"{_HOST}:{port.getsockname()[1]}")
        return tuple(addresses)

    def _start_all(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        base = child_environment(os.environ)
        base.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        gpus = worker_gpus(len(self._description.jobs["worker"]), visible_gpus(os.environ))
        for task_type, task_index in self._description.server_addresses:
            env = dict(base)
            if task_type == "ps":
                # Variables live in the ps's main memory. A ps that saw the GPU would take memory there from the workers.
                env["CUDA_VISIBLE_DEVICES"] = "-1"
            else:
                env.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
                if gpus is not None:
                    env["CUDA_VISIBLE_DEVICES"] = gpus[task_index]
            process = TaskProcess(
                self._description.for_task(task_type, task_index),
                log_file=self._log_dir / f"{task_type}-{task_index}.log",
                env=env,
            )
            self._processes[task_type, task_index] = process
            process.start()
        self._wait_until_ready(list(self._processes.values()), deadline)

    def _wait_until_ready(self, processes: list[TaskProcess], deadline: float) -> None:
        pending = processes
        while pending := [process for process in pending if not process.is_ready()]:
            for process in pending:
                if process.poll() is not None:
                    raise self._start_error(process, "ended before it was ready")
            if time.monotonic() > deadline:
                limit = f"was not ready within start_timeout={self._start_timeout:g} s"
                raise self._start_error(pending[0], limit)
            time.sleep(_POLL_INTERVAL_S)

    def _start_error(self, process: TaskProcess, what: str) -> TaskStartError:
        self._explained.add((process.task_type, process.task_index))
        self._keep_logs = True
        return TaskStartError(
            f"The process of {process.task_type} {process.task_index} {what}. Expected: a server at {process.address}. "
            f"Received:\n{process.report()}\nCorrect what the last lines say, or raise `start_timeout` on a slow machine.",
            task_type=process.task_type,
            task_index=process.task_index,
        )

    def _process(self, task_type: str, task_index: int) -> TaskProcess:
        if self._closed:
            raise ValueError(
                f"The cluster is closed. Expected: an open cluster. Received: {self!r}. Create a new LocalCluster."
            )
        process = self._processes.get((task_type, task_index))
        if process is None:
            known = ", ".join(f"{job} {index}" for job, index in self._processes)
            raise ValueError(
                f"The cluster has no such task. Expected: one of {known}. Received: task_type={task_type!r}, "
                f"task_index={task_index!r}. Give one of these."
            )
        return process


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` is not a count. Expected: an int of at least 1. Received: {value!r}. Give a number like 2.")
    if value < 1:
        raise ValueError(f"`{name}` is too small. Expected: an int of at least 1. Received: {value!r}. Give a number like 2.")


def _check_timeout(name: str, value: Any) -> None:
    expected = "Expected: a positive number of seconds"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` is not a time limit. {expected}. Received: {value!r}. Give a number like 60.")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"`{name}` is not a time limit. {expected}. Received: {value!r}. Give a number like 60.")


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA would show a process with this environment, as CUDA_VISIBLE_DEVICES names them.

    TensorFlow is not asked: that would make this process take hold of them.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA reads the list up to the first entry that is not a device; "-1" and the empty string are the usual ones.
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
    return [str(index) for index in range(_count_gpus())]


def worker_gpus(num_workers: int, gpus: list[str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES each worker gets.

    Args:
        num_workers: The number of workers that share the GPUs of this machine.
        gpus: The GPUs, as CUDA_VISIBLE_DEVICES names them.

    Returns:
        One value per worker: neighbouring GPUs where there are enough for all, else one GPU that several workers share. None
        where there is nothing to split.
    """
    if len(gpus) < 2:
        return None
    if len(gpus) < num_workers:
        return [gpus[worker % len(gpus)] for worker in range(num_workers)]
    bounds = [worker * len(gpus) // num_workers for worker in range(num_workers + 1)]
    return [",".join(gpus[start:end]) for start, end in itertools.pairwise(bounds)]


def _count_gpus() -> int:
    if _NVIDIA_GPUS.is_dir():
        return len(list(_NVIDIA_GPUS.iterdir()))
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())
