"""Reads the events of one task from the recording of TensorFlow's profiler.

An execution has one id on all tasks that take part in it, TensorFlow's step id. For an operation
that waits, such as for a lock, the profiler records its start and its end. For other operations it
records their duration and thread; the event around them has the id.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kerasps import _compat

_PROCESS = "ExecutorState::Process"
_START, _DONE = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"
_RUN = "FunctionRun"
_EXECUTE = "EagerExecute"
_OPERATION = re.compile(r"(?P<name>[^:]+):(?P<kind>[A-Za-z_]\w*)$")
# The names of Python functions in graphs.
_FUNCTION = re.compile(r"^__(?:inference|forward|backward)_(?P<name>.*?)_\d+$")


class _Stat(Protocol):
    """An `XStat`: a property of an event."""

    metadata_id: int

    def WhichOneof(self, name: str) -> str | None:
        """Return the name of the field of a group that is set."""


class _Event(Protocol):
    """An `XEvent`: an event with a duration."""

    metadata_id: int
    offset_ps: int
    duration_ps: int
    stats: Sequence[_Stat]


class _Line(Protocol):
    """An `XLine`: the events of one thread."""

    timestamp_ns: int
    events: Sequence[_Event]


class _Plane(Protocol):
    """An `XPlane`: the events of all threads of a task, and their names."""

    lines: Sequence[_Line]
    event_metadata: Mapping[int, Any]
    stat_metadata: Mapping[int, Any]


@dataclass(frozen=True)
class Operation:
    """An operation of an execution, or the time in which one waits.

    Attributes:
        kind: its type, such as `"MutexLock"`.
        begin: the time of its begin, in nanoseconds on the clock of its task.
    """

    name: str
    kind: str
    begin: float
    end: float
    execution: int


@dataclass
class TaskEvents:
    """The events of one task while it was recorded."""

    # The time at which the recording begins, in nanoseconds on the clock of the task; None if
    # it is not known.
    begin: float | None = None
    # The time at which it ends.
    end: float | None = None
    # The operations that ran.
    operations: list[Operation] = field(default_factory=list)
    # The operations that waited, from their start until they were done.
    waits: list[Operation] = field(default_factory=list)
    # The executions that began during the recording.
    begun: set[int] = field(default_factory=set)
    # The function call that began an execution, by execution.
    callers: dict[int, tuple[int, str]] = field(default_factory=dict)
    # The functions that the task's Python code called: name, begin and end.
    calls: list[tuple[str, float, float]] = field(default_factory=list)
    # Whether a GPU computed.
    has_gpu: bool = False

    @classmethod
    def read(cls, content: bytes) -> TaskEvents:
        """Return the events in a serialized `XSpace`, the content of a `.xplane.pb` file."""
        events = cls()
        space = _compat.XSpace.FromString(content)
        for plane in space.planes:
            if plane.name == "Task Environment":
                stats = _stats(plane, plane.stats)
                events.begin = stats.get("profile_start_time")
                events.end = stats.get("profile_stop_time")
            events.has_gpu |= plane.name.startswith("/device:GPU") and bool(plane.lines)
        origin = events.begin or 0
        for plane in space.planes:
            if plane.name == "/host:CPU":
                _Reader(plane, origin, events).read()
        events.operations.sort(key=lambda operation: operation.begin)
        events.waits.sort(key=lambda wait: wait.begin)
        return events


class _Reader:
    """Reads the events of the threads of a task."""

    def __init__(self, plane: _Plane, origin: float, events: TaskEvents) -> None:
        self._plane = plane
        self._origin = origin
        self._events = events
        self._names = {key: value.name for key, value in plane.event_metadata.items()}
        self._starts: dict[tuple[int, str], list[tuple[float, str]]] = defaultdict(list)
        self._dones: dict[tuple[int, str], list[float]] = defaultdict(list)

    def read(self) -> None:
        """Read all threads."""
        for line in self._plane.lines:
            self._read_thread(line)
        waits = self._events.waits
        for (execution, name), starts in self._starts.items():
            # In a loop an operation starts more than once; each time it ends before the next start.
            for (begin, kind), end in zip(
                sorted(starts), self._done_after(execution, name, starts), strict=False
            ):
                waits.append(Operation(name, kind, begin, end, execution))

    def _done_after(
        self, execution: int, name: str, starts: list[tuple[float, str]]
    ) -> Iterator[float]:
        # An operation that started before the recording has an end without a start.
        first = min(begin for begin, _ in starts)
        return (end for end in sorted(self._dones[execution, name]) if end >= first)

    def _read_thread(self, line: _Line) -> None:
        # Times of events count from the line's begin, which counts from the recording's begin.
        origin = self._origin + line.timestamp_ns
        inside: list[tuple[float, int, str]] = []
        for event in sorted(line.events, key=lambda entry: (entry.offset_ps, -entry.duration_ps)):
            begin = origin + event.offset_ps / 1e3
            end = begin + event.duration_ps / 1e3
            while inside and inside[-1][0] <= begin:
                inside.pop()
            name = self._names[event.metadata_id]
            if name in (_PROCESS, _START, _DONE, _RUN, _EXECUTE):
                self._read_known(name, event, begin, end, inside)
            elif inside and (match := _OPERATION.match(name)) is not None:
                self._events.operations.append(
                    Operation(match["name"], match["kind"], begin, end, inside[-1][1])
                )

    def _read_known(
        self,
        name: str,
        event: _Event,
        begin: float,
        end: float,
        inside: list[tuple[float, int, str]],
    ) -> None:
        stats = _stats(self._plane, event.stats)
        if name == _PROCESS:
            inside.append((end, stats["id"], ""))
        elif name == _START:
            key = stats["step_id"], stats["name"]
            self._starts[key].append((begin, stats["kernel_type"]))
            inside.append((end, *key))
        elif name == _DONE:
            self._dones[stats["step_id"], stats["name"]].append(begin)
        elif name == _RUN:
            self._events.begun.add(stats["id"])
            _, execution, caller = inside[-1] if inside else (end, 0, "")
            if caller:
                self._events.callers[stats["id"]] = execution, caller
        elif name == _EXECUTE and stats.get("is_func"):
            called = str(stats.get("eager_op", ""))
            match = _FUNCTION.match(called)
            self._events.calls.append((called if match is None else match["name"], begin, end))


def _stats(plane: _Plane, stats: Iterable[_Stat]) -> dict[str, Any]:
    found = {}
    for stat in stats:
        kind = stat.WhichOneof("value") or ""
        value: Any = getattr(stat, kind, None)
        if kind == "ref_value":
            value = plane.stat_metadata[value].name
        found[plane.stat_metadata[stat.metadata_id].name] = value
    return found
