"""The ways to run an execution: each says where the ticket is from, and where the state goes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.cluster.description.worker_devices import FIRST_CPU
from kerasps.step.tracing.plan import StepPlan
from kerasps.step.tracing.state import WorkerVariables

Steps = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Runner:
    """Wraps the function that does an execution's steps into the function that the caller calls."""

    # Returns the function to call, given that of the steps. On a worker, its first argument is the
    # handles of the worker's variables.
    wrap: Callable[[Steps, StepPlan, WorkerVariables], Callable[..., Any]]
    # Whether a worker runs it, which has variables, and copies of lookup tables, of the execution.
    is_on_worker: bool = True
    inlines: bool = True  # whether TensorFlow may inline the steps into the function around them

    def function(
        self, steps: Steps, plan: StepPlan, variables: WorkerVariables, arguments: Sequence[object]
    ) -> tf.types.experimental.ConcreteFunction:
        """Return the function of an execution."""
        handles = [variables.handle_specs] if self.is_on_worker else []
        function = tf.function(on_cpu(self.wrap(steps, plan, variables)), autograph=False)
        return function.get_concrete_function(*handles, *arguments)


def _returning(steps: Steps, _: StepPlan, variables: WorkerVariables) -> Callable[..., Any]:
    """Return the state of each execution."""

    def on_worker(handles: list[tf.Tensor], *given: object) -> Any:
        return steps(variables.ticket(handles), *given)

    return on_worker


def _collecting(steps: Steps, plan: StepPlan, variables: WorkerVariables) -> Callable[..., Any]:
    """Add the state of each execution to the worker's totals."""

    def into_totals(handles: list[tf.Tensor], *given: object) -> list[tf.Tensor]:
        flats = steps(variables.ticket(handles), *given)
        variables.add(handles, plan.state.unpack(flats))
        return []

    return into_totals


def _alone(steps: Steps, _: StepPlan, variables: WorkerVariables) -> Callable[..., Any]:
    """Run in the process that built the graph: a coordinator, or a worker that drives itself."""

    def alone(*given: object) -> Any:
        return steps(variables.ticket_of_coordinator(), *given)

    return alone


RETURNING_WORKER = Runner(_returning)
# A graph that returns nothing is not optimized, so the steps stay a function.
COLLECTING_WORKER = Runner(_collecting, inlines=False)
ALONE = Runner(_alone, is_on_worker=False)


def on_cpu(body: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that adds the operations of `body` to a graph, on the task's CPU."""

    @functools.wraps(body)  # TensorFlow names the graph after it
    def placed(*arguments: object) -> Any:
        with tf.device(f"/device:{FIRST_CPU}"):
            return body(*arguments)

    return placed
