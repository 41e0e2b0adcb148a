"""Kills the tasks of a local cluster that do not answer while it is closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from kerasps.cluster.processes.process import TaskProcess
from kerasps.cluster.processes.restarts import Task
from kerasps.cluster.processes.task_watch import TaskWatch
from kerasps.runtime.probe import Answer, ask_servers

# A task that runs answers within milliseconds.
_ANSWER_S = 1.0


@contextlib.contextmanager
def silent_killed(processes: Mapping[Task, TaskProcess], watch: TaskWatch) -> Iterator[None]:
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
