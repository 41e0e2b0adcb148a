"""The events and the commands of `EpochState`, and executions."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, eq=False)
class Execution:
    """The order to do some steps in one go. A step is counted for each batch.

    Args:
        num_steps: how many.
        header: what the step graph is given beside the data (see `step.Header`).
        batches: those to do the steps on, where the coordinator reads the data; else None.
        first_batch: the place in the input of the first of `batches`; 0 without them.
        applied: for each ps that steps push to, how many of the first pushes were applied there
            before, by a worker that was lost: these are done again for what they return alone.
            Empty for none.
        replicas: how many batches the worker takes at a time, for one push. What is left over it
            takes one by one.
        sizes: how many steps may be done at a time, the largest first, where there are fewer left:
            there are graphs for so many. Default: whatever is left is done in one go.
    """

    num_steps: int
    header: Any
    batches: list[Any] | None = None
    first_batch: int = 0
    applied: tuple[int, ...] = ()
    replicas: int = 1
    sizes: Sequence[int] = ()

    def pushes_of(self, num_steps: int) -> int:
        """Return how many pushes the first `num_steps` steps make."""
        return num_steps // self.replicas + num_steps % self.replicas

    def cut(self, num_steps: int) -> list[Execution]:
        """Return executions that do its first `num_steps` steps, one after the other."""
        # What was applied before counts from the first step of one.
        sizes = () if any(self.applied) else self.sizes
        parts, begin = [], 0
        while begin < num_steps:
            left = num_steps - begin
            size = next((size for size in sizes if size <= left), left)
            parts.append(self._part(begin, size))
            begin += size
        return parts

    def _part(self, begin: int, size: int) -> Execution:
        if size == self.num_steps:
            return self
        part = replace(
            self, num_steps=size, header=self.header.after(begin) if begin else self.header
        )
        if self.batches is None:
            return part  # whoever reads the batches knows their places
        batches = self.batches[begin : begin + size]
        return replace(part, batches=batches, first_batch=self.first_batch + begin)

    @property
    def num_pushes(self) -> int:
        """The number of pushes that all of its steps make."""
        return self.pushes_of(self.num_steps)


class SplitPosition(NamedTuple):
    """The position of the reading of a split of the input, or of a part of one.

    Attributes:
        source: the split of the input.
        confirmed: the place behind the batches that are counted.
        end: the place where it ends; None where that is not known.
    """

    source: int
    confirmed: int = 0
    end: int | None = None


# Events. Each says what has happened, and where.


@dataclass(frozen=True)
class PassBegan:
    """A pass over the data begins; there are `num_splits` splits (0: batches travel).

    `positions`: where each stood before this process was there, and parts of splits behind them.
    """

    num_splits: int
    positions: tuple[SplitPosition, ...] = ()


@dataclass(frozen=True)
class EpochBegan:
    """An epoch begins, in the pass that there is. Executions of the one before are forgotten."""


@dataclass(frozen=True)
class StepsAsked:
    """The caller asks for steps, by any worker."""

    execution: Execution


@dataclass(frozen=True)
class AllAsked:
    """No more steps will be asked for, unless some are reported missing."""


@dataclass(frozen=True)
class ResultsWanted:
    """The caller asks for nothing more now: the workers' results are fetched at once."""


class WorkerEnd(enum.Enum):
    """The reason why a worker does no more of its executions."""

    FAILED = "its session ended in an error"
    HANGS = "a call to it does not return"
    DIED = "it died while it had no session"
    RESTARTED = "its session begins without the dataset that it had"
    LEFT = "it was leaving, and holds nothing any more"


@dataclass(frozen=True)
class WorkerEnded:
    """A worker does no more of its executions: those that it had not reported are retried.

    `applied` counts, for each ps, the pushes that the worker had applied there since it was made
    ready. No other will be: its lane was closed before. After `RESTARTED` its session goes on at
    once; after `LEFT` there is nothing to do again.
    """

    worker: int
    why: WorkerEnd
    applied: tuple[int, ...] = ()


@dataclass(frozen=True)
class SessionBegan:
    """The session of a worker takes commands.

    `is_open`: its dataset, from before, is alive. If it is not, then `ended` says what became of
    the worker that had it; None where that one held no results. `replicas`: how many batches the
    worker takes at a time.
    """

    worker: int
    is_open: bool
    ended: WorkerEnded | None = None
    replicas: int = 1


@dataclass(frozen=True)
class SplitOpened:
    """A worker has opened what it was told to; `left` batches follow, None where not known.

    `is_endless`: it is known that they never end. `has_order`: another worker finds the same ones.
    """

    worker: int
    left: int | None
    is_endless: bool = False
    has_order: bool = True


@dataclass(frozen=True)
class WorkerJoined:
    """A worker takes part in synchronous updates: each waits for it."""

    worker: int


@dataclass(frozen=True)
class ExecutionsDone:
    """The oldest `count` executions of a worker are done, at time `at`; it holds their results."""

    worker: int
    count: int
    at: float


@dataclass(frozen=True)
class ResultReturned:
    """The oldest execution of a worker is done and has returned its result."""

    worker: int
    steps: int
    result: Any


@dataclass(frozen=True)
class ResultCollected:
    """The sum of all done executions of a worker was fetched, at time `at`."""

    worker: int
    steps: int
    result: Any
    at: float


@dataclass(frozen=True)
class WorkersJoined:
    """There are `num_workers` workers now, more than before. The new ones have no session yet."""

    num_workers: int


@dataclass(frozen=True)
class WorkerLeaves:
    """A worker is about to leave: it is given nothing new, and what it holds is fetched."""

    worker: int


@dataclass(frozen=True)
class SessionEnded:
    """The session of a worker takes no more commands; the worker and its dataset are alive."""

    worker: int


Event = (
    PassBegan
    | EpochBegan
    | StepsAsked
    | AllAsked
    | ResultsWanted
    | SessionBegan
    | SplitOpened
    | WorkerJoined
    | ExecutionsDone
    | ResultReturned
    | ResultCollected
    | WorkerEnded
    | WorkersJoined
    | WorkerLeaves
    | SessionEnded
)


# Commands. All but `Report` are for the session of one worker, which does them in their order.


@dataclass(frozen=True)
class Open:
    """Make the worker ready and open `split` behind its first `skip` batches; None: no dataset."""

    worker: int
    split: int | None
    skip: int


@dataclass(frozen=True)
class Join:
    """Add the worker to synchronous updates."""

    worker: int


@dataclass(frozen=True)
class Leave:
    """Remove the worker, on which nothing runs, from synchronous updates."""

    worker: int


@dataclass(frozen=True)
class Send:
    """Run an execution on the worker."""

    worker: int
    execution: Execution


@dataclass(frozen=True)
class Collect:
    """Wait for what runs on the worker, then fetch what its executions add up to."""

    worker: int


@dataclass(frozen=True)
class Report:
    """Tell `fit`'s thread what is new: a `result`, steps that are missing, or just that it is.

    `missing_steps` must be asked for again: a worker's data ended before. Of a result, `split` and
    `first_batch` say which batches it is of, where each execution returns its own, and `pushes` how
    many each ps was sent for it. `worker` has done them.
    """

    missing_steps: int = 0
    result: Any = None
    split: int | None = None
    first_batch: int = 0
    pushes: int = 0
    worker: int = 0


Command = Open | Join | Leave | Send | Collect | Report
