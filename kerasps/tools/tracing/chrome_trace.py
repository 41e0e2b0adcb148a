"""Writes a trace in the format of Chrome's tracing, which Perfetto reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerasps.tools.tracing.intervals import Interval
from kerasps.tools.tracing.limits import Limits
from kerasps.tools.tracing.steps import Task, WorkerStep
from kerasps.tools.tracing.task_events import TaskEvents

# The order of tasks in the view.
_JOBS = ("chief", "worker", "ps")
# The order of a task's tracks.
_ORDER = {"data": 1, "pull": 2, "lock": 3, "compute": 4, "push": 5}
_NAMES = {"chief": "coordinator", "worker": "worker", "ps": "ps"}


class ChromeTrace:
    """The content of a trace file: a process for each task, and in it a track for each phase."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._events: list[dict[str, Any]] = []
        # For each track, the ends of the last events in its lanes.
        self._lanes: dict[tuple[int, str], list[float]] = {}
        self._tracks: dict[tuple[int, str, int], int] = {}

    def add_process(self, pid: int, name: str) -> None:
        """Add a process, which is a task."""
        self._add_metadata(pid, 0, "process_name", {"name": name})
        self._add_metadata(pid, 0, "process_sort_index", {"sort_index": pid})

    def add(self, pid: int, track: str, name: str, time: Interval, **args: object) -> None:
        """Add an event to a track. Overlapping events of a track are in lanes below each other.

        Call in the order of beginnings.
        """
        begin, end = time
        # In whole nanoseconds, so that events that do not overlap do not overlap in the file.
        first, last = round(begin - self._origin), round(end - self._origin)
        lanes = self._lanes.setdefault((pid, track), [])
        lane = next((i for i, until in enumerate(lanes) if until <= begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        tid = self._tracks.get((pid, track, lane))
        if tid is None:
            tid = self._tracks[pid, track, lane] = len(self._tracks) + 1
            self._add_metadata(pid, tid, "thread_name", {"name": track})
            order = _ORDER.get(track.partition(" ")[0], 0)
            self._add_metadata(pid, tid, "thread_sort_index", {"sort_index": order * 100 + lane})
        self._events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": name,
                "ts": first / 1e3,
                "dur": (last - first) / 1e3,
                "args": args,
            }
        )

    def _add_metadata(self, pid: int, tid: int, name: str, args: Mapping[str, object]) -> None:
        self._events.append({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args})

    def write(self, path: Path, about: Mapping[str, object]) -> None:
        """Write the file, compressed if its name ends in `.gz`."""
        content = json.dumps(
            {"displayTimeUnit": "ms", "traceEvents": self._events, "otherData": about}
        ).encode()
        if path.suffix == ".gz":
            content = gzip.compress(content, 6)
        # Renamed when it is complete.
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(content)
        part.replace(path)


def write_trace(
    path: Path,
    events: Mapping[Task, TaskEvents],
    steps: Sequence[WorkerStep],
    limits: Limits,
    *,
    addresses: Mapping[Task, str],
    missing: Mapping[Task, str],
    moves: Mapping[Task, float],
) -> None:
    """Write the events of the tasks for some steps."""
    begins = [step.waited_from for step in steps]
    begins += [
        task_events.begin
        for task_events in events.values()
        if task_events.begin is not None and not steps
    ]
    first = min(begins, default=0.0)
    last = max((_end(step) for step in steps), default=float("inf"))
    trace = ChromeTrace(first)
    pids = _pids(addresses)
    for task, pid in pids.items():
        lacks = f", missing: {missing[task]}" if task in missing else ""
        trace.add_process(pid, f"{_NAMES[task[0]]} {task[1]} ({addresses[task]}{lacks})")
    _add_calls(trace, events, pids, (first, last))
    _add_steps(trace, steps, pids)
    trace.write(
        path,
        {
            "limit": limits.sentence,
            "shares": {f"worker {worker}": share for worker, share in limits.shares.items()},
            "steps": len(steps),
            "missing": {f"{job} {index}": why for (job, index), why in missing.items()},
            "clocks_moved_ms": {
                f"{job} {index}": by / 1e6 for (job, index), by in moves.items() if by
            },
        },
    )


def _pids(tasks: Iterable[Task]) -> dict[Task, int]:
    known = sorted(tasks, key=lambda task: (_JOBS.index(task[0]), task[1]))
    return {task: number for number, task in enumerate(known, 1)}


def _end(step: WorkerStep) -> float:
    pushes = [done.push[1] for done in step.on_ps.values() if done.push is not None]
    return max([step.push[1], *pushes])


def _add_calls(
    trace: ChromeTrace,
    events: Mapping[Task, TaskEvents],
    pids: Mapping[Task, int],
    window: Interval,
) -> None:
    for task, task_events in events.items():
        if task[0] == "chief":
            for name, begin, end in sorted(task_events.calls, key=lambda call: call[1:]):
                if begin < window[1] and end > window[0]:
                    time = max(begin, window[0]), min(end, window[1])
                    trace.add(pids[task], "calls", name, time)


def _add_steps(trace: ChromeTrace, steps: Sequence[WorkerStep], pids: Mapping[Task, int]) -> None:
    rows: list[tuple[Interval, int, str, str, dict[str, object]]] = []
    for number, step in enumerate(steps):
        worker = step.worker
        args: dict[str, object] = {"step": number, "worker": worker}
        pid = pids["worker", worker]
        if step.data is not None:
            rows.append((step.data, pid, "data", "data", args))
        for phase in ("pull", "compute", "push"):
            rows.append((getattr(step, phase), pid, phase, phase, args))
        for ps, done in step.on_ps.items():
            for phase in ("pull", "lock", "push"):
                time = getattr(done, phase)
                if time is not None:
                    track = f"{phase} of worker {worker}"
                    rows.append((time, pids["ps", ps], track, phase, args))
    for time, pid, track, name, args in sorted(rows, key=lambda row: row[0]):
        trace.add(pid, track, name, time, **args)
