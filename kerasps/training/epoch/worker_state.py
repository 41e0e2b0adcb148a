"""The state of one worker in an `EpochState`, and its part in the current loop."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kerasps.training.epoch.epoch_events import Execution


class WorkerStatus(enum.Enum):
    """The status of a worker in an epoch."""

    AWAITED = "its session has not begun"
    OPENING = "it was told to open a split"
    READING = "it may have data"
    DRY = "it waits for data"
    LOST = "it is gone"


@dataclass(frozen=True)
class WorkerActivity:
    """The part of one worker in the current loop."""

    executions: int  # the number of executions that it was sent and has not reported as done
    # `"data"` while it opens a dataset, or if none is left for it; `"workers"` while a bound of
    # staleness or a synchronous update holds it back; `"coordinator"` while nothing is pending, for
    # example while callbacks run; `"session"` before it is made ready. Empty if it has something to
    # do, or is lost.
    waits_for: str = ""


@dataclass
class WorkerState:
    """The state of one worker."""

    status: WorkerStatus = WorkerStatus.AWAITED
    split: int | None = None
    # True if the split has another reader.
    shares: bool = False
    is_leaving: bool = False
    # True if it came to the end of data whose length is not known.
    is_exhausted: bool = False
    # Executions that were sent and are not known to be done.
    running: deque[Execution] = field(default_factory=deque)
    # The number of executions of this pass that it was given.
    num_given: int = 0
    # Executions that are done, and whose results the worker holds.
    uncollected: list[Execution] = field(default_factory=list)
    is_collecting: bool = False
    collect_at: float = 0.0
    # How many batches it takes at a time.
    replicas: int = 1
    # Since it was made ready: the pushes whose results are counted, and how many of those each ps
    # did not apply, since it had applied them before.
    counted: int = 0
    not_applied: tuple[int, ...] = ()

    def turn(self, index: int) -> tuple[int, int, int]:
        """Return the key by which workers are ordered for the next execution, the least first."""
        return len(self.running), self.num_given, index

    def count(self, executions: Iterable[Execution], steps: int) -> int:
        """Count `steps` steps of executions whose results are there; return their pushes."""
        pushes = 0
        for execution in executions:
            # Executions behind the end of the data have done nothing.
            done = min(steps, execution.num_steps)
            steps -= done
            pushes += execution.pushes_of(done)
            if execution.applied:
                before = self.not_applied or (0,) * len(execution.applied)
                self.not_applied = tuple(
                    b + n for b, n in zip(before, execution.applied, strict=True)
                )
        self.counted += pushes
        return pushes

    def take_back(self, applied: tuple[int, ...]) -> list[Execution]:
        """Remove and return the executions that it has not reported, in order.

        Args:
            applied: for each ps, the worker's pushes that were applied there since it was made
                ready. Each returned execution notes its part of them.
        """
        not_applied = (self.not_applied if applied else ()) or (0,) * len(applied)
        left = [
            pushes - (self.counted - without)
            for pushes, without in zip(applied, not_applied, strict=True)
        ]
        executions = []
        for execution in [*self.uncollected, *self.running]:
            before = execution.applied or (0,) * len(left)
            new = [min(n, execution.num_pushes - b) for n, b in zip(left, before, strict=True)]
            left = [n - taken for n, taken in zip(left, new, strict=True)]
            total = tuple(b + taken for b, taken in zip(before, new, strict=True))
            executions.append(replace(execution, applied=total) if any(new) else execution)
        self.num_given -= len(executions)
        self.uncollected.clear()
        self.running.clear()
        self.is_collecting = False
        self.counted, self.not_applied = 0, ()
        return executions

    def validate(self) -> None:
        """Raise AssertionError if the state of the worker contradicts itself."""
        held = [*self.uncollected, *self.running]
        if self.status in (WorkerStatus.OPENING, WorkerStatus.DRY, WorkerStatus.LOST):
            assert not held, f"a worker holds executions while {self.status.value}"
        if self.status is not WorkerStatus.READING:
            assert not self.running, f"executions run while {self.status.value}"
            assert not self.is_collecting, f"results are fetched while {self.status.value}"
        if self.status in (WorkerStatus.DRY, WorkerStatus.LOST):
            assert self.split is None, f"a worker has a split while {self.status.value}"
        assert self.uncollected or not self.is_collecting, "there is no result to fetch"
        assert self.split is not None or not self.shares, "no split is shared"
        # The pushes that a ps has applied of counted executions, and of each held one.
        assert all(0 <= number <= self.counted for number in self.not_applied)
        for execution in held:
            assert all(0 <= number <= execution.num_pushes for number in execution.applied)
