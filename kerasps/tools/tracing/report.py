"""Writes the files of a trace from the tasks' recordings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kerasps.tools.tracing.chrome_trace import write_trace
from kerasps.tools.tracing.clocks import aligned
from kerasps.tools.tracing.limits import find_limits
from kerasps.tools.tracing.recording import Recording
from kerasps.tools.tracing.steps import Task, WorkerStep, find_steps, reads_of_data
from kerasps.tools.tracing.task_events import TaskEvents

# The directory of recordings for TensorBoard's profile page, below its log directory.
_PROFILES = Path("plugins", "profile")


@dataclass(frozen=True)
class Report:
    """A trace that was written."""

    # The file for Perfetto.
    file: Path
    num_steps: int
    # A sentence about what limits the training; empty if the trace holds no step.
    limit: str
    # For each worker, the share of its time for each activity.
    shares: dict[int, dict[str, float]]
    # The reason for each task that is missing in it.
    missing: dict[Task, str]
    # A sentence about what to change; empty if none is known.
    remedy: str = ""

    def __str__(self) -> str:
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        said = [f"Trace of {steps}: {self.file}."]
        said += [text for text in (self.limit, self.remedy) if text]
        said += [f"{job} {index} is missing: {why}." for (job, index), why in self.missing.items()]
        return " ".join(said)


def _chosen(steps: list[WorkerStep], num_steps: int | None) -> list[WorkerStep]:
    """Return consecutive steps, if possible from the first point at which all workers have some."""
    if num_steps is None or len(steps) <= num_steps:
        return steps
    firsts: dict[int, int] = {}
    for number, step in enumerate(steps):
        firsts.setdefault(step.worker, number)
    begin = min(max(firsts.values()), len(steps) - num_steps)
    return steps[begin : begin + num_steps]


def new_run(log_dir: Path) -> str:
    """Return an unused name for a recording in `log_dir`, made from the time."""
    now = datetime.now().strftime("%Y_%m_%d_%H_%M_%S")
    names = itertools.chain([now], (f"{now}_{number}" for number in itertools.count(1)))
    return next(name for name in names if not (log_dir / _PROFILES / name).exists())


def write_report(
    log_dir: Path,
    run: str,
    addresses: Mapping[Task, str],
    recording: Recording,
    num_steps: int | None,
) -> Report:
    """Write the files of a recording that has stopped."""
    folder = log_dir / _PROFILES / run
    folder.mkdir(parents=True, exist_ok=True)
    for (job, index), content in recording.contents.items():
        (folder / f"{job}-{index}.xplane.pb").write_bytes(content)
    read = {task: TaskEvents.read(content) for task, content in recording.contents.items()}
    events, moves = aligned(read, recording.asked)
    found = find_steps(events)
    steps = _chosen(found, num_steps)
    in_execution = Counter((step.worker, step.key[0]) for step in found)
    limits = find_limits(
        steps,
        has_coordinator=("chief", 0) in addresses,
        execution_steps=max(in_execution.values(), default=0),
        reads=reads_of_data(events.get(("chief", 0), TaskEvents())),
    )
    file = log_dir / f"trace_{run}.json.gz"
    write_trace(
        file,
        events,
        steps,
        limits,
        addresses=addresses,
        missing=recording.missing,
        moves=moves,
    )
    return Report(
        file, len(steps), limits.sentence, limits.shares, recording.missing, limits.remedy
    )
