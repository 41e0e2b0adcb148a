"""The functions that a `LocalCluster` calls when it is closed, before its tasks end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from kerasps.cluster.members.silent_tasks import silent_killed
from kerasps.cluster.processes.process import TaskProcess
from kerasps.cluster.processes.restarts import Task
from kerasps.cluster.processes.stderr_filter import without_lines_about_tasks
from kerasps.cluster.processes.task_watch import TaskWatch

_Returned = TypeVar("_Returned")


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
            stack.enter_context(silent_killed(processes, watch))
            try:
                # Remove each from the list first: a callback may close the cluster itself.
                while self._callbacks:
                    self._callbacks.pop()(how)
            finally:
                returned = end()
        return returned
