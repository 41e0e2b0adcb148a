"""Admission of workers to more steps: free, bounded by the slowest, or synchronous.

Pure bookkeeping, without threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from kerasps.strategy_arguments import AdmissionTerms
from kerasps.training.epoch.epoch_events import Command, Join, Leave

Readers = Callable[[], Sequence[int]]


class Admission:
    """Decides which workers may be given steps.

    The epoch's state reports the events of workers, and asks `allows` before it sends steps. A
    subclass overrides the methods that its mode needs; the others do nothing.
    """

    @property
    def progress(self) -> int:
        """A number that changes when workers may be given steps that were refused before."""
        return 0

    @property
    def members(self) -> Collection[int]:
        """The workers that each synchronous update waits for, in order."""
        return ()

    def begin(self, workers: Iterable[int]) -> None:
        """Note that a pass begins, with these workers."""

    def set_ready(self, worker: int) -> None:
        """Note that a worker has opened its data."""

    def set_idle(self, worker: int) -> None:
        """Note that a worker has no steps to do for now, so that no other worker waits for it."""

    def take_in(self, workers: Iterable[int]) -> list[Command]:
        """Return the commands for workers that must act before they are given steps."""
        del workers
        return []

    def join(self, worker: int, *, is_late: bool = False) -> None:
        """Note that a worker takes part in synchronous updates: each of them waits for it.

        Args:
            is_late: whether other workers already have steps, which may wait for it.
        """

    def stop_waiting_for(self, worker: int) -> list[Command]:
        """Note that no other worker waits for this one; return the commands that tell the ps.

        Drop these commands if the worker is lost: nobody can carry them out, and none is needed.
        """
        del worker
        return []

    def end_session(self, worker: int, *, returns: bool) -> None:
        """Note that the session of a worker has ended.

        Args:
            returns: whether another session of the worker begins soon.
        """

    def allows(self, worker: int, steps: int, *, is_idle: bool, readers: Readers) -> bool:
        """Return whether a worker may be given `steps` steps now."""
        raise NotImplementedError

    def give(self, worker: int, steps: int) -> None:
        """Note that a worker was given steps. Call only if `allows` returns True."""

    def take_back(self, worker: int, steps: int) -> None:
        """Note that a worker will not do steps that it was given."""

    def finish(self, worker: int, steps: int) -> None:
        """Note that a worker has done steps that it was given."""

    def is_even(self, readers: Iterable[int]) -> bool:
        """Return whether synchronous updates wait for none of `readers`, which have data."""
        del readers
        return False

    def validate(self, running: Sequence[int]) -> None:
        """Raise AssertionError if the admission contradicts itself.

        Args:
            running: the steps that each worker was given and is not known to have done.
        """


class Free(Admission):
    """Any worker may be given steps at any time."""

    def allows(self, worker: int, steps: int, *, is_idle: bool, readers: Readers) -> bool:
        """Return True."""
        del worker, steps, is_idle, readers
        return True


class Bounded(Admission):
    """Keeps each worker within a bound ahead of the slowest: stale synchronous parallel training.

    A worker *takes part* from when it has something to do until it is lost, leaves, or has no data.
    Each worker that takes part is given at most `max_ahead` steps more than the slowest is known to
    have done. A worker that begins to take part begins where the slowest is.

    The idea is from Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server", NIPS 2013.

    Args:
        max_ahead: how many steps a worker may be ahead of the slowest. No execution may have more.
    """

    def __init__(self, max_ahead: int) -> None:
        self._max_ahead = max_ahead
        # For each worker that takes part: the steps that it has done, and was given.
        self._done: dict[int, int] = {}
        self._given: dict[int, int] = {}

    @property
    def progress(self) -> int:
        """The number of steps that the slowest worker is known to have done."""
        return min(self._done.values(), default=0)

    def begin(self, workers: Iterable[int]) -> None:
        """Begin with only these workers, all at the same place."""
        self._done = dict.fromkeys(workers, 0)
        self._given = dict(self._done)

    def set_ready(self, worker: int) -> None:
        """Add a worker, at the place of the slowest, unless it takes part already."""
        if worker not in self._done:
            self._done[worker] = self._given[worker] = self.progress

    def set_idle(self, worker: int) -> None:
        """Mark a worker as idle, so that no other waits for it."""
        self._done.pop(worker, None)
        self._given.pop(worker, None)

    def stop_waiting_for(self, worker: int) -> list[Command]:
        """Remove a worker, so that no other waits for it. The ps need not be told."""
        self.set_idle(worker)
        return []

    def allows(self, worker: int, steps: int, *, is_idle: bool, readers: Readers) -> bool:
        """Return whether a worker stays within the bound with `steps` more steps."""
        del is_idle, readers
        slowest = self.progress
        return self._given.get(worker, slowest) + steps <= slowest + self._max_ahead

    def give(self, worker: int, steps: int) -> None:
        """Note that a worker was given steps; it takes part from here on."""
        self.set_ready(worker)
        self._given[worker] += steps

    def take_back(self, worker: int, steps: int) -> None:
        """Note that a worker will not do steps that it was given."""
        if worker in self._given:
            self._given[worker] -= steps

    def finish(self, worker: int, steps: int) -> None:
        """Note that a worker has done steps that it was given."""
        if worker in self._done:
            self._done[worker] += steps

    def validate(self, running: Sequence[int]) -> None:
        """Raise AssertionError if a worker is too far ahead, or its steps are miscounted."""
        assert self._done.keys() == self._given.keys()
        for worker, given in self._given.items():
            assert given - self._done[worker] == running[worker], f"worker {worker} is miscounted"
            assert given <= self.progress + self._max_ahead, f"worker {worker} is too far ahead"


class Synchronous(Admission):
    """Deals steps out evenly, since each worker that takes part makes one push to each update.

    A worker takes part once it has told every ps (`step.Joints`). From then on each update waits
    for it, so it must be given steps, or be removed. If one worker is given more steps than the
    others, it does the surplus alone in the end.
    """

    def __init__(self, *, num_backups: int = 0) -> None:
        self._num_backups = num_backups
        # The workers that are about to begin with the others.
        self._expected: set[int] = set()
        self._joining: set[int] = set()
        # The steps that each worker that takes part was given.
        self._given: dict[int, int] = {}
        # Those that began while others had steps: it is not known which of these steps wait.
        self._late: set[int] = set()
        self._num_changes = 0

    @property
    def progress(self) -> int:
        """The number of times that a worker has joined or left."""
        return self._num_changes

    @property
    def members(self) -> Collection[int]:
        """The workers that take part, in order."""
        return sorted(self._given)

    def begin(self, workers: Iterable[int]) -> None:
        """Give no worker steps before these workers have joined or left."""
        self._expected.update(workers)

    def take_in(self, workers: Iterable[int]) -> list[Command]:
        """Tell workers to join, except those that take part or were told before."""
        outside = [w for w in workers if w not in self._joining and w not in self._given]
        self._joining.update(outside)
        return [Join(worker) for worker in outside]

    def join(self, worker: int, *, is_late: bool = False) -> None:
        """Note that a worker takes part: every update waits for it."""
        if is_late:
            self._late.add(worker)
        self._joining.discard(worker)
        self._expected.discard(worker)
        self._given[worker] = min(self._given.values(), default=0)
        self._num_changes += 1

    def stop_waiting_for(self, worker: int) -> list[Command]:
        """Note that a worker takes no part, and is not about to join."""
        takes_part = worker in self._given
        self._joining.discard(worker)
        self._expected.discard(worker)
        self._late.discard(worker)
        self._given.pop(worker, None)
        self._num_changes += 1
        return [Leave(worker)] if takes_part else []

    def end_session(self, worker: int, *, returns: bool) -> None:
        """Note that a worker takes no part; the others wait for it to join again if it returns."""
        self.stop_waiting_for(worker)
        if returns:
            self._expected.add(worker)

    def allows(self, worker: int, steps: int, *, is_idle: bool, readers: Readers) -> bool:
        """Return whether a worker may be given steps, whatever their number.

        An idle worker may, since all others wait for it. Else the worker with the fewest steps may.
        """
        del steps
        if worker not in self._given or self._expected:
            return False
        if is_idle or self._num_backups:
            return True
        rivals = [self._given[reader] for reader in readers() if reader in self._given]
        return self._given[worker] <= min(rivals, default=self._given[worker])

    def give(self, worker: int, steps: int) -> None:
        """Note that a worker was given steps."""
        if worker in self._given:
            self._given[worker] += steps

    def is_even(self, readers: Iterable[int]) -> bool:
        """Return whether no worker that takes part waits for one of `readers`, which have data."""
        most = max(self._given.values(), default=0)
        return not self._late and all(self._given.get(reader, most) == most for reader in readers)

    def validate(self, running: Sequence[int]) -> None:
        """Raise AssertionError if a worker has steps for updates that do not wait for it."""
        assert not self._joining & self._given.keys(), "a worker joins twice"
        assert not self._expected & self._given.keys(), "a worker that is there is expected"
        assert self._late <= self._given.keys(), "a worker is late that takes no part"
        for worker, steps in enumerate(running):
            assert not steps or worker in self._given, f"no update waits for worker {worker}"


def choose_admission(terms: AdmissionTerms) -> Admission:
    """Return the admission of a training, on the terms of its update rule."""
    if terms.joins:
        return Synchronous(num_backups=terms.num_backups)
    return Free() if terms.max_ahead is None else Bounded(terms.max_ahead)
