"""Finds the steps of a trace: the times of pull, compute and push, on the worker and on the ps.

It recognises operations by their name scopes (`step/tracing/step_graph.py`). The operations of a
step have the same number on every task. All steps of a loop have the number of the loop's body, so
their order distinguishes them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kerasps.step.phases.compute_phase import NAME_SCOPE as COMPUTE_SCOPE
from kerasps.step.tracing.step_graph import PULL_SCOPE, PUSH_SCOPE
from kerasps.tools.tracing.intervals import Interval
from kerasps.tools.tracing.task_events import Operation, TaskEvents

Task = tuple[str, int]
# An execution, the number of a step in its graph, and the count of earlier ones with that number.
StepKey = tuple[int, str, int]

_SCOPE = re.compile(
    rf"(?P<graph>(?:^|.*?/))(?P<phase>{PULL_SCOPE}|{COMPUTE_SCOPE}|{PUSH_SCOPE})"
    r"(?P<number>(?:_\d+)?)/"
)
_READS = ("IteratorGetNext", "IteratorGetNextAsOptional", "OptionalGetNext")
_CALLS = ("StatefulPartitionedCall", "PartitionedCall")
_LOCKS = "MutexLock"
_SENDS = "_Send"


@dataclass
class OnPS:
    """The times when a ps worked for one step.

    Attributes:
        pull: the time in which it read and sent values; None if the step pulled nothing there.
        push: the time from the arrival of the push until it was applied.
        lock: the time in which the push waited for the lock.
    """

    pull: Interval | None = None
    push: Interval | None = None
    lock: Interval | None = None


@dataclass
class WorkerStep:
    """One step on a worker. Times are in nanoseconds.

    Attributes:
        pull: from the first read of a value on a ps until the last value arrived.
        compute: from the first operation of the model that may need the batch to the last one.
        push: from the end of the computation, or from the first gradient that was sent before that,
            until the last one was sent.
        data: the time in which it waited for its batch; None if it took none from a dataset. The
            first step of an execution that looks rows up pulls them when all batches of the
            execution have arrived, so its time is that of all batches.
        waited_from: the time when the worker was free for it, at the end of its earlier work.
        execution: the time of the execution that it belongs to.
        arrivals: when each value that it pulled arrived.
    """

    worker: int
    key: StepKey
    pull: Interval
    compute: Interval
    push: Interval
    data: Interval | None
    waited_from: float
    execution: Interval
    on_ps: dict[int, OnPS] = field(default_factory=dict)
    arrivals: Sequence[float] = ()


@dataclass
class _Parts:
    """The operations of one phase of one step."""

    begin: float
    end: float
    names: set[str]
    begins: list[float] = field(default_factory=list)
    sends_from: float | None = None

    @property
    def interval(self) -> Interval:
        return self.begin, self.end


def find_steps(events: Mapping[Task, TaskEvents]) -> list[WorkerStep]:
    """Return the steps with all three phases in events on one clock, in their order.

    It leaves out executions that began before all tasks were recorded.
    """
    on_ps: dict[StepKey, dict[int, OnPS]] = defaultdict(dict)
    for (job, index), task_events in events.items():
        if job == "ps":
            for key, done in _done_on_ps(task_events).items():
                on_ps[key][index] = done
    since = max(
        (task_events.begin for task_events in events.values() if task_events.begin is not None),
        default=0.0,
    )
    steps = []
    for (job, index), task_events in events.items():
        if job == "worker":
            steps += _steps_of_worker(index, task_events, on_ps, since)
    return sorted(steps, key=lambda step: step.compute)


def reads_of_data(events: TaskEvents) -> list[Interval]:
    """Return the times in which a task read a batch."""
    return [(op.begin, op.end) for op in [*events.operations, *events.waits] if op.kind in _READS]


def _done_on_ps(events: TaskEvents) -> dict[StepKey, OnPS]:
    found: dict[StepKey, OnPS] = defaultdict(OnPS)
    for execution, operations in _by_execution(events.operations).items():
        for (phase, number, occurrence), parts in _phases(operations).items():
            if phase == PULL_SCOPE:
                found[execution, number, occurrence].pull = parts.interval
    pushes: dict[tuple[int, str], list[StepKey]] = defaultdict(list)
    for wait in events.waits:
        match = _SCOPE.match(wait.name)
        if wait.kind in _CALLS and match is not None and match["phase"] == PUSH_SCOPE:
            of_call = pushes[wait.execution, wait.name]
            key = wait.execution, match["graph"] + match["number"], len(of_call)
            of_call.append(key)
            found[key].push = wait.begin, wait.end
    for wait in events.waits:
        caller = events.callers.get(wait.execution)
        if wait.kind != _LOCKS or caller is None:
            continue
        for key in pushes[caller]:
            push = found[key].push
            if push is not None and push[0] <= wait.begin <= push[1]:
                found[key].lock = wait.begin, min(wait.end, push[1])
    return found


def _steps_of_worker(
    worker: int,
    events: TaskEvents,
    on_ps: Mapping[StepKey, Mapping[int, OnPS]],
    since: float,
) -> list[WorkerStep]:
    steps = []
    waits = _by_execution(events.waits)
    for execution, operations in _by_execution(events.operations).items():
        if execution not in events.begun or operations[0].begin < since:
            continue
        recorded = _Execution(
            worker, execution, operations, waits.get(execution, []), events.has_gpu
        )
        steps += recorded.steps(on_ps)
    return steps


class _Execution:
    """The steps of one execution on a worker."""

    def __init__(
        self,
        worker: int,
        execution: int,
        operations: Sequence[Operation],
        waits: Sequence[Operation],
        has_gpu: bool,
    ) -> None:
        self._worker, self._execution, self._has_gpu = worker, execution, has_gpu
        self._phases = _phases(operations)
        self._arrivals: dict[tuple[str, str], list[float]] = defaultdict(list)
        for wait in waits:
            match = _SCOPE.match(wait.name)
            if match is not None and match["phase"] == PULL_SCOPE:
                self._arrivals[match["graph"] + match["number"], wait.name].append(wait.end)
        self._reads = sorted((w.end, w.begin) for w in waits if w.kind in _READS)
        ends = [operation.end for operation in [*operations, *waits]]
        self._time = min(operation.begin for operation in [*operations, *waits]), max(ends)

    def steps(self, on_ps: Mapping[StepKey, Mapping[int, OnPS]]) -> list[WorkerStep]:
        computes = sorted(
            (parts.begin, graph, occurrence)
            for (phase, graph, occurrence), parts in self._phases.items()
            if phase == COMPUTE_SCOPE
        )
        found: list[WorkerStep] = []
        free_from = self._time[0]
        for number, (_, graph, occurrence) in enumerate(computes):
            compute = self._phases[COMPUTE_SCOPE, graph, occurrence]
            push = self._phases.get((PUSH_SCOPE, graph, occurrence))
            if push is None:
                free_from = compute.end
                continue
            key = self._execution, graph, occurrence
            done = dict(on_ps.get(key, {}))
            sends_from = push.end if push.sends_from is None else push.sends_from
            # A GPU has finished when its results are sent.
            end = max(compute.end, sends_from) if self._has_gpu else compute.end
            arrivals = self._arrivals_of(graph, occurrence)
            # Operations that need only the batch may have run long before, with other steps, and
            # those that need only the values while the step waited for the batch.
            data = self._data(number, len(computes))
            if data is not None and not number and max(arrivals, default=0) > self._reads[-1][0]:
                data = self._data(0, 1)
            first = min(arrivals, default=compute.begin)
            if data is not None and data[1] < compute.end:
                first = max(first, data[1])
            begin = next((time for time in compute.begins if time >= first), compute.begin)
            pull = self._pull(arrivals, free_from, begin, done)
            found.append(
                WorkerStep(
                    worker=self._worker,
                    key=key,
                    pull=pull,
                    compute=(begin, end),
                    push=(max(begin, min(end, sends_from)), max(end, push.end)),
                    data=data,
                    waited_from=free_from,
                    execution=self._time,
                    on_ps=done,
                    arrivals=arrivals,
                )
            )
            free_from = push.end
        return found

    def _arrivals_of(self, graph: str, occurrence: int) -> list[float]:
        """Return the times at which the values that a step pulled arrived."""
        return [
            sorted(times)[occurrence]
            for (in_graph, _), times in self._arrivals.items()
            if in_graph == graph and occurrence < len(times)
        ]

    def _pull(
        self,
        arrivals: Sequence[float],
        free_from: float,
        computes_from: float,
        on_ps: Mapping[int, OnPS],
    ) -> Interval:
        end = max(arrivals, default=computes_from)
        begins = [done.pull[0] for done in on_ps.values() if done.pull is not None]
        begin = min(begins, default=free_from)
        return min(max(begin, self._time[0]), computes_from, end), end

    def _data(self, number: int, num_steps: int) -> Interval | None:
        """Return the time in which the step with this number waited for its batch or batches."""
        per_step, left = divmod(len(self._reads), num_steps)
        if not per_step or left:
            return None
        reads = self._reads[number * per_step : (number + 1) * per_step]
        return min(begin for _, begin in reads), reads[-1][0]


def _phases(operations: Iterable[Operation]) -> dict[tuple[str, str, int], _Parts]:
    """Return the parts of each phase, by phase, number and count of earlier ones."""
    found: dict[tuple[str, str, int], _Parts] = {}
    occurrences: dict[tuple[str, str], int] = {}
    for operation in operations:
        match = _SCOPE.match(operation.name)
        if match is None:
            continue
        scope = match["phase"], match["graph"] + match["number"]
        occurrence = occurrences.setdefault(scope, 0)
        parts = found.get((*scope, occurrence))
        if parts is not None and operation.name in parts.names:
            # A repeated name belongs to the next iteration of a loop.
            occurrence = occurrences[scope] = occurrence + 1
            parts = None
        if parts is None:
            parts = _Parts(operation.begin, operation.end, set())
            found[*scope, occurrence] = parts
        parts.end = max(parts.end, operation.end)
        parts.names.add(operation.name)
        parts.begins.append(operation.begin)
        if operation.kind == _SENDS and parts.sends_from is None:
            parts.sends_from = operation.begin
    return found


def _by_execution(operations: Iterable[Operation]) -> dict[int, list[Operation]]:
    found: dict[int, list[Operation]] = defaultdict(list)
    for operation in operations:
        found[operation.execution].append(operation)
    return found
