"""The ways to run an execution: each says where the ticket is from, and where the state goes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from kerasps.cluster.description.worker_devices import FIRST_CPU
from kerasps.step.tracing.plan import StepPlan
from kerasps.step.tracing.state import WorkerVariables

Steps = Callable[..., Any]


class Runner(Protocol):
    """Wraps the function that does an execution's steps into the function that the caller calls."""

    copies_tables: bool  # whether a step reads copies of lookup tables that were sent to the runner
    inlines: bool  # whether TensorFlow may inline the steps into the function around them

    def function(
        self, steps: Steps, plan: StepPlan, variables: WorkerVariables, arguments: Sequence[object]
    ) -> tf.types.experimental.ConcreteFunction:
        """Return the function of an execution."""


class _ReturningWorker:
    """A worker that returns the state of each execution (see `Runner`)."""

    copies_tables = True
    inlines = True

    def function(
        self, steps: Steps, plan: StepPlan, variables: WorkerVariables, arguments: Sequence[object]
    ) -> tf.types.experimental.ConcreteFunction:
        @on_cpu
        def on_worker(handles: list[tf.Tensor], *given: object) -> Any:
            return steps(variables.ticket(handles), *given)

        function = tf.function(on_worker, autograph=False)
        return function.get_concrete_function(variables.handle_specs, *arguments)


class _CollectingWorker:
    """A worker that adds the state of each execution to its totals (see `Runner`)."""

    copies_tables = True
    # A graph that returns nothing is not optimized, so the steps stay a function.
    inlines = False

    def function(
        self, steps: Steps, plan: StepPlan, variables: WorkerVariables, arguments: Sequence[object]
    ) -> tf.types.experimental.ConcreteFunction:
        @on_cpu
        def into_totals(handles: list[tf.Tensor], *given: object) -> list[tf.Tensor]:
            flats = steps(variables.ticket(handles), *given)
            variables.add(handles, plan.state.unpack(flats))
            return []

        function = tf.function(into_totals, autograph=False)
        return function.get_concrete_function(variables.handle_specs, *arguments)


class _Alone:
    """The process that built the graph: a coordinator, or a worker that drives its own steps."""

    copies_tables = False
    inlines = True

    def function(
        self, steps: Steps, plan: StepPlan, variables: WorkerVariables, arguments: Sequence[object]
    ) -> tf.types.experimental.ConcreteFunction:
        @on_cpu
        def alone(*given: object) -> Any:
            return steps(variables.ticket_of_coordinator(), *given)

        return tf.function(alone, autograph=False).get_concrete_function(*arguments)


RETURNING_WORKER: Runner = _ReturningWorker()
COLLECTING_WORKER: Runner = _CollectingWorker()
ALONE: Runner = _Alone()


def on_cpu(body: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that adds the operations of `body` to a graph, on the task's CPU."""

    @functools.wraps(body)  # TensorFlow names the graph after it
    def placed(*arguments: object) -> Any:
        with tf.device(f"/device:{FIRST_CPU}"):
            return body(*arguments)

    return placed
