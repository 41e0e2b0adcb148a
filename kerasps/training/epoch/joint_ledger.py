"""Who takes part in synchronous updates, and who may be given steps. Pure bookkeeping.

A worker takes part when it has said so to every ps (`step.Joints`); from then on each update waits
for it, so it must be given steps, or be taken out. Steps are dealt out evenly, for what one worker
is given and the others are not, it does alone in the end.
"""

from __future__ import annotations

from collections.abc import Iterable


class JointLedger:
    """Says which workers are to join and to leave, and which may be given steps.

    Args:
        joins: whether updates are synchronous; else all may be given steps at any time.
        num_backups: how many workers an update does not wait for.
    """

    def __init__(self, *, joins: bool, num_backups: int = 0) -> None:
        self.joins = joins
        self._num_backups = num_backups
        # Whoever is about to begin with the others.
        self._expected: set[int] = set()
        self._joining: set[int] = set()
        # Of those that take part, the steps that each was given.
        self._given: dict[int, int] = {}
        # Of those, who began while others had steps: it is not known which of these wait for it.
        self._late: set[int] = set()
        self._has_changed = False

    def has_changed(self) -> bool:
        """Return whether more may be given steps than when this was called last."""
        before, self._has_changed = self._has_changed, False
        return before

    @property
    def members(self) -> frozenset[int]:
        """The workers that take part."""
        return frozenset(self._given)

    def expect(self, workers: Iterable[int]) -> None:
        """Have nobody be given steps before these have joined, or are out."""
        self._expected.update(workers)

    def should_join(self, worker: int) -> bool:
        """Return whether a worker that can do steps must be told to join first."""
        return self.joins and worker not in self._joining and worker not in self._given

    def begin_to_join(self, worker: int) -> None:
        """Note that a worker was told to join."""
        self._joining.add(worker)

    def join(self, worker: int, *, is_late: bool = False) -> None:
        """Note that a worker takes part: every update waits for it.

        Args:
            worker: the worker.
            is_late: whether others have steps to do, which may wait for it.
        """
        if is_late:
            self._late.add(worker)
        self._joining.discard(worker)
        self._expected.discard(worker)
        self._given[worker] = min(self._given.values(), default=0)
        self._has_changed = True

    def leave(self, worker: int) -> None:
        """Note that a worker takes no part, and is not about to."""
        self._joining.discard(worker)
        self._expected.discard(worker)
        self._late.discard(worker)
        self._given.pop(worker, None)
        self._has_changed = self.joins

    def takes_part(self, worker: int) -> bool:
        """Return whether updates wait for a worker."""
        return worker in self._given

    def is_even(self, readers: Iterable[int]) -> bool:
        """Return whether nobody who takes part waits for one of `readers`, who have data."""
        most = max(self._given.values(), default=0)
        return not self._late and all(self._given.get(reader, most) == most for reader in readers)

    def may_be_given(self, worker: int, others: Iterable[int], *, is_idle: bool) -> bool:
        """Return whether a worker may be given steps.

        Args:
            worker: the worker.
            others: the workers that have data.
            is_idle: whether it has nothing to do, so that all others wait for it.
        """
        if not self.joins:
            return True
        if worker not in self._given or self._expected:
            return False
        if is_idle or self._num_backups:
            return True
        rivals = [self._given[other] for other in others if other in self._given]
        return self._given[worker] <= min(rivals, default=self._given[worker])

    def give(self, worker: int, steps: int) -> None:
        """Note that a worker was given steps."""
        if worker in self._given:
            self._given[worker] += steps
