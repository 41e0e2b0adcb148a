"""Which splits of an input are read, by whom and how far. Pure bookkeeping, without threads."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kerasps.training.epoch_events import Execution


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
    is_endless: bool = False
    # Executions whose steps are partly applied, to be done again on the batches behind `confirmed`.
    unfinished: deque[Execution] = field(default_factory=deque)


class SplitLedger:
    """The splits of one pass over an input, from their first batch to their last.

    Split `i` belongs to worker `i` first. A worker that has read its own takes those of workers
    that were lost, behind the batches whose results came back.

    Args:
        num_splits: one per worker; 0 where batches travel with executions and nobody has a split.
        confirmed: of each split, the batches that were counted before. Default: none.
    """

    def __init__(self, num_splits: int, confirmed: Sequence[int] = ()) -> None:
        counts = confirmed or [0] * num_splits
        self._splits = [_Split(confirmed=count) for count in counts]

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

    @property
    def num_unfinished(self) -> int:
        """How many executions are to be done again on the batches that they were done on."""
        return sum(len(split.unfinished) for split in self._splits)

    @property
    def has_abandoned(self) -> bool:
        """Whether nobody reads a split that has unfinished executions."""
        return any(s.unfinished and s.status is SplitStatus.RELEASED for s in self._splits)

    def take(self, worker: int) -> int | None:
        """Give `worker` a split, if there is one to have.

        First one with unfinished executions, then its own, then one that was released.
        """
        for split in sorted(
            range(len(self._splits)),
            key=lambda i: (not self._splits[i].unfinished, i != worker),
        ):
            status = self._splits[split].status
            is_own = split == worker and status is SplitStatus.RESERVED
            if is_own or status is SplitStatus.RELEASED:
                self._splits[split].status = SplitStatus.TAKEN
                return split
        return None

    def share(self, worker: int) -> int | None:
        """Return a split for `worker` to read beside the one that reads it; None where none is.

        Of data that never end, all batches are as good as any others.
        """
        endless = [i for i, split in enumerate(self._splits) if split.is_endless]
        return endless[worker % len(endless)] if endless else None

    def open(self, split: int, left: int | None, *, is_endless: bool) -> None:
        """Note that a worker has opened a split with `left` unread batches, None where not known.

        A reader that begins anew begins behind `confirmed`: what else was read is read again.
        """
        self._splits[split].left = left
        self._splits[split].is_endless = is_endless

    def is_endless(self, split: int) -> bool:
        """Return whether a split is known never to end; its batches are as good as any other."""
        return self._splits[split].is_endless

    def put_back(self, split: int, executions: Iterable[Execution]) -> None:
        """Have executions done again, before others, on the next batches of a split."""
        self._splits[split].unfinished.extendleft(reversed([*executions]))

    def next_unfinished(self, split: int) -> Execution | None:
        """Return the execution to do next on a split, which is none any more; None: any will do."""
        unfinished = self._splits[split].unfinished
        return unfinished.popleft() if unfinished else None

    def forget_unfinished(self) -> None:
        """Forget the executions of an epoch that has ended."""
        for split in self._splits:
            split.unfinished.clear()

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
