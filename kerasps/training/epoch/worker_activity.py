"""A worker's part in the loop that runs: its executions in flight, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerActivity:
    """The part of one worker in the loop that runs.

    Attributes:
        executions: the executions that it was sent and has not reported as done.
        waits_for: `"data"` while it opens a dataset, or where none is left for it; `"workers"`
            while a bound of staleness or a synchronous update holds it back; `"coordinator"` where
            nothing more is asked for, as while callbacks run; `"session"` before it is made ready.
            Empty where it has something to do, or is lost.
    """

    executions: int
    waits_for: str = ""
