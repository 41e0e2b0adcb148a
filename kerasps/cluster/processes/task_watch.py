"""Watches the processes of a cluster on this machine, and restarts workers that die.

One thread sleeps until a process ends (Linux reports that through a file descriptor), a pause is
over, or another thread wakes it. It holds no reference to the cluster, so Python can collect a
forgotten cluster. All code that starts a process, or ends one on purpose, holds `lock`; so no
process is started after the cluster was closed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kerasps.cluster.processes.process import TaskProcess
from kerasps.cluster.processes.restarts import Restart, RestartBudget, Task
from kerasps.runtime.supervision import Notice

# For systems that have no descriptor for a process.
_POLL_INTERVAL_S = 0.1
# The thread does nothing that takes long, unless the reader of stderr blocks it.
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Death:
    """A process that ended without being told to.

    Args:
        task: its type and index.
        pid: the process id; 0 if a process could not be started.
        what: the event in words, usually `"died"`.
        report: several lines that help to find the cause.
        restart: its restart; None if it is not restarted.
        refusal: the reason, in words, for not restarting it; empty if it is restarted.
    """

    task: Task
    pid: int
    what: str
    report: str
    restart: Restart | None
    refusal: str

    def __str__(self) -> str:
        name = f"{self.task[0]} {self.task[1]}"
        return f"{name} {self.what}. It is {self.restart or self.refusal}.\n{self.report}"


class TaskWatch:
    """The thread that watches the processes of a cluster, and their state.

    Args:
        processes: the process of each task. The cluster may add to them; after `start`, under
            `lock`.
        on_death: called in the thread of the watch with each `Death`, outside of `lock`.
    """

    def __init__(
        self,
        processes: Mapping[Task, TaskProcess],
        budget: RestartBudget,
        on_death: Callable[[Death], None],
    ) -> None:
        self.lock = threading.RLock()
        self.on_death = on_death
        self._processes = processes
        self._budget = budget
        # Tasks that end on purpose, or whose end the user knows: not reported and not restarted.
        self._left: set[Task] = set()
        # The ids of processes that were seen to end, and of those that were killed because they did
        # not answer.
        self._ended: dict[Task, int] = {}
        self._hung: dict[Task, int] = {}
        # The times at which dead workers are restarted.
        self._due: dict[Task, float] = {}
        self._descriptors: dict[Task, tuple[int, int]] = {}
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None
        self._is_over = False
        self._saw_death = False

    @property
    def saw_death(self) -> bool:
        """True once a process ended without being told to."""
        return self._saw_death

    def start(self) -> None:
        """Begin to watch. Call when all processes are ready."""
        read_fd, write_fd = os.pipe()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        self._wake = read_fd, write_fd
        # A daemon, since Python waits for other threads before it calls the functions of `atexit`.
        self._thread = threading.Thread(target=self._run, name="kerasps-task-watch", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """End the thread. The watch then starts no process. A second call does nothing."""
        if os.getpid() != self._owner:
            # A forked process does not have the thread.
            return
        atexit.unregister(self.close)
        with self.lock:
            self._is_over = True
            self._wake_up()
        thread = self._thread
        # Python may collect a forgotten cluster in the watch's thread, which then ends on return.
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)

    def stop_watching(self, task: Task) -> None:
        """Stop watching a task: its end is neither reported nor a reason to restart it.

        Call under `lock`.
        """
        self._left.add(task)
        self._due.pop(task, None)

    def resume(self, task: Task) -> None:
        """Watch a task again, after its process was started."""
        with self.lock:
            self._left.discard(task)
            self._wake_up()

    def died(self, task: Task) -> bool:
        """Return whether the process of a watched task has ended and will not be restarted."""
        with self.lock:
            ended = self._processes[task].has_ended()
            return ended and task not in self._left and task not in self._due

    def end_hung(self, notice: Notice) -> None:
        """Kill a worker that hangs according to `notice`, if it may be restarted. Does not wait.

        A notice about a process that was replaced since is ignored.
        """
        task = notice.task_type, notice.task_index
        process = self._processes.get(task)
        if notice.what != "hung" or notice.task_type != "worker" or process is None:
            return
        with self.lock:
            if (
                not self._is_over
                and task not in self._left
                and process.is_running()
                and process.started_at < notice.time
                and self._budget.has_left(task, time.monotonic())
            ):
                self._hung[task] = process.pid
                process.begin_to_kill()

    def _run(self) -> None:
        try:
            while not self._is_over:
                with self.lock:
                    deaths = self._look(time.monotonic())
                for death in deaths:
                    # An error in the callback must not end the watch.
                    with contextlib.suppress(Exception):
                        self.on_death(death)
                self._sleep()
        finally:
            with self.lock:
                for _, descriptor in self._descriptors.values():
                    os.close(descriptor)
                self._descriptors.clear()
                if self._wake is not None:
                    for fd in self._wake:
                        os.close(fd)
                    self._wake = None

    def _look(self, now: float) -> list[Death]:
        """Record processes that have ended, and restart those that are due."""
        deaths: list[Death] = []
        if self._is_over:
            return deaths
        for task, process in self._processes.items():
            if process.has_ended() and self._ended.get(task) != process.pid:
                self._ended[task] = process.pid
                if task not in self._left:
                    deaths.append(self._note_death(task, process, now))
        for task in [task for task, due in self._due.items() if due <= now]:
            del self._due[task]
            failure = self._start_again(task)
            if failure is not None:
                deaths.append(failure)
        return deaths

    def _note_death(self, task: Task, process: TaskProcess, now: float) -> Death:
        what = "died"
        if self._hung.get(task) == process.pid:
            what = "did not answer and was killed"
        elif process.poll() == 0 and task[0] == "worker":
            # A worker exits with 0 after SIGTERM.
            what = "left"
        return self._restarted(task, process.pid, what, process.report(), now)

    def _restarted(self, task: Task, pid: int, what: str, report: str, now: float) -> Death:
        self._saw_death = True
        restart, refusal = None, "not started again: its variables are gone with it"
        if task[0] == "worker":
            restart, refusal = self._budget.grant(task, now), ""
            if restart is None:
                refusal = self._budget.refusal()
            else:
                self._due[task] = now + restart.pause_s
        return Death(task, pid, what, report, restart, refusal)

    def _start_again(self, task: Task) -> Death | None:
        process = self._processes[task]
        try:
            # It has ended already; `kill` closes this process's ends of its pipes.
            process.kill()
            process.start()
        except OSError as exc:
            report = f"  task: {task[0]} {task[1]} at {process.address}\n  error: {exc}"
            return self._restarted(task, 0, "could not start", report, time.monotonic())
        if self._is_over:
            # Python collected the cluster in this thread meanwhile, before this process existed.
            process.kill()
        return None

    def _sleep(self) -> None:
        """Wait until a process ends, a pause is over, or somebody calls `_wake_up`."""
        poller = select.poll()
        with self.lock:
            if self._is_over or self._wake is None:
                return
            woken = self._wake[0]
            poller.register(woken, select.POLLIN)
            timeout_s = self._watch_descriptors(poller)
            if self._due:
                pause = max(0.0, min(self._due.values()) - time.monotonic())
                timeout_s = pause if timeout_s is None else min(timeout_s, pause)
        # Rounded up: a thread that wakes a moment early has to wake twice.
        poller.poll(None if timeout_s is None else int(timeout_s * 1000) + 1)
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)

    def _watch_descriptors(self, poller: select.poll) -> float | None:
        """Register the descriptor of each process with `poller`.

        Call under `lock`.

        Returns:
            The seconds after which to look at processes without a descriptor; None if all have one.
        """
        limit = None
        for task, process in self._processes.items():
            pid, descriptor = self._descriptors.get(task, (0, -1))
            if descriptor >= 0 and (not process.is_running() or pid != process.pid):
                del self._descriptors[task]
                os.close(descriptor)
                descriptor = -1
            if not process.is_running():
                # It may have ended since the last look: then look again at once.
                if process.has_ended() and self._ended.get(task) != process.pid:
                    limit = 0.0
                continue
            if descriptor < 0:
                descriptor = _descriptor_of(process.pid)
                if descriptor >= 0:
                    self._descriptors[task] = process.pid, descriptor
            if descriptor < 0:
                limit = _POLL_INTERVAL_S if limit is None else limit
            else:
                poller.register(descriptor, select.POLLIN)
        return limit

    def _wake_up(self) -> None:
        if self._wake is not None:
            # A full pipe wakes as well.
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake[1], b".")


def _descriptor_of(pid: int) -> int:
    """Return a file descriptor that is readable once a process has ended, -1 if there is none.

    Some systems and sandboxes have none, and the process may have ended just now.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
