"""Watches the workers of a flight: starts sessions, abandons stuck calls, lets workers leave."""

from __future__ import annotations

import time
from collections.abc import Callable

from kerasps.cluster.members.membership import Membership
from kerasps.training.calls.coordinator_port import CoordinatorPort
from kerasps.training.epoch.epoch_events import ClusterGrew, WorkerEnd, WorkerEnded, WorkerLeaves
from kerasps.training.sessions.channel import EpochChannel, Mailbox, Sessions
from kerasps.training.sessions.worker_lanes import WorkerLanes

# A call to a lost worker ends in an error, mostly at once. After this time, it counts as stuck.
_GIVE_UP_S = 15.0


class WorkerWatch:
    """Starts and abandons the sessions of a flight as its workers join, are lost or leave.

    Thread: the flight's.
    """

    def __init__(
        self,
        port: CoordinatorPort,
        membership: Membership,
        channel: EpochChannel,
        sessions: Sessions,
        lanes: WorkerLanes,
        *,
        start: Callable[[], None],
    ) -> None:
        self._port = port
        self._membership = membership
        self._channel = channel
        self._sessions = sessions
        self._lanes = lanes
        self._start = start
        self._num_started = 0
        # For each lost worker: its session, and the time at which it was first seen there.
        self._lost_since: dict[int, tuple[Mailbox, float]] = {}
        self._known_leaving: set[int] = set()

    def start_all(self) -> None:
        """Start a session for each worker."""
        self._take_in()

    def update(self) -> None:
        """Handle all changes since the last call. Call repeatedly."""
        if not self._sessions.is_over:
            self._take_in()
            self._report_absent()
        self._give_up()
        self._dismiss_leaving()

    def close_lanes(self) -> None:
        """Close the lanes of all sessions, so that no update of theirs is applied any more."""
        for worker in self._sessions.at_work():
            self._lanes.end(worker, WorkerEnd.HANGS)

    def give_up_all(self) -> None:
        """Abandon all sessions whose calls do not return. Their lanes are closed, or lost."""
        for worker, mailboxes in self._sessions.at_work().items():
            for mailbox in mailboxes:
                self._drop(mailbox, WorkerEnded(worker, WorkerEnd.HANGS))
            self._port.renew_worker(worker)

    def _take_in(self) -> None:
        """Start sessions for workers that have joined."""
        self._port.add_workers(self._membership.num_workers)
        num_workers = self._port.num_workers
        if num_workers > self._channel.num_workers:
            self._channel.post(ClusterGrew(num_workers))
        while self._num_started < num_workers:
            self._start()
            self._num_started += 1

    def _report_absent(self) -> None:
        """Tell the state of workers that were lost while they had no session."""
        for worker in self._membership.absent_workers:
            # Not a lane that a session may open meanwhile.
            lane = self._lanes.lane(worker)
            if worker < self._channel.num_workers and self._channel.awaits(worker):
                self._channel.post(self._lanes.end(worker, WorkerEnd.DIED, lane=lane))

    def _give_up(self) -> None:
        """Abandon sessions whose worker is lost and whose call does not return."""
        at_work, now = self._sessions.at_work(), time.monotonic()
        for worker in list(self._lost_since):
            if worker not in at_work:
                del self._lost_since[worker]
        for worker in self._membership.absent_workers & at_work.keys():
            mailbox = at_work[worker][0]
            known, since = self._lost_since.get(worker, (None, now))
            if known is not mailbox:
                since = now
            self._lost_since[worker] = (mailbox, since)
            if now - since > _GIVE_UP_S:
                self._drop(mailbox, self._lanes.end(worker, WorkerEnd.HANGS))
                if not self._sessions.is_over:
                    # Its thread never returns; another replaces it.
                    self._port.renew_worker(worker)
                    self._start()

    def _dismiss_leaving(self) -> None:
        """Dismiss leaving workers that hold no executions or results any more."""
        leaving = self._membership.leaving_workers
        for worker in leaving - self._known_leaving:
            self._known_leaving.add(worker)
            if worker < self._channel.num_workers:
                self._channel.post(WorkerLeaves(worker))
        for worker in leaving:
            if worker < self._channel.num_workers and self._channel.is_drained(worker):
                self._channel.post(self._lanes.end(worker, WorkerEnd.LEFT))
                self._sessions.end_one(worker)
                self._membership.dismiss(worker)
        self._known_leaving &= leaving

    def _drop(self, mailbox: Mailbox, ended: WorkerEnded) -> None:
        """Abandon a session whose call does not return."""
        self._sessions.post(mailbox, ended)
        self._sessions.remove_session(mailbox)
