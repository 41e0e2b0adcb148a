"""Watches the processes of a cluster on this machine, and restarts workers that die.

One thread looks at them ten times a second. It holds no reference to the cluster, so Python can
collect a forgotten cluster. All code that starts a process, or ends one on purpose, holds `lock`;
so no process is started after the cluster was closed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kerasps.cluster.processes.process import TaskProcess
from kerasps.cluster.processes.restarts import Restart, RestartBudget, Task
from kerasps.runtime.supervision import Notice

# The interval between two looks at the processes: short for a restart, and next to no time of a
# core.
_POLL_INTERVAL_S = 0.1
# The thread does nothing that takes long, unless the reader of stderr blocks it.
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Death:
    """A process that ended without being told to."""

    task: Task
    # 0 if a process could not be started.
    pid: int
    # The event in words, usually "died".
    what: str
    report: str
    restart: Restart | None
    # The reason, in words, for not restarting it.
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
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._is_over = False
        # True once a process ended without being told to.
        self.saw_death = False

    def start(self) -> None:
        """Begin to watch. Call when all processes are ready."""
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
        while not self._is_over:
            with self.lock:
                deaths = self._look(time.monotonic())
            for death in deaths:
                # An error in the callback must not end the watch.
                with contextlib.suppress(Exception):
                    self.on_death(death)
            # Not an event: Python may collect the cluster while it waits, and `close` would hang.
            time.sleep(_POLL_INTERVAL_S)

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
        self.saw_death = True
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
