"""Flights: periods in which steps run, each in a separate thread that no interrupt reaches.

Python raises Ctrl-C, and the exceptions of signal handlers, in the main thread, at any instant:
also within an `except`, a `finally` or the `__exit__` of a lock that is written in Python. So the
main thread does no work that must be completed. The thread of a `Flight` does it. It copies small
variables into fused storages, lets the steps run, waits until none is in flight, and copies back.

A flight ends when its owner calls `end`, or when the owner itself ends. The owner holds a
`threading.Lock` in a `with` statement. The lock's `__exit__` is written in C, so no interrupt can
split it, however the block ends.

A thread that reads a variable waits until the flights that are ending have landed
(`wait_for_ending_flights`).
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kerasps.checks import time_limit
from kerasps.errors import WorkerLostError
from kerasps.runtime.calls import calling
from kerasps.runtime.inbox import Inbox
from kerasps.runtime.supervision import tell_supervisor

# How often a flight checks that its owner still exists, and a waiting thread checks that its flight
# has not landed. Usually a queue reports either at once.
_POLL_S = 0.1
# An ordinary step takes less, and a person at a prompt begins to wonder.
_WARN_AFTER_S = 10.0
# A scheduler restarts a lost worker within a minute or two; after this time, a person should look.
_WORKER_TIMEOUT_S = 600.0

# The flights that run or are ending, without those that have landed.
_in_flight: set[Flight] = set()


class _ThreadState(threading.local):
    is_aboard = False


_STATE = _ThreadState()


@contextlib.contextmanager
def aboard() -> Iterator[None]:
    """In this context, make this thread belong to a flight, so that it waits for no flight."""
    before, _STATE.is_aboard = _STATE.is_aboard, True
    try:
        with calling():
            yield
    finally:
        _STATE.is_aboard = before


def wait_for_ending_flights() -> None:
    """Wait until no flight is ending. After that, values are in their variables.

    Thread: any. A thread of a flight does not wait. Raises WorkerLostError if a worker has a step
    in progress and has not answered for KERASPS_WORKER_TIMEOUT seconds (600).
    """
    if _in_flight and not _STATE.is_aboard:
        for flight in list(_in_flight):
            if flight.is_over:
                flight.wait()


def wait_for_flights(limit: float) -> None:
    """Wait until all flights have landed, for at most `limit` seconds. Call when all are ending.

    Thread: any except those of flights.
    """
    deadline = time.monotonic() + limit
    for flight in list(_in_flight):
        flight.wait(limit=max(0.0, deadline - time.monotonic()))


def worker_timeout() -> float:
    """Return the seconds for which a worker may be silent: KERASPS_WORKER_TIMEOUT, else 600."""
    return time_limit(None, variable="KERASPS_WORKER_TIMEOUT", default=_WORKER_TIMEOUT_S)


@dataclass(frozen=True)
class Holders:
    """The tasks that a flight waits for."""

    text: str  # a clause that names them, for messages
    # Whether all of them answer. Then their steps are long, or wait for data.
    answer: bool = False


class Flight:
    """A period in which steps run, in a separate thread.

    Args:
        owner: a lock that the owner holds for as long as it exists. If it is free, no work begins.
        work: called with this flight, in its thread. It copies values to fused storages, and
            returns when `is_over`, no step is in flight, and the values are copied back.
        holders: returns the tasks with steps in progress.
    """

    def __init__(
        self,
        owner: threading.Lock,
        work: Callable[[Flight], object],
        holders: Callable[[], Holders],
    ) -> None:
        self._owner = owner
        self._work = work
        self._holders = holders
        self._ended = False
        # A put only wakes the waiting thread, which then checks the state.
        self._for_flight: Inbox[None] = Inbox()
        self._for_owner: Inbox[None] = Inbox()
        self.has_landed = False
        self.result: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread. Call while holding the owner's lock."""
        _start_thread(self._run)

    @property
    def is_over(self) -> bool:
        """True once no more steps may begin: the owner called `end`, or has ended."""
        return self._ended or self.is_abandoned

    @property
    def is_abandoned(self) -> bool:
        """True once the owner has ended, whether or not it waited until the flight had landed."""
        return not self._owner.locked()

    def end(self) -> None:
        """Allow no more steps to begin. The flight lands when no step is in flight."""
        self._ended = True
        self._for_flight.put(None)

    def wait_until_over(self, look: Callable[[], None], has_failed: Callable[[], bool]) -> None:
        """Wait until the flight is over or, after a call of `look`, something has failed.

        Thread: the flight's. `end` and `wake` wake it at once.
        """
        while not self.is_over:
            look()
            if has_failed():
                return
            with contextlib.suppress(queue.Empty):
                self._for_flight.get(timeout=_POLL_S)

    def wake(self) -> None:
        """Wake `wait_until_over`, which then calls `look` again."""
        self._for_flight.put(None)

    def wait(self, limit: float | None = None) -> bool:
        """Wait until the flight has landed.

        Thread: any except the flight's. Warns after 10 seconds, unless there is a limit.

        Args:
            limit: the seconds to wait at most. Default None: for as long as all tasks answer, and
                for the time that a task may be silent.

        Returns True if it has landed.

        Without a limit, raises WorkerLostError after KERASPS_WORKER_TIMEOUT seconds (600) in which
        a task was silent.
        """
        began = silent_since = time.monotonic()
        warned, timeout = False, worker_timeout()
        while not self.has_landed:
            with contextlib.suppress(queue.Empty):
                self._for_owner.get(timeout=_POLL_S)
            now = time.monotonic()
            if self.has_landed or (limit is not None and now - began > limit):
                break
            if limit is not None or now - began <= min(_WARN_AFTER_S, timeout):
                continue
            holders = self._holders()
            if holders.answer:
                silent_since = now
            if now - silent_since > timeout:
                tell_supervisor("lost", "worker", 0)
                raise WorkerLostError(_waiting_text(now - began, timeout, holders))
            if now - began > _WARN_AFTER_S and not warned:
                warned = True
                warnings.warn(_waiting_text(now - began, timeout, holders), stacklevel=3)
        return self.has_landed

    def _run(self) -> None:
        with aboard():
            _in_flight.add(self)
            try:
                # Check after adding this flight to the set. If the owner has ended by now, a read
                # of variables either waits for this flight, or precedes all of its work.
                if self._owner.locked():
                    self.result = self._work(self)
            except BaseException as exc:
                self.error = exc
            finally:
                self.has_landed = True
                _in_flight.discard(self)
                self._for_owner.put(None)


def _waiting_text(waited: float, timeout: float, holders: Holders) -> str:
    text = (
        f"Steps that were sent before are not done after {waited:.0f} s: {holders.text}. "
        "Until they are done, the variables that they change cannot be used."
    )
    if holders.answer:
        return text
    return (
        f"{text} Expected: an answer within {timeout:.0f} s. Continue the worker's process if it "
        "was stopped (SIGCONT), or restart the worker; set KERASPS_WORKER_TIMEOUT to wait longer."
    )


def _start_thread(run: Callable[[], None]) -> None:
    # `Thread.start` waits on a `Condition` until the thread runs. An interrupt there would make the
    # thread wait for ever.
    _thread.start_new_thread(run, ())
