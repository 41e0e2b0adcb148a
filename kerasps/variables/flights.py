"""Flights: times in which steps run, each in a separate thread that no interrupt reaches.

Ctrl-C, and whatever a signal handler raises, comes up in the main thread, at any instant: also
within an `except`, a `finally` or the `__exit__` of a lock that is written in Python. So the main
thread is trusted with nothing that must be done. The thread of a `Flight` does it. It copies small
variables to where they are fused, lets the steps run, waits until none does, and copies back.

A flight ends when its owner says so, and also when its owner is no longer there. The owner holds a
`threading.Lock` in a `with` statement. Its `__exit__` is written in C, so that no interrupt cuts it
in two, however the block ends.

A thread that looks at a variable waits (`come_to_rest`) until the flights that are ending have
landed.
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from kerasps.checks import time_limit
from kerasps.errors import WorkerLostError
from kerasps.runtime.supervision import tell_supervisor

# How often a flight looks whether its owner is still there, and who waits for one whether it has
# landed without telling. Neither is the ordinary way, which a queue tells at once.
_POLL_S = 0.1
# An ordinary step is done by then, and a person at a prompt begins to wonder.
_WARN_AFTER_S = 10.0
# A lost worker that is restarted by a scheduler takes a minute or two; longer than this, someone
# should look.
_WORKER_TIMEOUT_S = 600.0

# Those that run and those that are ending. A flight that has landed is in nobody's way.
_in_flight: set[Flight] = set()


class _ThreadState(threading.local):
    is_aboard = False


_STATE = _ThreadState()


@contextlib.contextmanager
def aboard() -> Iterator[None]:
    """In this context, have this thread belong to a flight, so that it waits for none."""
    before, _STATE.is_aboard = _STATE.is_aboard, True
    try:
        yield
    finally:
        _STATE.is_aboard = before


def come_to_rest() -> None:
    """Wait until no flight is ending. Values are in their variables then.

    Thread: any. A thread of a flight does not wait.

    Raises:
        WorkerLostError: a worker holds a step and has not answered for KERASPS_WORKER_TIMEOUT
            seconds (600).
    """
    if _in_flight and not _STATE.is_aboard:
        for flight in list(_in_flight):
            if flight.is_over:
                flight.wait()


def wait_for_flights(limit: float) -> None:
    """Wait until no flight is in the air, for so many seconds at most. Call when all are to end.

    Thread: any but those of flights.
    """
    deadline = time.monotonic() + limit
    for flight in list(_in_flight):
        flight.wait(limit=max(0.0, deadline - time.monotonic()))


def worker_timeout() -> float:
    """Return the seconds for which a worker may be silent: KERASPS_WORKER_TIMEOUT, else 600."""
    return time_limit(None, variable="KERASPS_WORKER_TIMEOUT", default=_WORKER_TIMEOUT_S)


class Flight:
    """A time in which steps run, in a separate thread.

    Args:
        owner: a lock that the owner holds for as long as it is there. Without it, no work begins.
        work: called with this flight, in its thread. It brings values to where steps find them, and
            returns when `is_over`, nothing runs any more, and the values are back.
        holders: returns words that name who is still at work, for the message of a long wait.
    """

    def __init__(
        self, owner: threading.Lock, work: Callable[[Flight], object], holders: Callable[[], str]
    ) -> None:
        self._owner = owner
        self._work = work
        self._holders = holders
        self._ended = False
        # A put only wakes up who waits; the reason is asked anew each time. Queues written in C: an
        # interrupt in the `__exit__` of a `Condition` leaves it locked.
        self._for_flight: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._for_owner: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.has_landed = False
        self.result: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread. Call while holding the owner's lock."""
        _start_thread(self._run)

    @property
    def is_over(self) -> bool:
        """True once nothing more may begin: the owner has said so, or has ended."""
        return self._ended or not self._owner.locked()

    def end(self) -> None:
        """Allow nothing more to begin. The flight lands when nothing runs any more."""
        self._ended = True
        self._for_flight.put(None)

    def wait_until_over(self, look: Callable[[], None], has_failed: Callable[[], bool]) -> None:
        """Wait until the flight is over or something has failed.

        Thread: the flight's. `end` and `wake` wake it at once.

        Args:
            look: called again and again.
            has_failed: asked after each call of `look`.
        """
        while not self.is_over:
            look()
            if has_failed():
                return
            with contextlib.suppress(queue.Empty):
                self._for_flight.get(timeout=_POLL_S)

    def wake(self) -> None:
        """Wake `wait_until_over`, which looks again."""
        self._for_flight.put(None)

    def wait(self, limit: float | None = None) -> bool:
        """Wait until the flight has landed.

        Thread: any other than the flight's. Warns after 10 seconds, unless there is a limit.

        Args:
            limit: the seconds to wait at most. Default None: the time that a worker may be silent.

        Returns:
            Whether it has landed.

        Raises:
            WorkerLostError: without a limit, after KERASPS_WORKER_TIMEOUT seconds (600).
        """
        began, warned = time.monotonic(), False
        timeout = worker_timeout()
        while not self.has_landed:
            with contextlib.suppress(queue.Empty):
                self._for_owner.get(timeout=_POLL_S)
            waited = time.monotonic() - began
            if self.has_landed or (limit is not None and waited > limit):
                break
            if limit is None and waited > timeout:
                tell_supervisor("lost", "worker", 0)
                raise WorkerLostError(self._waiting_text(waited, timeout))
            if limit is None and waited > _WARN_AFTER_S and not warned:
                warned = True
                warnings.warn(self._waiting_text(waited, timeout), stacklevel=3)
        return self.has_landed

    def _run(self) -> None:
        with aboard():
            _in_flight.add(self)
            try:
                # Asked after this flight is in the set. An owner that is gone by now and touches
                # variables either waits for this flight, or came before it did anything.
                if self._owner.locked():
                    self.result = self._work(self)
            except BaseException as exc:
                self.error = exc
            finally:
                self.has_landed = True
                _in_flight.discard(self)
                self._for_owner.put(None)

    def _waiting_text(self, waited: float, timeout: float) -> str:
        return (
            f"Steps that were sent before are not done after {waited:.0f} s: {self._holders()}. "
            "Until they are, what they change cannot be used. Expected: an answer within "
            f"{timeout:.0f} s. Let the process go on if it was stopped (SIGCONT), or restart the "
            "worker; set KERASPS_WORKER_TIMEOUT to wait longer."
        )


def _start_thread(run: Callable[[], None]) -> None:
    # `Thread.start` waits at a `Condition` until the thread runs. An interrupt there would leave
    # the thread waiting for ever.
    _thread.start_new_thread(run, ())
