"""The interface of objects that run executions: on workers, or in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from kerasps.training.contract.metrics import MetricTotals
from kerasps.training.epoch.epoch_events import Execution, Report, SplitPosition
from kerasps.training.epoch.worker_state import WorkerActivity


class Dispatching(Protocol):
    """Runs executions and reports their results, one epoch after the other.

    Contract: call `make_sources` before the first epoch of a pass. Then, for each epoch, call
    `hold`, `start_epoch`, any number of `send` and `wait`, and `finish_epoch`, or `abandon` after
    an error. `make_sources` may also follow a `finish_if_done` that returned True though
    executions are in flight: these are done in the new pass. Thread: `fit`'s. `Dispatcher` runs
    executions on the workers of a coordinator.
    """

    @property
    def num_workers(self) -> int:
        """The number of workers that run executions."""

    @property
    def may_send_more(self) -> bool:
        """True if an execution may have more steps than the model is compiled for."""

    @property
    def num_in_flight(self) -> int:
        """The number of executions that were sent and are not done."""

    @property
    def is_at_end(self) -> bool:
        """True if data of known length were read to the end: the next epoch needs a new pass."""

    @property
    def positions(self) -> list[SplitPosition]:
        """The position of each split of the input, and of each part of one. Call when suspended."""

    @property
    def has_backlog(self) -> bool:
        """True while `suspend` keeps reports for `wait`."""

    @property
    def is_dealt_evenly(self) -> bool:
        """True if each worker has its part of the next synchronous updates and nothing is pending.

        False if updates are not synchronous.
        """

    def activities(self) -> dict[int, WorkerActivity]:
        """Return the part of each worker in this loop, by its index. Thread: any."""

    def make_sources(self, epoch: int, *, must_end: bool) -> None:
        """Begin a pass over the data with `epoch`."""

    def begin_resumed(self, positions: Sequence[SplitPosition]) -> None:
        """Begin at `positions` in the input's pass. Call `Input.resume_pass` before."""

    def hold(self) -> threading.Lock:
        """Return a lock to hold, in a `with` statement, from `start_epoch` to the epoch's end."""

    def start_epoch(self) -> None:
        """Prepare for the epoch's executions."""

    def send(self, execution: Execution) -> None:
        """Queue an execution for any worker."""

    def finish_if_done(self, *, all_asked: bool) -> bool:
        """Return True if nothing that was sent is pending, so that `wait` would never return.

        Args:
            all_asked: whether nothing more will be sent, unless steps are reported missing.
        """

    def wait(self) -> Report:
        """Return the next report."""

    def suspend(self) -> None:
        """Wait until nothing is in flight, so that no step changes variables; `send` resumes."""

    def finish_epoch(self, totals: MetricTotals) -> None:
        """End the epoch, and add the remaining results to its `totals`."""

    def abandon(self) -> None:
        """End all executions in flight, after an error of the epoch."""
