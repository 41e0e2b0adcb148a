"""Asks the tasks of a cluster whether they answer, and the cluster resolver where workers are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from kerasps.cluster.members.departures import Departures
from kerasps.cluster.members.presence import Status, Task
from kerasps.cluster.members.shared_presence import SharedPresence
from kerasps.runtime.errors import error_of
from kerasps.runtime.probe import ANSWER_S, Answer, ask_servers

_LOGGER = logging.getLogger("kerasps")

# How often tasks are asked. One that does not answer is asked more often, since others wait for it.
_INTERVAL_S = 1.0
_INTERVAL_AWAY_S = 0.1
# How often the cluster resolver is asked where the workers are.
_RESOLVE_S = 2.0


class MemberPoll:
    """Polls all tasks, and brings what they answer to the presence.

    It notices tasks that hang, workers that take no new connections since they are about to leave,
    and workers that move or join. It dismisses workers that are about to leave while nobody uses
    the workers. Thread: its own, which calls `run`.

    Args:
        shared: is told of the answers.
        departures: dismisses workers.
        resolve: returns where the workers are now, by index; asked again and again.
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
                interval = _INTERVAL_AWAY_S if shared.presence.is_anyone_away else _INTERVAL_S
                shared.changed.wait_for(lambda: shared.has_stopped, interval)

    def _hear(self, answers: Mapping[Task, Answer]) -> None:
        shared = self._shared
        with shared.changed:
            noticed = shared.presence.hear(answers, time.monotonic(), ANSWER_S)
            is_back = bool(shared.presence.back)
            refusing = [
                task
                for task, answer in answers.items()
                if answer is Answer.REFUSES and shared.presence.status(task) is Status.THERE
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
        """Tell a task that died from one that takes no new connections.

        A worker that does not is about to leave. A ps to which no steps go is missed here first.
        """
        job, index = task
        if error_of(f"/job:{job}/replica:0/task:{index}") is not None:
            self._shared.change(
                lambda presence, now: presence.lose(task, now, "connection refused")
            )
        elif job == "worker":
            self._shared.change(lambda presence, now: presence.leave(task, now))

    def _look_for_moves(self) -> None:
        """Note where workers are now, and which are new."""
        try:
            addresses = self._resolve()
        except Exception:  # a scheduler's API may be down for a while
            _LOGGER.debug("The cluster resolver failed.", exc_info=True)
            return
        tasks = {("worker", index): address for index, address in addresses.items()}
        self._shared.change(lambda presence, now: presence.move(tasks, now))
