"""Names of resources on tasks. A name is reused after its resource is destroyed."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import uuid
from collections.abc import Hashable


class Names:
    """Gives names to resources, and reuses names whose resources were destroyed.

    A program that claims names for the same kinds in the same order gets the same names again.
    """

    def __init__(self) -> None:
        # Reentrant: Python may collect a variable, and give back its name, at any instant, also
        # while this thread holds the lock.
        self._lock = threading.RLock()
        self._prefix = self._new_prefix()
        # The number of times that names were retired.
        self.generation = 0
        self._numbers = itertools.count()
        self._free: dict[Hashable, list[tuple[int, str]]] = {}

    @staticmethod
    def _new_prefix() -> str:
        return f"kerasps/{uuid.uuid4().hex}/"

    def claim(self, kind: Hashable) -> str:
        """Return a name that no resource has, in this process or another.

        Args:
            kind: the kind of the resource, such as its dtype and shape. A name goes to one kind.
        """
        with self._lock:
            free = self._free.get(kind)
            if free:
                # The lowest, so that a model like the last one gets the same names in the same
                # order, in whatever order Python collected them. So cached graphs with these names
                # are reused.
                return heapq.heappop(free)[1]
            return f"{self._prefix}{next(self._numbers)}"

    def give_back(self, kind: Hashable, name: str) -> None:
        """Give a name back. Call when its resource is destroyed and no step in flight uses it."""
        with self._lock:
            if name.startswith(self._prefix):
                heapq.heappush(
                    self._free.setdefault(kind, []), (int(name.removeprefix(self._prefix)), name)
                )

    def retire(self) -> None:
        """Reuse none of the names that were given until now.

        Call when a worker was lost, or steps in flight were given up: a step that uses the names
        may still be in flight.
        """
        with self._lock:
            self._prefix = self._new_prefix()
            self.generation += 1
            self._free.clear()

    def begin_in_fork(self) -> None:
        """Give other names than the process that this one was forked from.

        Both may connect to the same tasks.
        """
        self._lock = threading.RLock()  # a thread that the fork lacks may have held the other one
        self.retire()


NAMES = Names()
os.register_at_fork(after_in_child=NAMES.begin_in_fork)


class _Calls(threading.local):
    """State of the current thread: True if a call to a task is complete when it returns."""

    are_waited_for = True


CALLS = _Calls()
