"""A worker's part in the current loop: its executions in flight, and its reason to wait."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerActivity:
    """The part of one worker in the current loop."""

    executions: int  # the number of executions that it was sent and has not reported as done
    # `"data"` while it opens a dataset, or if none is left for it; `"workers"` while a bound of
    # staleness or a synchronous update holds it back; `"coordinator"` while nothing is pending, for
    # example while callbacks run; `"session"` before it is made ready. Empty if it has something to
    # do, or is lost.
    waits_for: str = ""
