"""Shares the status of a cluster's tasks among the threads that read, change or await it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from kerasps.cluster.members.presence import Noticed, Presence, Status, Task
from kerasps.runtime.grpc_options import hang_limit
from kerasps.runtime.probe import break_connections
from kerasps.runtime.supervision import tell_supervisor

_LOGGER = logging.getLogger("kerasps")


class SharedPresence:
    """Guards a `Presence` with one lock, and acts on its changes.

    It logs each change in one line. It closes the connections to a task that hangs, so that pending
    calls to it end. It wakes the threads that wait for a change.

    Contract: hold `lock`, or `changed`, to read `presence`. Send events through `change`. If an
    event and a query must see the same state, hold `changed` for both, and pass the changes that
    the event returned to `follow` after releasing it. Thread: any.

    Attributes:
        presence: the status of each task.
        lock: guards `presence`.
        changed: the condition of `lock`; notified of each change, and on `stop`.
        is_update_due: set when TensorFlow's cluster may need an update, and on `stop`.
        has_stopped: True once the watch is over. Then nothing is logged and no connection closed.
    """

    def __init__(self, addresses: Mapping[Task, str]) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.presence = Presence(addresses, limit_s=hang_limit(), now=time.monotonic())
        self.is_update_due = threading.Event()
        self.has_stopped = False

    def stop(self) -> None:
        """End the watch, and wake all threads that wait."""
        with self.changed:
            self.has_stopped = True
            self.changed.notify_all()
        self.is_update_due.set()

    def change(self, event: Callable[[Presence, float], list[Noticed]]) -> None:
        """Send an event to the presence, and act on the changes."""
        with self.changed:
            noticed = event(self.presence, time.monotonic())
        self.follow(noticed)

    def follow(self, noticed: list[Noticed]) -> None:
        """Act on changes. Call without the lock."""
        if self.has_stopped:
            return
        for one in noticed:
            if one.status is Status.HUNG:
                break_connections(one.address)
                # `count_silent_as_hung` reports tasks before the limit.
                if one.after_s >= hang_limit():
                    tell_supervisor("hung", *one.task)
            text = _in_words(one)
            if text:
                _LOGGER.warning(text)
        if noticed:
            with self.changed:
                self.changed.notify_all()
            self.is_update_due.set()


def _in_words(noticed: Noticed) -> str:
    """Return one line that names a change and what happens next; empty if there is none to log."""
    job, index = noticed.task
    name = f"{job} {index} at {noticed.address}"
    if job == "ps":
        if noticed.status is Status.HUNG:
            return (
                f"{name} has not answered for {noticed.after_s:.0f} s and counts as lost, with its "
                "variables."
            )
        return ""
    match noticed.status:
        case Status.HUNG if noticed.before is Status.LOST:
            return f"{name} has not answered for {noticed.after_s:.0f} s: it hangs."
        case Status.HUNG:
            return (
                f"{name} has not answered for {noticed.after_s:.0f} s and counts as lost: other "
                "workers do its steps. It is reconnected when it answers."
            )
        case Status.LOST:
            return (
                f"{name} is lost ({noticed.reason}): other workers do its steps. It is reconnected "
                "when it answers."
            )
        case Status.LEAVING:
            return f"{name} is about to leave: it finishes its steps, and gets no new ones."
        case Status.LEFT if noticed.reason:
            return (
                f"{name} leaves, and could not finish its steps ({noticed.reason}): other workers "
                "do them."
            )
        case Status.CONNECTED if noticed.before is Status.JOINING:
            return f"{name} has joined."
        case Status.CONNECTED:
            return f"{name} is back, after {noticed.after_s:.1f} s."
    return ""
