"""Does the executions of a loop in this process, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasps.inputs import Input, OpenDataset
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.step import ExecutionResult, TracedStep
from kerasps.step.tracing.runners import ALONE
from kerasps.training import MetricTotals
from kerasps.training.epoch.epoch_events import Execution, Report, SplitPosition
from kerasps.training.epoch.worker_state import WorkerActivity
from kerasps.worker_driven.fit_messages import FitMessages
from kerasps.worker_driven.step_budget import StepBudget


class InProcessDispatcher:
    """Runs executions in this process (see `training.Dispatching`)."""

    num_workers = 1
    has_backlog = may_send_more = is_dealt_evenly = False

    def __init__(
        self,
        function: TracedStep,
        inputs: Input,
        *,
        worker: int,
        split: int,
        devices: Sequence[str],
        seed_offset: int,
        messages: FitMessages | None = None,
        budget: StepBudget | None = None,
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._worker = worker
        self._split = split if inputs.num_splits else None
        self._devices = devices
        self._seed_offset = seed_offset
        self._messages = messages
        self._budget = budget
        self._queue: deque[Execution] = deque()
        self._dataset: OpenDataset | None = None
        self._left: int | None = None
        # The number of batches that were read in this pass.
        self._num_read = 0
        self._is_exhausted = self._is_at_work = False

    @property
    def num_in_flight(self) -> int:
        return len(self._queue)

    @property
    def is_at_end(self) -> bool:
        return self._left == 0

    @property
    def positions(self) -> list[SplitPosition]:
        return []

    def activities(self) -> dict[int, WorkerActivity]:
        executions = int(self._is_at_work)
        return {self._worker: WorkerActivity(executions, "" if executions else "coordinator")}

    def make_sources(self, epoch: int, *, must_end: bool) -> None:
        self._inputs.start_pass(epoch, must_end=must_end)
        self.begin_resumed(())

    def begin_resumed(self, positions: Sequence[SplitPosition]) -> None:
        del positions
        self._dataset, self._left, self._is_exhausted = None, None, False
        self._num_read = 0

    def hold(self) -> threading.Lock:
        return threading.Lock()

    def start_epoch(self) -> None:
        self._queue.clear()

    def send(self, execution: Execution) -> None:
        self._queue.append(execution)

    def finish_if_done(self, *, all_asked: bool) -> bool:
        del all_asked  # no other worker waits for this one
        return not self._queue or self._is_exhausted

    def wait(self) -> Report:
        """Run the next execution, and return its report."""
        self._is_at_work = True
        execution = self._queue.popleft()
        with tf.device(COORDINATOR_CPU):
            if self._dataset is None:
                self._dataset = self._inputs.open(self._split, 0)
                self._left = self._dataset.left
            execution, missing = self._next_part(execution)
            num_steps = self._num_steps(execution)
            result = self._done(execution, num_steps, self._dataset) if num_steps else None
        steps = 0 if result is None else result.steps
        first = self._num_read if execution.batches is None else execution.first_batch
        self._num_read += steps
        if self._left is not None:
            self._left -= steps
        if self._messages is not None and result is not None:
            self._messages.add(result)
        # `fit` asks again for steps that the budget did not grant, since it may grant more later.
        self._is_exhausted = not num_steps or steps < num_steps or self._left == 0
        missing += execution.num_steps - steps
        self._is_at_work = False
        return Report(missing, result, self._split, first, steps, self._worker)

    def _next_part(self, execution: Execution) -> tuple[Execution, int]:
        """Cut an execution at the end of the data and queue all but its first part.

        Returns:
            The first part, and the number of steps without data.
        """
        left = self._left
        if not left or left >= execution.num_steps:
            return execution, 0
        first, *others = execution.cut(left)
        self._queue.extendleft(reversed(others))
        return first, execution.num_steps - left

    def _num_steps(self, execution: Execution) -> int:
        """Return how many steps of an execution to do, or to try if the data may end."""
        num_steps = 0 if self._left == 0 else execution.num_steps
        if self._budget is not None and num_steps:
            num_steps = self._budget.reserve(num_steps)
        return num_steps

    def _done(self, execution: Execution, num_steps: int, dataset: OpenDataset) -> ExecutionResult:
        """Do the first `num_steps` steps of an execution; return their result."""
        graph = self._function.step_graph(
            dataset.spec,
            num_steps,
            checked=dataset.is_checked,
            runner=ALONE,
            devices=self._devices,
        )
        source: Any = dataset.resource
        if execution.batches is not None:
            source = execution.batches[:num_steps]
        header = execution.header
        if self._seed_offset:
            header = header.with_other_seeds(self._seed_offset)
        return self._function.run(graph, None, source, header)

    def suspend(self) -> None:
        """Do nothing, since between two calls of `wait` nothing is in flight."""

    def finish_epoch(self, totals: MetricTotals) -> None:
        self._queue.clear()
        if self._messages is not None:
            self._messages.end_epoch(totals)

    def abandon(self) -> None:
        self._queue.clear()
