"""Sessions: a worker's thread on the coordinator carries out the commands of a flight."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from kerasps import _compat
from kerasps.inputs import Input, OpenDataset
from kerasps.step import TracedStep
from kerasps.step.tracing.runners import COLLECTING_WORKER, RETURNING_WORKER, Runner
from kerasps.step.tracing.state import Header, Ticket
from kerasps.training.epoch.epoch_events import (
    Collect,
    Event,
    Execution,
    ExecutionsDone,
    Join,
    JoinedUpdates,
    Leave,
    Open,
    ResultCollected,
    ResultReturned,
    Send,
    SplitOpened,
)
from kerasps.training.sessions.channel import Mailbox
from kerasps.training.sessions.worker_lanes import WorkerLanes
from kerasps.variables.storage.names import CALLS

# The executions that a worker has at a time: one runs, and the next can start when it ends.
EXECUTIONS_AHEAD = 2
# Executions in flight per worker: those that it has, and one that is sent when one of them ends.
EXECUTIONS_PER_WORKER = EXECUTIONS_AHEAD + 1


class WorkerSource:
    """The open iterators of a worker's process, which its sessions pass on.

    Thread: the worker's session.
    """

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._dataset: OpenDataset | None = None
        self._resource: tf.Tensor | None = None
        self._graphs: dict[tuple[int, bool, int], Any] = {}
        # The state that the worker keeps between executions; None before it is made ready.
        self.handles: list[tf.Tensor] | None = None
        # The devices on which it computes.
        self.devices: Sequence[str] = ()

    @classmethod
    def of(cls, sources: dict[int, WorkerSource], worker: int, generation: int) -> WorkerSource:
        """Return the source of a worker, a new one if its generation changed.

        The process may be a new one then. A session that was abandoned closes the source before,
        whenever its call returns.
        """
        source = sources.get(worker)
        if source is None or source._generation != generation:
            source = sources[worker] = cls(generation)
        return source

    @property
    def is_open(self) -> bool:
        """True while a dataset is open, so that executions can run."""
        return self._dataset is not None

    def open(self, dataset: OpenDataset) -> None:
        """Read from `dataset` from now on."""
        self._dataset, self._resource = dataset, dataset.resource
        self._graphs.clear()

    def close(self) -> None:
        """Drop everything, since the worker is lost or its state is unknown."""
        self._dataset = self._resource = None
        self._graphs.clear()
        self.handles = None

    def data_of(self, execution: Execution) -> Any:
        """Return the data of an execution for its step graph: a resource, or batches."""
        return self._resource if execution.batches is None else execution.batches

    def step_graph(self, function: TracedStep, execution: Execution, runner: Runner) -> Any:
        """Return the step graph of an execution on this source."""
        assert self._dataset is not None  # `Open` comes before `Send`
        key = execution.num_steps, bool(execution.applied), execution.replicas
        if key not in self._graphs:
            self._graphs[key] = function.step_graph(
                self._dataset.spec,
                execution.num_steps,
                checked=self._dataset.is_checked,
                runner=runner,
                is_redone=bool(execution.applied),
                replicas=execution.replicas,
                devices=self.devices,
            )
        return self._graphs[key]


class Session:
    """Carries out commands on one worker, until `None` in its mailbox ends it.

    The subclasses differ in where the results of executions go: see `ReturningSession` and
    `CollectingSession`.

    Thread: the worker's thread, whose operations go through `executor` to the worker's device.
    """

    runner: ClassVar[Runner]  # makes the step graphs that it calls
    # How many executions a worker is given before the first is done.
    executions_ahead: ClassVar[int]

    def __init__(
        self,
        worker: int,
        source: WorkerSource,
        function: TracedStep,
        inputs: Input,
        *,
        executor: Any,
        lanes: WorkerLanes,
        post: Callable[[Event], None],
        on_success: Callable[[int], None],
    ) -> None:
        self._worker = worker
        self._source = source
        self._function = function
        self._inputs = inputs
        self._executor = executor
        self._lanes = lanes
        self._post = post
        self._on_success = on_success
        # Executions that are not known to be done.
        self._num_running = 0

    def run(self, mailbox: Mailbox, is_over: Callable[[], bool]) -> None:
        """Carry out the commands in `mailbox`; return when the flight is over and nothing runs."""
        while True:
            if mailbox.empty():
                # There is nothing to send ahead, so wait, and tell the state of ended executions.
                self._wait()
            command = mailbox.get()
            if command is None or is_over():
                self._wait()
                self._leave_joints()
                return
            match command:
                case Open():
                    self._open(command)
                case Join():
                    self._function.rule.join(self._lanes.lane(self._worker))
                    self._post(JoinedUpdates(self._worker))
                case Leave():
                    self._leave_joints()
                case Send():
                    self._send(command.execution)
                case Collect():
                    self._collect()

    def _open(self, command: Open) -> None:
        if self._source.handles is None:
            self._source.handles = self._function.start(self._lanes.open(self._worker))
        dataset = self._inputs.open(command.split, command.skip, self._worker)
        self._wait()  # what is in flight reads the iterator that this one replaces
        self._source.open(dataset)
        self._post(
            SplitOpened(
                self._worker,
                dataset.left,
                is_endless=dataset.is_endless,
                has_order=dataset.has_order,
            )
        )

    def _leave_joints(self) -> None:
        """Leave synchronous updates, so no other worker waits. Call when nothing runs here."""
        if self._source.handles is not None:
            self._function.rule.stop_waiting_for(self._lanes.lane(self._worker))

    def _send(self, execution: Execution) -> None:
        if not execution.applied:
            self._run(execution)
            return
        # A rare case, after the loss of a worker.
        lane = self._lanes.lane(self._worker)
        self._wait()
        self._function.give_ticket(self._handles, Ticket(lane, execution.applied))
        self._run(execution)
        self._wait()
        self._function.give_ticket(self._handles, Ticket(lane, [0] * len(execution.applied)))

    def _run(self, execution: Execution) -> None:
        """Run a step graph, and handle its result."""
        raise NotImplementedError

    def _call_of(self, execution: Execution) -> tuple[Any, Any, Any, Header]:
        """Return what a `TracedStep` runs an execution with."""
        graph = self._source.step_graph(self._function, execution, self.runner)
        return graph, self._handles, self._source.data_of(execution), execution.header

    def _collect(self) -> None:
        self._wait()
        result = self._function.collect(self._handles)
        self._post(ResultCollected(self._worker, result.steps, result, time.monotonic()))

    @property
    def _handles(self) -> list[tf.Tensor]:
        assert self._source.handles is not None  # `Open` comes before
        return self._source.handles

    def _wait(self) -> None:
        """Wait until nothing runs on the worker."""
        self._executor.wait()
        self._report(0)

    def _report(self, still_running: int) -> None:
        done = self._num_running - still_running
        if done > 0:
            self._num_running = still_running
            self._on_success(self._worker)
            self._post(ExecutionsDone(self._worker, done, time.monotonic()))


class ReturningSession(Session):
    """A session in which each execution returns its result."""

    runner = RETURNING_WORKER
    # The session waits for each result, so it can send nothing ahead.
    executions_ahead = 1

    def _run(self, execution: Execution) -> None:
        result = self._function.run(*self._call_of(execution))
        self._on_success(self._worker)
        self._post(ResultReturned(self._worker, result.steps, result))


class CollectingSession(Session):
    """A session in which results add up on the worker until they are collected."""

    runner = COLLECTING_WORKER
    executions_ahead = EXECUTIONS_PER_WORKER

    def _run(self, execution: Execution) -> None:
        call = self._call_of(execution)
        self._num_running += 1
        # Returns when the executor has room: all but the last `EXECUTIONS_AHEAD` executions ended.
        self._function.advance(*call)
        self._report(EXECUTIONS_AHEAD)


@contextlib.contextmanager
def sending_through(executor: Any) -> Iterator[None]:
    """Send this thread's operations through `executor` within this context."""
    context = _compat.eager_context()
    before = context.executor
    context.executor, CALLS.are_waited_for = executor, False
    try:
        yield
    finally:
        context.executor, CALLS.are_waited_for = before, True
        # Deleting a tensor of a lost task leaves an error in the executor, which TensorFlow would
        # print.
        before.clear_error()


def first_error(executor: Any, error: BaseException) -> BaseException:
    """Return the first error of an executor if `error` only follows from it, else `error`.

    A call whose argument an earlier call failed to make ends in another error, which says nothing
    of the first.
    """
    follows = isinstance(error, tf.errors.InternalError) and "poisoned" in error.message
    if executor is not None and follows:
        try:
            executor.wait()
        except tf.errors.OpError as exc:
            first: BaseException = exc
            return first
    return error
