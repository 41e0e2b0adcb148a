"""Who may go on, and who waits for slower workers: stale synchronous parallel training.

The idea is from Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013. Pure bookkeeping, without threads.
"""

from __future__ import annotations

from collections.abc import Iterable


class Pace:
    """Says which workers may be given steps, so that none gets too far ahead of the slowest.

    A worker *takes part* from when it has something to do until it is lost, leaves, or has no data.
    Of those that take part, no worker is ever given more steps than the slowest is known to have
    done, and `max_ahead` more. Who begins to take part begins where the slowest is.

    Args:
        max_ahead: how many steps a worker may be ahead of the slowest; None for any number.
    """

    def __init__(self, max_ahead: int | None) -> None:
        self._max_ahead = max_ahead
        # Of those that take part.
        self._done: dict[int, int] = {}
        self._given: dict[int, int] = {}
        self._last_slowest = 0

    @property
    def is_bounded(self) -> bool:
        """Whether any worker ever waits for another."""
        return self._max_ahead is not None

    def begin(self, workers: Iterable[int]) -> None:
        """Have these workers take part, and no others, side by side."""
        self._done = dict.fromkeys(workers, 0)
        self._given = dict(self._done)

    def join(self, worker: int) -> None:
        """Have a worker take part, at the place of the slowest, unless it does."""
        if worker not in self._done:
            self._done[worker] = self._given[worker] = self._slowest

    def leave(self, worker: int) -> None:
        """Let nobody wait for a worker."""
        self._done.pop(worker, None)
        self._given.pop(worker, None)

    def allows(self, worker: int, steps: int) -> bool:
        """Return whether a worker may be given so many steps now."""
        if self._max_ahead is None:
            return True
        given = self._given.get(worker, self._slowest)
        return given + steps <= self._slowest + self._max_ahead

    def give(self, worker: int, steps: int) -> None:
        """Note that a worker was given steps. Call where `allows` does; it takes part then."""
        self.join(worker)
        self._given[worker] += steps

    def take_back(self, worker: int, steps: int) -> None:
        """Note that a worker will not do steps that it was given."""
        if worker in self._given:
            self._given[worker] -= steps

    def finish(self, worker: int, steps: int) -> None:
        """Note that a worker has done steps that it was given."""
        if worker in self._done:
            self._done[worker] += steps

    def has_moved(self) -> bool:
        """Return whether the slowest is elsewhere than when this was called last."""
        before, self._last_slowest = self._last_slowest, self._slowest
        return self.is_bounded and before != self._last_slowest

    @property
    def _slowest(self) -> int:
        return min(self._done.values(), default=0)
