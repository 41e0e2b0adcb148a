"""Converts the events of all tasks to the clock of this process.

On one machine all tasks share a clock. Between machines clocks differ, mostly by less than a
millisecond. The order of events bounds the difference: a recording begins after the request for it,
and a message arrives after it was sent. A clock that agrees with these bounds stays unchanged.
Another one is moved to the middle of the bounds, which is as exact as the fastest message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kerasps.tools.tracing.steps import Task
from kerasps.tools.tracing.task_events import Operation, TaskEvents

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
    """Return events on one clock, and the nanoseconds by which each task's clock was moved."""
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
    """Return events on a clock that is ahead by this many nanoseconds."""
    if not by:
        return events
    return replace(
        events,
        begin=None if events.begin is None else events.begin + by,
        end=None if events.end is None else events.end + by,
        operations=[_moved(operation, by) for operation in events.operations],
        waits=[_moved(wait, by) for wait in events.waits],
        calls=[(name, begin + by, end + by) for name, begin, end in events.calls],
    )


def _moved(operation: Operation, by: float) -> Operation:
    return replace(operation, begin=operation.begin + by, end=operation.end + by)


def _move(least: float, most: float) -> float:
    """Return the move of a clock, given its bounds."""
    # Bounds that contradict each other say that a clock was set meanwhile.
    if least <= 0 <= most or least > most:
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
    """Return the bounds of the further move of a ps's clock.

    Args:
        ahead: the move of the ps's events so far, relative to the worker's.
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
                repeated.add(key)  # in a loop: senders and receivers cannot be matched
            found[key] = operation.begin if at_begin else operation.end
    return {key: time for key, time in found.items() if key not in repeated}
