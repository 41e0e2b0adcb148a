"""Gives advice on making a run faster, from the share of time that workers wait.

One rule decides it for a status, a trace and a plan. Each knows the share in its own way: a trace
measures it on the workers, a status compares a measured call with the time of an execution, and a
plan assumes the time of a call.
"""

from __future__ import annotations

from kerasps.tools.monitoring.status import RunStatus

# With two workers on two cores, ten steps per execution made `fit` faster: 2.7 times if a worker
# took 4.2 ms for a step, 2.2 times at 6 ms, 1.35 at 12 ms, and 1.2 at 38 ms. With one worker, for
# which executions queue up, nothing was gained.
STEPS_PER_EXECUTION = 10
# What an execution costs beside its steps, in seconds: that of two workers on two cores.
EXECUTION_S = 2.5e-3
# The part of this in the time of a call that fetches results. Where traces measured waits of 50%,
# 29% and 11%, that call took 97%, 44% and 17% of the time of an execution.
_OF_A_CALL = 0.6
# If a worker waits less than this share of its time for the coordinator, longer executions gain
# little.
_WAITING_SHARE = 0.2
# The rates of a shorter run say only how it started.
LEAST_SECONDS = 5.0


def are_too_short(execution_steps: int, waiting: float) -> bool:
    """Return whether longer executions would make a worker faster."""
    return 0 < execution_steps < STEPS_PER_EXECUTION and waiting >= _WAITING_SHARE


def worth_below(call_s: float) -> float:
    """Return the time of an execution, in seconds, below which longer ones make a run faster."""
    return call_s / _WAITING_SHARE


def execution_advice(execution_steps: int, waiting: float) -> str:
    """Return the advice to make executions longer; empty if that would gain little.

    Args:
        execution_steps: the steps of an execution; 0 if none is done yet.
        waiting: the least share of its time that a worker waits for the coordinator.
    """
    if not are_too_short(execution_steps, waiting):
        return ""
    return (
        f"Compile the model with steps_per_execution={STEPS_PER_EXECUTION} or more: each worker "
        f"waits for the coordinator some {waiting:.0%} of the time. Batch callbacks are then "
        "called once for each execution."
    )


def advice_for(
    status: RunStatus, execution_steps: int, call_s: float | None = None
) -> tuple[str, ...]:
    """Return advice on making a run faster, with the number that each follows from."""
    working = [worker.steps_per_second for worker in status.workers if worker.steps_per_second]
    # A worker that drives its own steps does not wait for a coordinator.
    if status.coordinator is None or len(working) < 2 or status.seconds < LEAST_SECONDS:
        return ()
    executions_per_second = sum(working) / len(working) / max(execution_steps, 1)
    execution_s = EXECUTION_S if call_s is None else _OF_A_CALL * call_s
    waiting = min(1.0, execution_s * executions_per_second)
    advice = execution_advice(execution_steps, waiting)
    return (advice,) if advice else ()
