"""`LocalCluster`: a process per worker and ps on this machine, with this process as the chief."""

from __future__ import annotations

import atexit
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from kerasps.checks import count, seconds
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.local.close_callbacks import CloseCallbacks
from kerasps.cluster.local.local_registry import (
    check_is_wanted,
    check_may_start,
    connected_cluster,
    note_cluster,
    note_connected,
)
from kerasps.cluster.processes.callers import calling_line
from kerasps.cluster.processes.logs import log_of, make_log_dir, remove_logs
from kerasps.cluster.processes.process import TaskProcess, task_environment
from kerasps.cluster.processes.restarts import DEFAULT_MAX_RESTARTS, RestartBudget
from kerasps.cluster.processes.task_watch import TaskWatch
from kerasps.cluster.serving.ports import address_of, reserve_port
from kerasps.errors import ClusterClosedError, TaskStartError
from kerasps.runtime.connected import closed_error
from kerasps.runtime.supervision import supervise_here, supervise_no_more
from kerasps.words import say

# Short compared to the half second that a server takes to start.
_POLL_INTERVAL_S = 0.02


class LocalCluster:
    """Worker and ps processes on this machine, with this process as their chief.

    Use it for development, for tests, and for models whose large tables make parameter servers
    faster on one machine too. The processes end when the cluster is closed, and when this process
    dies for any reason. The cluster picks ports when it starts, and holds them until it is closed.
    So clusters never collide, and a restarted task gets its old address.

    A worker that dies, or does not answer any more, is restarted, and stderr says why it ended;
    training continues meanwhile. A ps is not restarted: its variables are lost, and this process
    cannot continue without them. Restart the whole script in this case, as `kerasps launch` does.

    A process connects to one cluster in its life, which is TensorFlow's limit. While this process
    is connected to a LocalCluster, a further call with the same arguments returns that cluster, for
    example when a notebook's cell runs again. If `with` statements of one cluster are nested, the
    inner one leaves it open. After the cluster is closed, the process continues without a cluster:
    saved models can be loaded and used with plain Keras, and any use of the cluster raises
    `ClusterClosedError`.

    All processes, also this one, listen only on the loopback, so no other machine can reach them.
    TensorFlow's servers have no access control: other users of this machine can reach them.

    ```python
    import kerasps

    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
    ```

    Args:
        num_workers: the number of worker processes, at least 1. Default 2.
        num_ps: the number of ps processes, at least 1. Default 1.
        log_dir: the directory for one log file per process, made if missing. Only its owner can
            read a new directory, and the files. None (default) takes a temporary directory, which
            `close` removes unless a task died.
        start_timeout: the time limit in seconds for all processes to be ready. Default 60.
        max_restarts: how many times each worker may be restarted within an hour. Default 3; with 0,
            no worker is restarted, and none is killed if it does not answer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
        ClusterConfigError: an argument differs from that of the LocalCluster that this process is
            connected to.
        PSLostError: a ps of the LocalCluster that this process is connected to has ended.
        ClusterClosedError: this process was connected to a cluster that is closed.
        KeraspsError: this process is connected to a cluster that is not a LocalCluster.
        TaskStartError: a process ended, or was not ready in time. The message names the task and
            contains the end of its log.
    """

    def __new__(cls, *args: object, **kwargs: object) -> LocalCluster:
        # `__init__`, which runs next, checks that the arguments mean the same cluster.
        connected = connected_cluster()
        return connected if type(connected) is cls else super().__new__(cls)

    def __init__(
        self,
        num_workers: int = 2,
        num_ps: int = 1,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        start_timeout: float = 60.0,
        max_restarts: int = DEFAULT_MAX_RESTARTS,
    ) -> None:
        num_workers = _count("num_workers", num_workers)
        num_ps = _count("num_ps", num_ps)
        start_timeout = seconds("`start_timeout` is not a time limit", start_timeout)
        budget = RestartBudget(max_restarts)
        arguments: dict[str, Any] = {
            "num_workers": num_workers,
            "num_ps": num_ps,
            "log_dir": None if log_dir is None else str(Path(log_dir).absolute()),
            "max_restarts": max_restarts,
        }
        if self is connected_cluster():
            check_is_wanted(arguments, self._arguments, self._processes)
            return
        check_may_start()
        self._arguments: dict[str, Any] = arguments
        self._start_timeout = start_timeout
        self._log_dir_is_ours = log_dir is None
        self._log_dir = make_log_dir(log_dir)
        self._keep_logs = False
        self._processes: dict[tuple[str, int], TaskProcess] = {}
        # It ignores tasks whose death the user knows of: killed through `kill`, or named by a
        # TaskStartError.
        self._watch = TaskWatch(self._processes, budget, lambda death: say(f"kerasps: {death}"))
        self._ports: list[socket.socket] = []
        self._close_callbacks = CloseCallbacks()
        self._owner = os.getpid()
        # The number of `with` statements that it is in.
        self._num_entered = 0
        self._closed_by = ""
        self._process_ends = False
        self._closed = self._ended = False
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
            note_cluster(self)
            self._start_all()
        except BaseException:
            # No warning about dead tasks: the error that is being raised names them.
            self._end_all()
            raise

    @property
    def is_closed(self) -> bool:
        """True once the cluster is closed or closing."""
        return self._closed

    @property
    def description(self) -> ClusterDescription:
        """The `ClusterDescription`: the tasks and their addresses, as the chief sees them."""
        return self._description

    @property
    def tf_config(self) -> dict[str, Any]:
        """The content of TF_CONFIG for the chief of this cluster."""
        return self._description.as_tf_config()

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The chief's `SimpleClusterResolver`, for `ParameterServerStrategy`."""
        # Imported here, so that `kerasps launch` and the tasks start without TensorFlow's packages.
        from kerasps.cluster.local.resolver import LocalClusterResolver

        return LocalClusterResolver(self)

    @property
    def log_dir(self) -> Path:
        """The directory with one log file per process."""
        return self._log_dir

    @property
    def processes(self) -> Mapping[tuple[str, int], TaskProcess]:
        """The process of each task, keyed by (task type, task index)."""
        return MappingProxyType(self._processes)

    def kill(self, task_type: str, task_index: int) -> None:
        """Kill the process of a task with SIGKILL, for fault tests and demonstrations.

        No task, not even a worker, is restarted before you call `restart`.

        Args:
            task_type: `"worker"` or `"ps"`.
            task_index: the index of the task in its job.

        Raises:
            ValueError: the cluster has no such task.
            ClusterClosedError: the cluster is closed.
        """
        with self._watch.lock:
            self._killed(task_type, task_index)

    def restart(self, task_type: str, task_index: int) -> None:
        """Start a task again at its old address, and wait until it is ready.

        A process of the task that still runs is killed first.

        Args:
            task_type: `"worker"` or `"ps"`.
            task_index: the index of the task in its job.

        Raises:
            ValueError: the cluster has no such task.
            ClusterClosedError: the cluster is closed.
            TaskStartError: the new process ended, or was not ready in time.
        """
        with self._watch.lock:
            process = self._killed(task_type, task_index)
            process.start()
        self._wait_until_ready([process], time.monotonic() + self._start_timeout)
        self._watch.resume((task_type, task_index))

    def restart_all(self) -> None:
        """Restart all tasks at their old addresses, empty. Does not wait until they are ready.

        Use it before a new coordinator, which waits for them. A task that fails to start counts as
        dead.

        Raises:
            ClusterClosedError: the cluster is closed.
        """
        with self._watch.lock:
            self.check_open()
            for task, process in self._processes.items():
                self._watch.stop_watching(task)
                process.begin_to_kill()
            for process in self._processes.values():
                process.kill()
                process.start()
            for task in self._processes:
                self._watch.resume(task)

    def add_worker(self) -> int:
        """Start one more worker, and wait until it is ready.

        A running training of this cluster starts to use it within seconds.

        Returns:
            The index of the worker.

        Raises:
            ClusterClosedError: the cluster is closed.
            TaskStartError: the process ended, or was not ready in time.
        """
        with self._watch.lock:
            self.check_open()
            jobs = self._description.jobs
            workers = (*jobs["worker"], *self._reserve_addresses(1))
            index = len(workers) - 1
            self._description = ClusterDescription({**jobs, "worker": workers}, "chief", 0)
            self._watch.stop_watching(("worker", index))
            process = self._new_process("worker", index)
        self._wait_until_ready([process], time.monotonic() + self._start_timeout)
        self._watch.resume(("worker", index))
        return index

    def before_close(
        self, callback: Callable[[str], None], notice: Callable[[str], None] | None = None
    ) -> None:
        """Register functions to call when the cluster is closed, before the tasks end.

        Args:
            callback: called once; the last one registered is called first. Tasks that do not answer
                are killed before, so that it need not wait for them. Its argument is a clause that
                says what closes the cluster, and where.
            notice: called before any task is killed, and again if `close` was interrupted. Its
                argument is the same clause.
        """
        self._close_callbacks.add(callback, notice)

    def end_with_process(self) -> None:
        """Keep the cluster until this process ends, then end it without a warning.

        A strategy calls this once it is connected. A connected process stays connected, and no
        variable of the user may refer to the cluster. `close` can still end it earlier.
        """
        note_connected(self)
        supervise_here(self._watch.end_hung)
        atexit.register(self._end_with_process)

    def close(self) -> None:
        """End all processes and remove the temporary log directory. A second call does nothing.

        Warn about tasks that had died before and were not restarted. After this, any use of the
        cluster raises `ClusterClosedError`.
        """
        self._close(f"`LocalCluster.close()` was called at {calling_line()}")

    def _close(self, how: str) -> None:
        died = self._end(how)
        if died:
            names = ", ".join(
                f"{process.task_type} {process.task_index} ({process.describe_exit()})"
                for process in died
            )
            warnings.warn(
                f"Tasks of the cluster died before it was closed: {names}. Their logs are kept in "
                f"{self._log_dir}.",
                RuntimeWarning,
                stacklevel=3,
            )

    def __enter__(self) -> LocalCluster:
        self.check_open()
        with self._watch.lock:
            self._num_entered += 1
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._watch.lock:
            self._num_entered -= 1
            is_within_another = self._num_entered > 0
        if not is_within_another:
            self._close(f"the `with` block of its LocalCluster ended at {calling_line()}")

    def __del__(self) -> None:
        if getattr(self, "_ended", True) or os.getpid() != self._owner:
            return
        # Finish an interrupted `close` without a warning.
        if not self._closed:
            warnings.warn(
                f"{self!r} was not closed. Use it in a `with` statement, or call `close()`.",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
        self._close("its LocalCluster was forgotten")

    def __repr__(self) -> str:
        jobs = self._description.jobs
        state = "closed" if self._closed else "open"
        return f"<LocalCluster num_workers={len(jobs['worker'])} num_ps={len(jobs['ps'])} {state}>"

    @property
    def process_ends(self) -> bool:
        """True if the cluster ends because this process does."""
        return self._process_ends

    def _end_with_process(self) -> None:
        self._process_ends = True
        self._end("this process ends")

    def _end(self, how: str) -> list[TaskProcess]:
        """Call the callbacks, and end all processes; return the tasks that had died."""
        if os.getpid() != self._owner:
            return self._end_all()
        self._closed_by = self._closed_by or how
        return self._close_callbacks.run(how, self._processes, self._watch, self._end_all)

    def _end_all(self) -> list[TaskProcess]:
        """End all processes, free the ports and the logs, and return the tasks that had died.

        An interrupt ends the processes at once. A further call completes the rest.
        """
        if self._ended:
            return []
        was_interrupted, self._closed = self._closed, True
        if os.getpid() != self._owner:
            # A fork of the process that started the cluster has a copy of this object, but must not
            # end the cluster.
            return []
        died = []
        if not was_interrupted:
            died = [
                process for task, process in list(self._processes.items()) if self._watch.died(task)
            ]
        try:
            self._watch.close()
            # Ask all before waiting for any, so that they end concurrently.
            for process in list(self._processes.values()):
                process.terminate()
            for process in list(self._processes.values()):
                process.wait()
        finally:
            self._end_at_once()
        if self._log_dir_is_ours and not (died or self._watch.saw_death or self._keep_logs):
            remove_logs(self._log_dir, self._description.server_addresses)
        self._ended = True
        return died

    def _end_at_once(self) -> None:
        """Kill the processes that still run, and free the ports."""
        supervise_no_more(self._watch.end_hung)
        with self._watch.lock:
            for process in self._processes.values():
                process.begin_to_kill()
            for process in self._processes.values():
                process.kill()
        for port in self._ports:
            port.close()

    def _reserve_addresses(self, count: int) -> tuple[str, ...]:
        """Pick free ports, and hold them until the cluster is closed."""
        ports = [reserve_port() for _ in range(count)]
        self._ports.extend(ports)
        return tuple(address_of(port) for port in ports)

    def _start_all(self) -> None:
        """Start all processes, and return when they are ready and watched."""
        deadline = time.monotonic() + self._start_timeout
        for task_type, task_index in self._own_tasks():
            self._new_process(task_type, task_index)
        self._wait_until_ready(list(self._processes.values()), deadline)
        self._watch.start()

    def _own_tasks(self) -> Iterable[tuple[str, int]]:
        """Return the tasks whose processes this cluster starts."""
        return self._description.server_addresses

    def _environment_of(self, task_type: str, task_index: int) -> dict[str, str]:
        """Return the environment of the process of a task, without TF_CONFIG."""
        return task_environment(task_type, task_index, len(self._description.jobs["worker"]))

    def _new_process(self, task_type: str, task_index: int) -> TaskProcess:
        """Start the process of a task that has none."""
        process = TaskProcess(
            self._description.for_task(task_type, task_index),
            log_file=log_of(self._log_dir, (task_type, task_index)),
            env=self._environment_of(task_type, task_index),
        )
        self._processes[task_type, task_index] = process
        process.start()
        return process

    def _wait_until_ready(self, processes: list[TaskProcess], deadline: float) -> None:
        pending = processes
        while pending := self._pending(pending, deadline):
            time.sleep(_POLL_INTERVAL_S)

    def _pending(self, processes: Iterable[TaskProcess], deadline: float) -> list[TaskProcess]:
        """Return the processes that are not ready yet. Does not wait.

        Raises:
            TaskStartError: one of them has ended, or the deadline is over.
        """
        pending = [process for process in processes if not process.is_ready()]
        for process in pending:
            if process.poll() is not None:
                raise self._start_error(process, "ended before it was ready")
        if pending and time.monotonic() > deadline:
            limit = f"was not ready within start_timeout={self._start_timeout:g} s"
            raise self._start_error(pending[0], limit)
        return pending

    def _start_error(self, process: TaskProcess, what: str) -> TaskStartError:
        with self._watch.lock:
            self._watch.stop_watching((process.task_type, process.task_index))
        self._keep_logs = True
        return process.start_error(what)

    def check_open(self) -> None:
        """Raise `ClusterClosedError` if the cluster is closed."""
        if not self._closed:
            return
        how = f": {self._closed_by}" if self._closed_by else ""
        raise closed_error(f"a use of {self!r}") or ClusterClosedError(
            f"The cluster is closed{how}. Expected: an open cluster. Received: {self!r}. Create a "
            "new LocalCluster."
        )

    def _killed(self, task_type: str, task_index: int) -> TaskProcess:
        """Kill the process of a task without a report. Call under the lock of the watch."""
        self.check_open()
        process = self._processes.get((task_type, task_index))
        if process is None:
            known = ", ".join(f"{job} {index}" for job, index in self._processes)
            raise ValueError(
                f"The cluster has no such task. Expected: one of {known}. Received: "
                f"task_type={task_type!r}, task_index={task_index!r}. Give one of these."
            )
        self._watch.stop_watching((task_type, task_index))
        process.kill()
        return process


def _count(name: str, value: object) -> int:
    return count(f"`{name}` is not a count", value, expected="an int of at least 1")


def task_watch_of(cluster: LocalCluster) -> TaskWatch:
    """Return the watch of a cluster, for a command that starts the cluster for a script."""
    return cluster._watch
