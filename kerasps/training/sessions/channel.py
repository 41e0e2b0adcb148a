"""The channel between the epoch's state and the threads: events go in, commands come out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from kerasps.cluster.members.membership import Membership
from kerasps.runtime.inbox import Inbox
from kerasps.training.epoch.epoch_events import (
    AllAsked,
    Command,
    Event,
    Execution,
    Report,
    ResultsWanted,
    SessionBegan,
)
from kerasps.training.epoch.epoch_state import EpochState
from kerasps.training.epoch.worker_state import WorkerActivity
from kerasps.variables.lanes.flights import Holders

# The commands for one session, in their order; None ends the session.
Mailbox = queue.SimpleQueue[Command | None]


class EpochChannel:
    """Passes events to an `EpochState` under one lock, and its commands to sessions and `fit`.

    An interrupt can end `fit`'s thread anywhere, also in the middle of the state's code. A state
    that was interrupted within an event is never used again: the channel drops later events. That
    is safe, since an interrupt of `fit`'s thread ends the epoch, and the end of sessions
    (`Sessions`) does not depend on the state.
    """

    def __init__(self, state: EpochState) -> None:
        # A lock implemented in C and taken by `with`: an interrupt cannot leave it locked.
        self.lock = threading.Lock()
        self._state = state
        self._is_torn = False
        self.mailboxes: dict[int, Mailbox] = {}
        self.reports: Inbox[Report] = Inbox()

    def post(self, event: Event) -> None:
        """Pass an event to the state. Thread: any."""
        with self.lock:
            self.handle(event)

    def handle(self, event: Event) -> None:
        """Pass an event to the state. Call with the lock held."""
        if self._is_torn:
            return
        self._is_torn = True
        for command in self._state.handle(event):
            if isinstance(command, Report):
                self.reports.put(command)
            elif command.worker in self.mailboxes:
                self.mailboxes[command.worker].put(command)
        self._is_torn = False

    @property
    def num_in_flight(self) -> int:
        """The number of executions that were asked for and are not done."""
        with self.lock:
            return self._state.num_in_flight

    @property
    def is_dealt_evenly(self) -> bool:
        """True if updates are synchronous and workers were given equally many steps."""
        with self.lock:
            return self._state.is_dealt_evenly

    @property
    def num_workers(self) -> int:
        """The number of workers that the state knows."""
        with self.lock:
            return len(self._state.workers)

    @property
    def running(self) -> dict[int, list[Execution]]:
        """The executions that were sent to each worker and are not known to be done."""
        with self.lock:
            return self._state.workers.running

    def activities(self) -> dict[int, WorkerActivity]:
        """Return the part of each worker in the loop, by its index."""
        with self.lock:
            workers, in_flight = self._state.workers, self._state.num_in_flight
            running = sum(len(worker.running) for worker in workers.states)
            return workers.activities(is_queued=in_flight > running)

    def is_drained(self, worker: int) -> bool:
        """Return whether a leaving worker holds no executions or results any more."""
        with self.lock:
            return self._state.workers.is_drained(worker)

    def awaits(self, worker: int) -> bool:
        """Return whether a worker has no session, and is not known to be lost."""
        with self.lock:
            return self._state.workers.awaits(worker)

    def holds_results(self, worker: int) -> bool:
        """Return whether a worker holds results of executions that it has done."""
        with self.lock:
            return self._state.workers.holds_results(worker)

    @property
    def lost_workers(self) -> frozenset[int]:
        """The workers that were lost and have done nothing since."""
        with self.lock:
            return self._state.workers.lost_workers

    def history(self) -> str:
        """Return the last events of the state as text, with the commands that followed each."""
        with self.lock:
            return self._state.history()

    def finish_if_done(self, *, all_asked: bool) -> bool:
        """Return True if no report will follow unless more steps are asked for.

        When every step is done, or no worker can do it, fetch the results that workers hold. Return
        True once these are reported.

        `all_asked`: whether no more steps will be asked for, unless some are reported missing.
        """
        with self.lock:
            if all_asked:
                self.handle(AllAsked())
            if self._state.num_in_flight and not self._state.workers.is_exhausted:
                return False
            self.handle(ResultsWanted())
            return not self._state.workers.has_results_due and self.reports.empty()


class Sessions:
    """The sessions of one flight, with their mailboxes.

    A flight is over when `end` was called and no session has anything in flight on its worker.
    """

    def __init__(self, channel: EpochChannel, membership: Membership) -> None:
        self._channel = channel
        self._membership = membership
        # Not for `fit`'s thread: an interrupt in the `__exit__` of a condition leaves it locked.
        self._changed = threading.Condition(channel.lock)
        self._is_over = False
        self.error: BaseException | None = None
        self.wake: Callable[[], None] = lambda: None
        # The mailboxes of sessions that have something in flight on their worker, also of failed
        # sessions whose executor is not empty yet.
        self._at_work: list[tuple[int, Mailbox]] = []
        channel.mailboxes = {}

    @property
    def is_over(self) -> bool:
        """True once no session may begin any more."""
        return self._is_over

    @property
    def has_failed(self) -> bool:
        """True if the flight ends in an error."""
        return self.error is not None

    def enter(self, event: SessionBegan) -> Mailbox | None:
        """Begin a session; return its mailbox, or None if the flight is over."""
        worker = event.worker
        with self._changed:
            if self._is_over:
                return None
            mailbox: Mailbox = queue.SimpleQueue()
            self._channel.mailboxes[worker] = mailbox
            self._channel.handle(event)
            self._at_work.append((worker, mailbox))
            return mailbox

    def end_one(self, worker: int) -> None:
        """End the session of a worker after its current command."""
        with self._changed:
            if worker in self._channel.mailboxes:
                self._channel.mailboxes[worker].put(None)

    def remove_session(self, mailbox: Mailbox) -> None:
        """Note that a session has nothing in flight on its worker any more."""
        with self._changed:
            self._at_work = [entry for entry in self._at_work if entry[1] is not mailbox]
            self._changed.notify_all()

    def post(self, mailbox: Mailbox, event: Event) -> None:
        """Pass an event of a session to the state, unless the session was abandoned."""
        with self._changed:
            if self.is_at_work(mailbox):
                self._channel.handle(event)

    def is_at_work(self, mailbox: Mailbox) -> bool:
        """Return False once a session has nothing in flight, or was abandoned."""
        return any(entry[1] is mailbox for entry in list(self._at_work))

    def at_work(self) -> dict[int, list[Mailbox]]:
        """Return the sessions that have something in flight, by worker."""
        found: dict[int, list[Mailbox]] = {}
        for worker, mailbox in list(self._at_work):
            found.setdefault(worker, []).append(mailbox)
        return found

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until no session has anything in flight; return False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._at_work, timeout)

    def holders(self) -> Holders:
        """Return the tasks that the end of the flight waits for."""
        workers = sorted(self.at_work())
        silent = sorted(self._membership.silent_workers.intersection(workers))
        names = " and ".join(self._membership.name_of(worker) for worker in silent or workers)
        if not workers or self._membership.lost_ps is not None:
            return Holders("a ps does not answer")
        if silent:
            return Holders(f"no answer from {names}")
        return Holders(f"{names} answers, so they may be long, or wait for data", answer=True)

    def fail(self, error: BaseException) -> None:
        """End the flight in `error`, unless it has another error already."""
        self.error = self.error or error
        self._channel.reports.put(Report())
        self.wake()

    def end(self) -> None:
        """End every session after its current command."""
        with self._changed:
            self._is_over = True
            for mailbox in self._channel.mailboxes.values():
                mailbox.put(None)
