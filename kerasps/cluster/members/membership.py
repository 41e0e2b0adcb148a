"""Watches the tasks of a connected cluster, and reconnects workers that answer again.

TensorFlow notices a dead task only when it calls it, and never notices a task that hangs. So a
thread polls every task once a second (`MemberPoll`). `Presence` decides the status of each task
from the answers, and `SharedPresence` acts on changes: it closes the connections to a task that
hangs, so that pending calls to it end. `ClusterUpdates` puts a worker that answers again back into
TensorFlow's cluster, whatever the status of the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kerasps.cluster.members.cluster_updates import ClusterUpdates
from kerasps.cluster.members.departures import Departures
from kerasps.cluster.members.member_poll import MemberPoll
from kerasps.cluster.members.presence import Status, Task
from kerasps.cluster.members.shared_presence import SharedPresence
from kerasps.runtime.errors import is_dead
from kerasps.runtime.probe import ANSWER_S, Answer, ask_servers

# The values of `Status`, for type checkers.
WorkerStatus = Literal["connected", "hangs", "lost", "leaving", "left", "joining"]


@dataclass(frozen=True)
class WorkerInfo:
    """The status of a worker.

    ```python
    for worker in strategy.workers():
        print(worker.index, worker.address, worker.status, worker.since_s)
    ```

    Args:
        index: its index in its job.
        address: its `"host:port"`.
        status: `"connected"`, `"hangs"` (it does not answer), `"lost"`, `"leaving"`, `"left"` or
            `"joining"`.
        since_s: the seconds since it has that status.
        times_lost: how often it was lost, or did not answer for too long. Default 0.
        times_back: how often it returned afterwards. Default 0.
    """

    index: int
    address: str
    status: WorkerStatus
    since_s: float
    times_lost: int = 0
    times_back: int = 0


class Membership:
    """Tracks the status of a cluster's workers and ps, from the connection on.

    It starts the threads that poll the tasks and update TensorFlow's cluster, returns the status of
    tasks, and records failed calls. Thread: any.
    """

    def __init__(
        self, addresses: Mapping[Task, str], resolve: Callable[[], Mapping[int, str]]
    ) -> None:
        self._shared = SharedPresence(addresses)
        self._departures = Departures(self._shared)
        self._poll = MemberPoll(self._shared, self._departures, resolve)
        self._updates = ClusterUpdates(self._shared)
        self._is_closed = False

    def start(self) -> None:
        """Start the watch."""
        for run, name in (
            (self._poll.run, "kerasps-watch"),
            (self._updates.run, "kerasps-members"),
        ):
            threading.Thread(target=run, name=name, daemon=True).start()

    def stop(self) -> None:
        """Stop the watch, because the process ends."""
        self._shared.stop()

    def close(self) -> None:
        """Stop the watch, because the cluster is closed; from then on it counts as lost."""
        self._is_closed = True
        self.stop()

    @property
    def is_closed(self) -> bool:
        """True once the cluster is closed."""
        return self._is_closed

    # Queries

    @property
    def num_workers(self) -> int:
        """The number of workers, including those that do not answer."""
        with self._shared.lock:
            return len(self._shared.presence.of("worker"))

    def workers(self) -> list[WorkerInfo]:
        """Return the status of each worker."""
        return self.tasks("worker")

    def tasks(self, job: str) -> list[WorkerInfo]:
        """Return the status of each task of a job, `"worker"` or `"ps"`."""
        with self._shared.lock:
            presence, now = self._shared.presence, time.monotonic()
            return [
                WorkerInfo(
                    index,
                    presence.addresses[job, index],
                    presence.status((job, index)).value,
                    now - presence.since((job, index)),
                    *presence.changes((job, index)),
                )
                for index in presence.of(job)
            ]

    def address(self, task: Task) -> str:
        """Return the `"host:port"` of a task."""
        with self._shared.lock:
            return self._shared.presence.addresses[task]

    def name_of(self, worker: int) -> str:
        """Return the name of a worker in messages: its index and its address."""
        return f"worker {worker} at {self.address(('worker', worker))}"

    @property
    def absent_workers(self) -> set[int]:
        """The workers that cannot get steps: lost, hung, left, or not connected yet."""
        with self._shared.lock:
            presence = self._shared.presence
            there = presence.of("worker", Status.CONNECTED, Status.LEAVING)
            return {*presence.of("worker")} - {*there}

    @property
    def silent_workers(self) -> set[int]:
        """The workers that did not answer when they were asked last, and those that are absent."""
        with self._shared.lock:
            presence = self._shared.presence
            return {w for w in presence.of("worker") if presence.is_silent(("worker", w))}

    @property
    def leaving_workers(self) -> set[int]:
        """The workers that are about to leave: they finish their steps, and get no new ones."""
        with self._shared.lock:
            return {*self._shared.presence.of("worker", Status.LEAVING)}

    @property
    def lost_ps(self) -> int | None:
        """A ps that hangs or is lost, None if all answer; 0 if the cluster is closed."""
        if self._is_closed:
            return 0
        with self._shared.lock:
            lost = self._shared.presence.of("ps", Status.HUNG, Status.LOST)
        return lost[0] if lost else None

    def hangs(self, ps: int) -> bool:
        """Return whether a ps that does not answer may still be alive."""
        with self._shared.lock:
            return self._shared.presence.status(("ps", ps)) is Status.HUNG

    def has_worker(self, worker: int) -> bool:
        """Return whether a worker can be called."""
        return worker not in self.absent_workers

    def generation(self, worker: int) -> int:
        """Return how often a worker was reconnected. Each time it had lost its state."""
        with self._shared.lock:
            return self._shared.presence.generation(("worker", worker))

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """In this context, do not dismiss leaving workers before the caller calls `dismiss`."""
        return self._departures.in_use()

    # Events

    def lose(self, worker: int, reason: str) -> None:
        """Record that a call to a worker failed, and that it no longer knows this process."""
        self._shared.change(lambda presence, now: presence.lose(("worker", worker), now, reason))

    def give_up_leaving(self, worker: int, reason: str) -> bool:
        """Give up a worker on which a call failed, if it refuses new connections.

        Such a worker died, or is about to leave, noticed before or not. It cannot finish its steps:
        a ps that has no connection to it yet gets none.

        Returns:
            True if the worker was given up.
        """
        address = self.address(("worker", worker))
        if ask_servers({worker: address}, ANSWER_S)[worker] is not Answer.REFUSES:
            return False
        if is_dead(f"/job:worker/replica:0/task:{worker}"):
            self.lose(worker, reason)
            return True
        self._shared.change(
            lambda presence, now: presence.give_up_leaving(("worker", worker), now, reason)
        )
        self.dismiss(worker)
        return True

    def wait_until_there(self, worker: int) -> None:
        """Wait until a worker can be called again. Thread: that of the worker's sessions."""
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(
                lambda: (
                    shared.has_stopped
                    or shared.presence.status(("worker", worker))
                    in (Status.CONNECTED, Status.LEAVING)
                )
            )

    def dismiss(self, worker: int) -> None:
        """Tell a worker that is about to leave to end now. Call when it has no results any more."""
        self._departures.dismiss(worker)
