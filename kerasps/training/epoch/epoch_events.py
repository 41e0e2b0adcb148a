"""The events and commands of `EpochState`, and executions."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, eq=False)
class Execution:
    """The order to do some steps in one call. Each batch counts as a step."""

    num_steps: int  # the number of steps
    header: Any  # the argument of the step graph beside the data (see `step.Header`)
    # The batches of the steps, if the coordinator reads the data; else None.
    batches: list[Any] | None = None
    first_batch: int = 0  # the place in the input of the first of `batches`; 0 without them
    # For each ps that steps push to, how many of the first pushes a lost worker had applied there
    # before. These steps run again for their results only. Empty for none.
    applied: tuple[int, ...] = ()
    # How many batches the worker takes at a time, for one push. It takes the remainder one by one.
    replicas: int = 1
    # The numbers of steps for which there are graphs, the largest first. `cut` makes parts of these
    # sizes. Default: one part.
    sizes: Sequence[int] = ()

    def pushes_of(self, num_steps: int) -> int:
        """Return the number of pushes that the first `num_steps` steps make."""
        return num_steps // self.replicas + num_steps % self.replicas

    def cut(self, num_steps: int) -> list[Execution]:
        """Return executions that do its first `num_steps` steps, one after the other."""
        # `applied` counts from the first step of an execution, so such a one is not cut.
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
            return part  # the reader of the batches knows their places
        batches = self.batches[begin : begin + size]
        return replace(part, batches=batches, first_batch=self.first_batch + begin)

    @property
    def num_pushes(self) -> int:
        """The number of pushes that all of its steps make."""
        return self.pushes_of(self.num_steps)


class SplitPosition(NamedTuple):
    """The place up to which a split of the input, or a part of one, is counted."""

    source: int  # the split of the input
    confirmed: int = 0  # the place behind the batches that are counted
    end: int | None = None  # the place where it ends; None if that is not known


# Events


@dataclass(frozen=True)
class PassBegan:
    """A pass over the data begins, with `num_splits` splits (0: executions carry their batches).

    `positions`: where each split stood in a backup, followed by the parts of divided splits.
    """

    num_splits: int
    positions: tuple[SplitPosition, ...] = ()


@dataclass(frozen=True)
class EpochBegan:
    """An epoch begins in the current pass. Executions of the previous one are dropped."""


@dataclass(frozen=True)
class StepsAsked:
    """The caller asks for steps, by any worker."""

    execution: Execution


@dataclass(frozen=True)
class AllAsked:
    """No more steps will be asked for, unless some are reported missing."""


@dataclass(frozen=True)
class ResultsWanted:
    """The caller asks for no steps for now: the workers' results are fetched at once."""


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

    `applied` counts, for each ps, the pushes of the worker that were applied there since it was
    made ready. No more will be, since its lane is closed. After `RESTARTED` its session goes on at
    once; after `LEFT` there is nothing to retry.
    """

    worker: int
    why: WorkerEnd
    applied: tuple[int, ...] = ()


@dataclass(frozen=True)
class SessionBegan:
    """The session of a worker takes commands.

    `is_open`: its earlier dataset still exists. If it does not, `ended` is the event of the worker
    that had it, or None if that worker held no results. `replicas`: how many batches the worker
    takes at a time.
    """

    worker: int
    is_open: bool
    ended: WorkerEnded | None = None
    replicas: int = 1


@dataclass(frozen=True)
class SplitOpened:
    """A worker has opened its split; `left` batches follow, None if not known.

    `is_endless`: the data are known never to end. `has_order`: another worker reads the same
    batches at the same places.
    """

    worker: int
    left: int | None
    is_endless: bool = False
    has_order: bool = True


@dataclass(frozen=True)
class JoinedUpdates:
    """A worker takes part in synchronous updates: each update waits for it."""

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
class ClusterGrew:
    """The cluster has grown to `num_workers` workers. The new ones have no session yet."""

    num_workers: int


@dataclass(frozen=True)
class WorkerLeaves:
    """A worker is about to leave: it gets no more executions, and its results are fetched."""

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
    | JoinedUpdates
    | ExecutionsDone
    | ResultReturned
    | ResultCollected
    | WorkerEnded
    | ClusterGrew
    | WorkerLeaves
    | SessionEnded
)


# Commands. All but `Report` are for the session of one worker, which carries them out in order.


@dataclass(frozen=True)
class Open:
    """Make the worker ready, and open `split` behind its first `skip` batches, unless None."""

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
    """Wait for the worker's executions, then fetch the sum of their results."""

    worker: int


@dataclass(frozen=True)
class Report:
    """Tell `fit`'s thread of a `result`, of missing steps, or just that the state has changed.

    `fit` must ask again for `missing_steps`, since a worker's data ended before them. `split` and
    `first_batch` name the batches of a result, where each execution returns one. `pushes` is the
    number of pushes to each ps for the result, and `worker` the worker that did the steps.
    """

    missing_steps: int = 0
    result: Any = None
    split: int | None = None
    first_batch: int = 0
    pushes: int = 0
    worker: int = 0


Command = Open | Join | Leave | Send | Collect | Report
