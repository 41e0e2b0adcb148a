"""Polls the tasks of a cluster, and the cluster resolver for the addresses of workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from kerasps.cluster.members.departures import Departures
from kerasps.cluster.members.presence import Status, Task
from kerasps.cluster.members.shared_presence import SharedPresence
from kerasps.runtime.errors import is_dead
from kerasps.runtime.probe import ANSWER_S, Answer, ask_servers

_LOGGER = logging.getLogger("kerasps")

# The pause between polls; shorter while a task is unavailable, since others wait for it.
_INTERVAL_S = 1.0
_INTERVAL_ABSENT_S = 0.1
# The pause between calls of the cluster resolver.
_RESOLVE_S = 2.0


class MemberPoll:
    """Polls all tasks, and reports their answers to the presence.

    It detects tasks that hang, workers that refuse new connections because they are about to leave,
    and workers that move or join. It dismisses leaving workers while nobody uses the workers.
    Thread: a separate one, which calls `run`.
    """

    def __init__(
        self,
        shared: SharedPresence,
        departures: Departures,
        resolve: Callable[[], Mapping[int, str]],
    ) -> None:
        self._shared = shared
        self._departures = departures
        self._resolve = resolve

    def run(self) -> None:
        """Poll until the watch has stopped."""
        shared = self._shared
        resolve_at = 0.0
        interval = _INTERVAL_S
        while not shared.has_stopped:
            began = time.monotonic()
            with shared.lock:
                shared.presence.tick(began, interval)
                addresses = shared.presence.addresses
            self._hear(ask_servers(addresses, ANSWER_S))
            if began >= resolve_at:
                resolve_at = began + _RESOLVE_S
                self._look_for_moves()
            with shared.changed:
                interval = _INTERVAL_ABSENT_S if shared.presence.has_absent_tasks else _INTERVAL_S
                shared.changed.wait_for(lambda: shared.has_stopped, interval)

    def _hear(self, answers: Mapping[Task, Answer]) -> None:
        shared = self._shared
        with shared.changed:
            noticed = shared.presence.hear(answers, time.monotonic(), ANSWER_S)
            is_back = bool(shared.presence.back)
            refusing = [
                task
                for task, answer in answers.items()
                if answer is Answer.REFUSES and shared.presence.status(task) is Status.CONNECTED
            ]
            idle = self._departures.idle()
        shared.follow(noticed)
        for task in refusing:
            self._look_at_refusing(task)
        for worker in idle:
            self._departures.dismiss(worker)
        if is_back:
            shared.is_update_due.set()

    def _look_at_refusing(self, task: Task) -> None:
        """Distinguish a task that died from one that only refuses new connections.

        A worker that refuses them is about to leave. If no steps use a ps, its loss is detected
        here first.
        """
        job, index = task
        if is_dead(f"/job:{job}/replica:0/task:{index}"):
            self._shared.change(
                lambda presence, now: presence.lose(task, now, "connection refused")
            )
        elif job == "worker":
            self._shared.change(lambda presence, now: presence.begin_leaving(task, now))

    def _look_for_moves(self) -> None:
        """Record the current addresses of workers, and new workers."""
        try:
            addresses = self._resolve()
        except Exception:  # a scheduler's API may be unavailable for a while
            _LOGGER.debug("The cluster resolver failed.", exc_info=True)
            return
        tasks = {("worker", index): address for index, address in addresses.items()}
        self._shared.change(lambda presence, now: presence.move(tasks, now))
