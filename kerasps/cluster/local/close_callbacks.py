"""The functions that a `LocalCluster` calls when it is closed, before its tasks end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from kerasps.cluster.processes.process import TaskProcess
from kerasps.cluster.processes.restarts import Task
from kerasps.cluster.processes.stderr_filter import without_lines_about_tasks
from kerasps.cluster.processes.task_watch import TaskWatch
from kerasps.runtime.probe import Answer, ask_servers

_Returned = TypeVar("_Returned")
# A task that runs answers within milliseconds.
_ANSWER_S = 1.0


class CloseCallbacks:
    """The functions that a cluster calls before its tasks end.

    Thread: any, one at a time.
    """

    def __init__(self) -> None:
        self._notices: list[Callable[[str], None]] = []
        self._callbacks: list[Callable[[str], None]] = []

    def add(self, callback: Callable[[str], None], notice: Callable[[str], None] | None) -> None:
        """Add functions; see `LocalCluster.before_close`."""
        self._callbacks.append(callback)
        if notice is not None:
            self._notices.append(notice)

    def run(
        self,
        how: str,
        processes: Mapping[Task, TaskProcess],
        watch: TaskWatch,
        end: Callable[[], _Returned],
    ) -> _Returned:
        """Call the remaining functions, then `end`, also after a failure; return `end`'s result."""
        if not self._callbacks:
            return end()
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_lines_about_tasks())
            for notice in self._notices:
                notice(how)
            stack.enter_context(_silent_killed(processes, watch))
            try:
                # Remove each from the list first: a callback may close the cluster itself.
                while self._callbacks:
                    self._callbacks.pop()(how)
            finally:
                returned = end()
        return returned


@contextlib.contextmanager
def _silent_killed(processes: Mapping[Task, TaskProcess], watch: TaskWatch) -> Iterator[None]:
    """In this context, kill processes that do not answer, so that nobody waits for them."""

    def kill() -> None:
        addresses = {t: p.address for t, p in list(processes.items()) if p.is_running()}
        for task, answer in ask_servers(addresses, _ANSWER_S).items():
            if answer is not Answer.SERVES:
                with watch.lock:
                    watch.stop_watching(task)
                    processes[task].kill()

    is_over = threading.Event()

    def keep_killing() -> None:
        while not is_over.wait(_ANSWER_S):
            kill()

    kill()
    thread = threading.Thread(target=keep_killing, daemon=True)
    # Python starts no thread while it ends, from 3.12 on.
    with contextlib.suppress(RuntimeError):
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()
