"""Finds what limits a training: a sentence, and the shares of time that it follows from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kerasps.tools.monitoring.advice import execution_advice
from kerasps.tools.tracing.intervals import Interval, both, length, union, without
from kerasps.tools.tracing.steps import WorkerStep

# The activities and waits of a worker, each with its sentence.
_SENTENCES = {
    "compute": "Worker {worker} computes {share:.0%} of the time.",
    "push": "Worker {worker} packs and sends its pushes {share:.0%} of the time.",
    "data": "Worker {worker} waits for data {share:.0%} of the time.",
    "lock": "Worker {worker} waits for the lock of ps {ps} {share:.0%} of the time.",
    "update": "Worker {worker} waits {share:.0%} of the time until ps {ps} has applied its "
    "updates.",
    "pull": "Worker {worker} waits for values from the ps {share:.0%} of the time.",
    "coordinator": "Worker {worker} waits for the coordinator {share:.0%} of the time.",
}
_WITHOUT_COORDINATOR = "Worker {worker} is between its executions {share:.0%} of the time."


@dataclass(frozen=True)
class Limits:
    """The shares of the time of each worker, and what limits the training."""

    shares: dict[int, dict[str, float]]
    sentence: str
    remedy: str = ""


def find_limits(
    steps: Sequence[WorkerStep],
    *,
    has_coordinator: bool = True,
    execution_steps: int = 1,
    reads: Sequence[Interval] = (),
) -> Limits:
    """Return the shares of the workers' time in these steps, and what limits them.

    Args:
        has_coordinator: whether workers wait for a coordinator between executions.
        reads: the times in which the coordinator read data for the workers.
    """
    by_worker: dict[int, list[WorkerStep]] = defaultdict(list)
    for step in steps:
        by_worker[step.worker].append(step)
    shares = {}
    for worker, worker_steps in sorted(by_worker.items()):
        times = _activities(worker_steps)
        total = sum(length(time) for time in times.values())
        shares[worker] = {
            name: length(time) / total if total else 0.0 for name, time in times.items()
        }
    if not shares:
        return Limits({}, "")
    activity = max(_SENTENCES, key=lambda name: sum(share[name] for share in shares.values()))
    worker = max(shares, key=lambda index: shares[index][activity])
    text = _SENTENCES[activity]
    if activity == "coordinator" and not has_coordinator:
        text = _WITHOUT_COORDINATOR
    sentence = text.format(
        worker=worker, share=shares[worker][activity], ps=_slowest_ps(by_worker[worker], activity)
    )
    remedy = ""
    if has_coordinator:
        # A worker that waits for another one waits longer than that one, so take the least.
        waiting = min(_waiting(worker_steps, reads) for worker_steps in by_worker.values())
        remedy = execution_advice(execution_steps, waiting)
    return Limits(shares, sentence, remedy)


def _waiting(steps: Sequence[WorkerStep], reads: Sequence[Interval]) -> float:
    """Return the share of a worker's time that it waits for a coordinator that reads no data."""
    times = _activities(steps)
    total = sum(length(time) for time in times.values())
    return length(without(times["coordinator"], union(reads))) / total if total else 0.0


def _activities(steps: Sequence[WorkerStep]) -> dict[str, list[Interval]]:
    """Return the time of each activity of one worker, from its first step to its last one."""
    steps = sorted(steps, key=lambda step: step.compute)
    window = [(steps[0].waited_from, max(step.push[1] for step in steps))]
    executions = both(window, union(step.execution for step in steps))
    found = {"coordinator": without(window, executions)}
    left = executions
    for name, time in _by_precedence(steps).items():
        found[name] = both(left, time)
        left = without(left, time)
    # The rest is time in flight: between the ps and the worker, or between the worker's threads.
    found["pull"] = left
    return found


def _by_precedence(steps: Sequence[WorkerStep]) -> Mapping[str, list[Interval]]:
    """Return the time of each activity; if two overlap, the first one counts."""
    served = [done for step in steps for done in step.on_ps.values()]
    locks = union(done.lock for done in served if done.lock is not None)
    pushes = union(done.push for done in served if done.push is not None)
    return {
        "compute": union(step.compute for step in steps),
        "push": union(step.push for step in steps),
        "data": union(wait for step in steps if (wait := _data_waited_for(step)) is not None),
        "lock": locks,
        "update": without(pushes, locks),
    }


def _data_waited_for(step: WorkerStep) -> Interval | None:
    """Return the time when the step waited only for its batch."""
    if step.data is None:
        return None
    begin, end = max(step.data[0], step.waited_from), min(step.data[1], step.compute[0])
    # A value that arrived before the data did not delay the step. A value that arrived later, and
    # was asked for earlier, did, unless other values arrived before the data: then it holds rows,
    # which a worker asks for when it has the data.
    before = [time for time in step.arrivals if time < end]
    begin = max([begin, *before])
    pull_begin, pull_end = step.pull
    if not before and pull_begin < end < pull_end:
        end = pull_begin
    return (begin, end) if begin < end else None


def _slowest_ps(steps: Sequence[WorkerStep], activity: str) -> int:
    times: dict[int, float] = defaultdict(float)
    for step in steps:
        for ps, done in step.on_ps.items():
            time = done.lock if activity == "lock" else done.push
            times[ps] += 0.0 if time is None else time[1] - time[0]
    return max(times, key=lambda ps: times[ps], default=0)
