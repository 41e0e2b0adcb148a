"""Puts the events of all tasks on the clock of this process.

On one machine all clocks are one. Between machines they differ, mostly by less than a millisecond.
What is known of a clock is an order: a recording begins after it was asked for, and a message
arrives after it was sent. A clock that agrees with all that stays as it is. Another one is moved
into the middle of what the messages allow, which is as exact as the fastest of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kerasps.tracing.steps import Task
from kerasps.tracing.task_events import Operation, TaskEvents

# A sender and its receiver have consecutive numbers: ".../_20:_Send" and ".../_21".
_EDGE = re.compile(r"(?P<edge>.*/_)(?P<number>\d+)$")


@dataclass(frozen=True)
class Asked:
    """The times when this process asked for a recording and received it, in nanoseconds."""

    begin: float
    end: float


def aligned(
    events: Mapping[Task, TaskEvents], asked: Mapping[Task, Asked]
) -> tuple[dict[Task, TaskEvents], dict[Task, float]]:
    """Return events on one clock, and by how many nanoseconds the clock of each task was moved.

    Args:
        events: those of each task, on its own clock.
        asked: when this process asked each.
    """
    moves = {}
    for task, task_events in events.items():
        least, most = float("-inf"), float("inf")
        if task_events.begin is not None and task_events.end is not None and task in asked:
            least, most = asked[task].begin - task_events.begin, asked[task].end - task_events.end
        moves[task] = _move(least, most)
    workers = [task for task in events if task[0] == "worker"]
    sent = {task: _sent(task_events.operations) for task, task_events in events.items()}
    received = {task: _received(task_events.waits) for task, task_events in events.items()}
    for ps in (task for task in events if task[0] == "ps"):
        bounds = [
            _bounds(sent[w], received[w], sent[ps], received[ps], moves[ps] - moves[w])
            for w in workers
        ]
        moves[ps] += _move(
            max((least for least, _ in bounds), default=float("-inf")),
            min((most for _, most in bounds), default=float("inf")),
        )
    return {task: moved(task_events, moves[task]) for task, task_events in events.items()}, moves


def moved(events: TaskEvents, by: float) -> TaskEvents:
    """Return events on a clock that is ahead by so many nanoseconds."""
    if not by:
        return events
    return TaskEvents(
        begin=None if events.begin is None else events.begin + by,
        end=None if events.end is None else events.end + by,
        operations=[_moved(operation, by) for operation in events.operations],
        waits=[_moved(wait, by) for wait in events.waits],
        begun=events.begun,
        callers=events.callers,
        calls=[(name, begin + by, end + by) for name, begin, end in events.calls],
        has_gpu=events.has_gpu,
    )


def _moved(operation: Operation, by: float) -> Operation:
    return replace(operation, begin=operation.begin + by, end=operation.end + by)


def _move(least: float, most: float) -> float:
    """Return by how much a clock is to be moved, given the bounds of that."""
    if least <= 0 <= most:
        return 0.0
    if least > most:  # bounds that contradict each other: a clock was set meanwhile
        return 0.0
    known = [bound for bound in (least, most) if abs(bound) != float("inf")]
    return sum(known) / len(known)


_Messages = Mapping[tuple[int, str, int], float]


def _bounds(
    worker_sent: _Messages,
    worker_received: _Messages,
    ps_sent: _Messages,
    ps_received: _Messages,
    ahead: float,
) -> tuple[float, float]:
    """Return the bounds of how far the clock of a ps is still to be moved.

    Args:
        worker_sent: when the worker has sent each message.
        worker_received: when it has received each.
        ps_sent: likewise.
        ps_received: likewise.
        ahead: how far the ps's events are moved already, relative to the worker's.
    """
    least = [
        time - ps_received[key] - ahead for key, time in worker_sent.items() if key in ps_received
    ]
    most = [time - ps_sent[key] - ahead for key, time in worker_received.items() if key in ps_sent]
    return max(least, default=float("-inf")), min(most, default=float("inf"))


def _sent(operations: Iterable[Operation]) -> dict[tuple[int, str, int], float]:
    return _first_of(
        [operation for operation in operations if operation.kind == "_Send"], 1, at_begin=True
    )


def _received(waits: Iterable[Operation]) -> dict[tuple[int, str, int], float]:
    return _first_of([wait for wait in waits if wait.kind == "_Recv"], 0, at_begin=False)


def _first_of(
    operations: Sequence[Operation], ahead: int, *, at_begin: bool
) -> dict[tuple[int, str, int], float]:
    found: dict[tuple[int, str, int], float] = {}
    repeated = set()
    for operation in operations:
        match = _EDGE.match(operation.name)
        if match is not None:
            key = operation.execution, match["edge"], int(match["number"]) + ahead
            if key in found:
                repeated.add(key)  # in a loop: which one belongs to which is not known
            found[key] = operation.begin if at_begin else operation.end
    return {key: time for key, time in found.items() if key not in repeated}
