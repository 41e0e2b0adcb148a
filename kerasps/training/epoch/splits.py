"""The splits of an input: their readers and positions. Bookkeeping without threads.

A split can be divided: another worker then reads the second half of the remaining batches. The
ledger numbers this half behind the splits of the input.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kerasps.training.epoch.epoch_events import Execution, SplitPosition

# A worker that takes over half of a split must first read and drop the batches before it: at most
# this many times as many as it then uses.
_MAX_SKIPPED = 3


class SplitStatus(enum.Enum):
    """The status of one split of the input in the current pass."""

    RESERVED = "its own worker is expected to read it"
    TAKEN = "a worker reads it"
    RELEASED = "its reader was lost; any worker may read on"
    READ = "it was read to its end"


@dataclass
class Split:
    """One split of an input, or a part of one, and its position in the current pass.

    `EpochWorkers` knows which worker reads it. Places and lengths are counted in batches; the place
    of the first batch of the input's split is 0.
    """

    # The split of the input that it is, or that it is a part of. The parts of one are disjoint.
    source: int
    status: SplitStatus = SplitStatus.RESERVED
    # The place behind the batches whose results are counted. The next reader begins there.
    confirmed: int = 0
    # The place where it ends, at least `confirmed`; None if that is not known.
    end: int | None = None
    # The number of batches that no execution was given yet; None if its length is not known, or
    # nobody reads it.
    left: int | None = None
    # Whether it is known never to end. A retried step may then use other batches.
    is_endless: bool = False
    # Whether another worker reads the same batches at the same places.
    has_order: bool = True
    # Executions whose steps are partly applied, to be retried on the batches behind
    # `confirmed`, in this order; none if it is endless. Only the ledger adds and removes some,
    # since it counts them.
    unfinished: deque[Execution] = field(default_factory=deque)

    def open(self, left: int | None, *, is_endless: bool, has_order: bool = True) -> None:
        """Note that a worker has opened the split of the input.

        The worker begins at `confirmed`, and reads unconfirmed batches again.

        Args:
            left: how many batches the input's split has from there on; None if not known.
            is_endless: whether the data are known never to end.
            has_order: whether another worker reads the same batches at the same places.
        """
        self.is_endless, self.has_order = is_endless, has_order
        if left is not None:
            end = self.confirmed + left
            self.end = end if self.end is None else min(self.end, end)
            left = self.end - self.confirmed
        self.left = left

    def give_out(self, num_batches: int) -> None:
        """Note that an execution was given `num_batches` batches."""
        if self.left is not None:
            self.left -= num_batches

    def confirm(self, num_batches: int) -> int:
        """Note that `num_batches` batches were counted; return the place of the first."""
        first = self.confirmed
        self.confirmed += num_batches
        return first

    def finish(self) -> None:
        """Note that it was read to its end, and that all its results were counted."""
        self.status = SplitStatus.READ

    def release(self) -> None:
        """Release the split to any worker, unless it was read to its end."""
        if self.status is not SplitStatus.READ:
            self.status = SplitStatus.RELEASED
            self.left = None

    def validate(self, num_readers: int) -> None:
        """Raise AssertionError if it has a wrong reader, or contradicts itself."""
        is_taken = self.status is SplitStatus.TAKEN
        assert num_readers == is_taken, f"{num_readers} workers read a split that is {self.status}"
        assert self.left is None or self.left >= 0, "more is given out than there is"
        if self.status in (SplitStatus.RESERVED, SplitStatus.RELEASED):
            assert self.left is None, "batches of a split without a reader are given out"
        for execution in self.unfinished:
            assert any(execution.applied), "an execution is bound to batches for nothing"
            assert not self.is_endless, "an execution is bound to batches of endless data"

    def validate_held(self, num_batches: int) -> None:
        """Raise AssertionError if a batch is lost, or counted twice."""
        if self.left is not None and self.end is not None:
            held = self.confirmed + num_batches + self.left
            assert held == self.end, "a batch is lost or double"


class SplitLedger:
    """The splits of one pass over an input, from their first batch to their last.

    Split `i` is reserved for worker `i`. A worker that has read it takes over the splits of lost
    workers, behind the counted batches. A worker without a reserved split takes over half of
    another worker's remaining batches.

    Args:
        num_splits: one per worker; 0 if executions carry their batches, so that there are no
            splits.
        positions: where each split stood before, followed by the parts of divided splits. Default:
            nothing was counted.
    """

    def __init__(self, num_splits: int, positions: Sequence[SplitPosition] = ()) -> None:
        self._num_input_splits = num_splits
        self._splits = [
            Split(p.source, confirmed=p.confirmed, end=p.end)
            for p in positions or [SplitPosition(i) for i in range(num_splits)]
        ]
        for split in self._splits[num_splits:]:
            split.status = SplitStatus.RELEASED
        # The number of pending executions that must be retried on the same batches.
        self.num_unfinished = 0

    def __len__(self) -> int:
        return len(self._splits)

    def __getitem__(self, split: int) -> Split:
        return self._splits[split]

    @property
    def positions(self) -> list[SplitPosition]:
        """The position of each split, from which another ledger can go on."""
        return [SplitPosition(s.source, s.confirmed, s.end) for s in self._splits]

    @property
    def all_read(self) -> bool:
        """True once every split was read to its end; False if there are none."""
        return bool(self._splits) and all(s.status is SplitStatus.READ for s in self._splits)

    @property
    def all_given_out(self) -> bool:
        """True if every split has a known length and all its batches were given to executions."""
        return bool(self._splits) and all(split.left == 0 for split in self._splits)

    # Assignment

    def has_untaken_split(self, worker: int) -> bool:
        """Return whether split `worker` of the input exists, and no other worker reads it.

        Call for a worker that reads nothing.
        """
        return (
            worker < self._num_input_splits and self._splits[worker].status is not SplitStatus.TAKEN
        )

    def assign_to(self, worker: int) -> int | None:
        """Give `worker` a split and return it; None if none is available.

        A split with unfinished executions comes first, then the worker's reserved one, then a
        released one.
        """
        for split in sorted(
            range(len(self._splits)),
            key=lambda i: (not self._splits[i].unfinished, i != worker),
        ):
            status = self._splits[split].status
            is_reserved = split == worker and status is SplitStatus.RESERVED
            if is_reserved or status is SplitStatus.RELEASED:
                self._splits[split].status = SplitStatus.TAKEN
                return split
        return None

    def divide(self, min_batches: int) -> int | None:
        """Divide the split with the most remaining batches; return the new one, None if none is.

        The reader of the divided split is not told: it is just given no executions behind its new
        end. The caller assigns a worker to the new split, which counts as taken.
        """
        readers = [
            split
            for split in self._splits
            if split.status is SplitStatus.TAKEN
            and split.left
            and split.has_order
            and not split.unfinished
        ]
        if not readers:
            return None
        most = max(readers, key=lambda split: split.left or 0)
        assert most.left is not None  # all `readers` have a number of batches left
        assert most.end is not None  # all splits of known length have an end
        taken = most.left // 2
        begin = most.end - taken
        if taken < max(min_batches, 1) or begin > _MAX_SKIPPED * taken:
            return None
        part = Split(most.source, SplitStatus.TAKEN, confirmed=begin, end=most.end, left=taken)
        most.end, most.left = begin, most.left - taken
        self._splits.append(part)
        return len(self._splits) - 1

    def share(self, worker: int) -> int | None:
        """Return an endless split for `worker` to read beside its reader; None if there is none.

        Workers may share data that never end, since no batch has to be read exactly once.
        """
        endless = [i for i, split in enumerate(self._splits) if split.is_endless]
        return endless[worker % len(endless)] if endless else None

    # Unfinished executions

    @property
    def has_abandoned(self) -> bool:
        """True if a split has unfinished executions and no worker reads it."""
        if not self.num_unfinished:
            return False
        return any(s.unfinished and s.status is SplitStatus.RELEASED for s in self._splits)

    def put_back(self, split: int, executions: Sequence[Execution]) -> None:
        """Queue executions for a retry, before others, on the next batches of a split."""
        self._splits[split].unfinished.extendleft(reversed(executions))
        self.num_unfinished += len(executions)

    def take_unfinished(self, split: int) -> Execution:
        """Remove and return the execution that the reader of a split does next."""
        self.num_unfinished -= 1
        return self._splits[split].unfinished.popleft()

    def all_unfinished(self) -> list[Execution]:
        """Return the executions that must be retried on the next batches of a split."""
        return [execution for split in self._splits for execution in split.unfinished]

    def forget_unfinished(self) -> None:
        """Drop the unfinished executions of an epoch that has ended."""
        for split in self._splits:
            split.unfinished.clear()
        self.num_unfinished = 0

    # Checks

    def validate(self, num_readers: Sequence[int]) -> None:
        """Raise AssertionError if a split has a wrong reader, or a batch may be counted twice."""
        assert self.num_unfinished == len(self.all_unfinished()), "executions are miscounted"
        ends: dict[int, int] = {}
        # A part that is read to its end comes before the next, which begins there.
        in_order = sorted(
            self._splits,
            key=lambda s: (s.source, s.confirmed, math.inf if s.end is None else s.end),
        )
        for split in in_order:
            begin = ends.get(split.source, 0)
            assert begin <= split.confirmed, "two parts of a split have the same batches"
            ends[split.source] = split.confirmed
            if split.end is not None:
                assert split.confirmed <= split.end, "more is counted than there is"
                ends[split.source] = split.end
        for split, readers in zip(self._splits, num_readers, strict=True):
            split.validate(readers)
