"""A queue whose `get` ends in time, whatever signals come meanwhile."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue that one thread reads at a time.

    `queue.SimpleQueue.get(timeout)` waits for ever if a signal interrupts it and the handler, or
    the wait for Python's lock, lasts until the timeout is over: the rest is then negative, which C
    takes for no limit (CPython 3.11, `Modules/_queuemodule.c`). `queue.Queue` waits on a
    `Condition`, which an exception of a signal handler can leave locked. This class waits on a
    plain lock, which does neither.

    Thread: any for `put`.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        # Locked while the reader has seen all that was put.
        self._is_read = threading.Lock()

    def put(self, item: T) -> None:
        """Add an item, and wake the reader."""
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # the reader is woken, and has not looked yet
            self._is_read.release()

    def get(self, timeout: float = 0.0) -> T:
        """Remove and return the oldest item.

        Raises:
            queue.Empty: there is none after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._items:
            rest = deadline - time.monotonic()
            if rest <= 0 or not self._is_read.acquire(timeout=rest):
                break
        try:
            return self._items.popleft()
        except IndexError:
            raise queue.Empty from None

    def empty(self) -> bool:
        """Return True if there is no item."""
        return not self._items
