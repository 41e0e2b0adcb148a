"""Gives advice on making a run faster, from the numbers of its status."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kerasps.monitoring.status import RunStatus

# With two workers on two cores, ten steps per execution made `fit` faster: 2.7 times if a worker
# took 4.2 ms for a step, 2.2 times at 6 ms, 1.35 at 12 ms, and 1.2 at 38 ms. With one worker, for
# which executions queue up, nothing was gained.
SHORT_EXECUTION_S = 0.01
STEPS_PER_EXECUTION = 10
# If a worker waits less than this share of its time for the coordinator, longer executions gain
# little.
WAITING_SHARE = 0.2
# Python runs one thread at a time, so the coordinator's process cannot use much more than this.
BUSY_CPU = 0.9
# The rates of a shorter run say only how it started.
LEAST_SECONDS = 5.0


def advice_for(status: RunStatus, execution_steps: int) -> tuple[str, ...]:
    """Return advice on making a run faster, each a sentence with the number that it follows from.

    Args:
        status: the status of the run.
        execution_steps: the steps of an execution; 0 if none is done yet.
    """
    working = [worker.steps_per_second for worker in status.workers if worker.steps_per_second]
    # A worker that drives its own steps does not wait for a coordinator.
    if status.coordinator is None or len(working) < 2 or status.seconds < LEAST_SECONDS:
        return ()
    if not 0 < execution_steps < STEPS_PER_EXECUTION:
        return ()
    duration = execution_steps * len(working) / sum(working)
    is_busy = status.coordinator.cpu >= BUSY_CPU
    if duration > SHORT_EXECUTION_S and not is_busy:
        return ()
    why = (
        "the coordinator's process uses a whole core"
        if is_busy
        else f"the coordinator orders each execution, which takes a worker {1000 * duration:.1f} ms"
    )
    return (
        f"Compile the model with steps_per_execution={STEPS_PER_EXECUTION} or more: {why}. Batch "
        "callbacks are then called once for each execution.",
    )
