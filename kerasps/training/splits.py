"""Which splits of an input are read, by whom and how far. Pure bookkeeping, without threads."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SplitStatus(enum.Enum):
    """Where one split of the input stands in the current pass."""

    RESERVED = "its own worker is expected to read it"
    TAKEN = "a worker reads it"
    RELEASED = "its reader was lost; any worker may read on"
    READ = "it was read to its end"


@dataclass
class _Split:
    status: SplitStatus = SplitStatus.RESERVED
    # Batches whose results have come back: where the next reader begins.
    confirmed: int = 0
    # Batches that no execution was given yet; None where the length is not known.
    left: int | None = None


class SplitLedger:
    """The splits of one pass over an input, from their first batch to their last.

    Split `i` belongs to worker `i` first. A worker that has read its own takes those of workers
    that were lost, behind the batches whose results came back.

    Args:
        num_splits: one per worker; 0 where batches travel with executions and nobody has a split.
    """

    def __init__(self, num_splits: int) -> None:
        self._splits = [_Split() for _ in range(num_splits)]

    def __len__(self) -> int:
        return len(self._splits)

    def status(self, split: int) -> SplitStatus:
        """Return where a split stands."""
        return self._splits[split].status

    def confirmed(self, split: int) -> int:
        """Return how many batches of a split have been counted."""
        return self._splits[split].confirmed

    def left(self, split: int) -> int | None:
        """Return how many batches of a split no execution was given yet, where that is known."""
        return self._splits[split].left

    @property
    def all_read(self) -> bool:
        """Whether every split was read to its end; False where there are none."""
        return bool(self._splits) and all(s.status is SplitStatus.READ for s in self._splits)

    @property
    def all_given_out(self) -> bool:
        """Whether every split has a known length, and all its batches were given to executions."""
        return bool(self._splits) and all(split.left == 0 for split in self._splits)

    def take(self, worker: int) -> int | None:
        """Give `worker` its own split if it is there to have, else a released one, else None."""
        order = [worker, *(i for i in range(len(self._splits)) if i != worker)]
        for split in order[: len(self._splits)]:
            status = self._splits[split].status
            is_own = split == worker and status is SplitStatus.RESERVED
            if is_own or status is SplitStatus.RELEASED:
                self._splits[split].status = SplitStatus.TAKEN
                return split
        return None

    def open(self, split: int, left: int | None) -> None:
        """Note that a worker has opened a split with `left` unread batches, None where not known.

        A reader that begins anew begins behind `confirmed`: what else was read is read again.
        """
        self._splits[split].left = left

    def give_out(self, split: int, num_batches: int) -> None:
        """Note that an execution was given so many batches of a split."""
        left = self._splits[split].left
        if left is not None:
            self._splits[split].left = left - num_batches

    def confirm(self, split: int, num_batches: int) -> int:
        """Note that so many batches of a split were counted; return the place of the first."""
        first = self._splits[split].confirmed
        self._splits[split].confirmed += num_batches
        return first

    def finish(self, split: int) -> None:
        """Note that a split was read to its end, and that all its results came back."""
        self._splits[split].status = SplitStatus.READ

    def release(self, split: int) -> None:
        """Let any worker read on in a split, unless it was read to its end."""
        if self._splits[split].status is not SplitStatus.READ:
            self._splits[split].status = SplitStatus.RELEASED
            self._splits[split].left = None
