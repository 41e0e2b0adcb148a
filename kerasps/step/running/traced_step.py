"""A traced step of a model (to train, test or predict), and the step graphs that executions run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.runtime.calls import call_flat
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.fetching import fetch, sent
from kerasps.runtime.graph_optimizer import optimizing
from kerasps.step.compute.derived_logs import DerivedLog
from kerasps.step.compute.methods import ModelMethod
from kerasps.step.compute.returned import MetricResult
from kerasps.step.contract.host import StepHost
from kerasps.step.running.kept_graphs import KEPT_GRAPHS
from kerasps.step.tracing.device_plans import DevicePlans
from kerasps.step.tracing.runners import Runner
from kerasps.step.tracing.state import Header, Ticket, WorkerVariables
from kerasps.step.tracing.step_graph import build_step_graph
from kerasps.step.tracing.surroundings import FitSurroundings
from kerasps.step.tracing.tracer import Tracer
from kerasps.step.tracing.traffic import StepTraffic
from kerasps.variables import ParameterServerVariable


@dataclass(frozen=True)
class ExecutionResult:
    """The results of one or more executions on a worker."""

    steps: int  # the number of steps that were done
    metrics: list[np.ndarray]  # the metric states of these steps alone
    # The number of rows read of each shard of a table, in one array; empty without tables.
    rows: list[np.ndarray]
    logs: dict[str, np.ndarray]  # the logs of the last step, except the metrics
    outputs: list[Any]  # the predictions of each step
    # The time of the call that fetched them; None if it ran steps, too.
    call_seconds: float | None = None


@dataclass
class StepTiming:
    """The number of steps that were done, and the time that one takes on a worker."""

    epochs: int = 0
    steps: int = 0
    # The shortest measured time per step, in seconds; infinite before the first.
    seconds: float = math.inf


class TracedStep:
    """A traced step of a model, and the step graphs that were built from it.

    Args:
        method: the method of the model to trace: `"train_step"`, `"test_step"` or
            `"predict_step"`.
        fused: whether small variables are fused between `load` and `store` (`FusedVariables`):
            steps are faster, flights start more slowly.
        device: the device that computes, in short ("GPU:0"); `trace_for` adds others.
        known: another step of the model, which saves traces; None for none.
    """

    def __init__(
        self,
        model: keras.Model,
        host: StepHost,
        element_spec: object,
        method: str,
        *,
        fused: bool,
        device: str,
        known: TracedStep | None = None,
    ) -> None:
        self._model = model
        self._fused = fused
        self._element_spec = element_spec
        self._lock = threading.Lock()
        self._step_graphs: dict[Any, Any] = {}
        self._tracer: Tracer = Tracer(
            ModelMethod(model, method),
            FitSurroundings(host),
            host,
            element_spec,
            fused=fused,
            known=None if known is None else known._tracer,
        )
        self.plans = DevicePlans(self._tracer, device)  # its plans, by the devices that compute
        self._trace = self.plans.trace
        self._plan = self._trace.plan
        # The metric states, in the order of `ExecutionResult.metrics`, and how they are joined.
        self.metrics, self.joins = self._plan.metrics, self._plan.joins
        # The states of the seed generators that a step draws from, in the order of the header, and
        # the number of seeds that it draws from each.
        self.seeds, self.seeds_per_step = self._plan.seeds, self._plan.draws
        # Whether the step returns the model's metrics: then the merged states of all workers
        # replace the last step's logs.
        self.logs_are_metrics = self._trace.logs_are_metrics
        # Those of the other logs that are, or follow from, results of metrics, by name.
        self.results: dict[str, MetricResult | DerivedLog] = self._trace.results
        # The limits on the number of steps in an execution.
        self.limits = self._plan.limits
        # The devices of the ps that a step pushes to, and how they update.
        self.devices, self.rule = self._plan.push.devices, self._plan.push.rule
        self._variables = WorkerVariables(self._plan.state, len(self.devices), self.joins)
        self._state = _state_of(model)
        # Steps of the model in the same mode for other batches, the last used one first.
        self.earlier: list[TracedStep] = []
        # Updated by the code that drives the step.
        self.timing = StepTiming()

    def serves(self, element_spec: object | None, *, fused: bool) -> bool:
        """Return True if this step can take batches of `element_spec`, or some if that is None.

        False once the model's variables change. A step made without fused variables does not serve
        a caller that wants them; one made with them serves both.
        """
        is_fast = self._fused or not fused
        is_for_batches = element_spec is None or self._element_spec == element_spec
        is_current = self._state == _state_of(self._model) and self._plan.lookup_tables.are_current
        return bool(is_fast and is_for_batches and is_current)

    @property
    def variables(self) -> list[ParameterServerVariable]:
        """All variables that a step touches, except the states of metrics."""
        inventory = self._plan.inventory
        groups = [inventory.pulled, inventory.tables, inventory.optimizer_state, inventory.seeds]
        return [variable for group in groups for variable in group]

    @property
    def traffic(self) -> StepTraffic:
        """The traffic of each step, per ps."""
        return self._plan.traffic

    def step_graph(
        self,
        source_spec: tf.data.IteratorSpec | None,
        num_steps: int,
        *,
        checked: bool,
        runner: Runner,
        is_redone: bool = False,
        devices: Sequence[str],
        replicas: int = 1,
    ) -> Any:
        """Return the step graph of an execution of `num_steps` batches: a concrete function.

        The first call for given arguments builds it. Thread: any.

        Args:
            source_spec: the `tf.data.IteratorSpec` of the worker's iterator; None for a list of
                batches.
            checked: whether the data may end within the execution.
            is_redone: whether it skips pushes that the ticket lists as applied before; others push
                every step.
            devices: the devices that compute; the step must be traced for them (see `plans`).
            replicas: the number of batches that a step takes, each on another device, as
                `plans.num_replicas` returned it. Left-over batches are taken one by one.
        """
        plan = self.plans.plan_for(min(replicas, num_steps), replicas, tuple(devices))
        key = (source_spec, num_steps, checked, runner, is_redone, id(plan))
        with self._lock:
            if key not in self._step_graphs:
                spec = [self._element_spec] * num_steps if source_spec is None else source_spec
                with optimizing():
                    built = build_step_graph(
                        plan.redoing if is_redone else plan,
                        spec,
                        num_steps,
                        checked=checked,
                        variables=self._variables,
                        runner=runner,
                    )
                self._step_graphs[key] = KEPT_GRAPHS.shared(built)
            return self._step_graphs[key]

    def load(self) -> None:
        """Copy small variables into the fused variables.

        Call in a flight, before the first execution is sent.
        """
        self._plan.fused.load()

    def store(self) -> None:
        """Copy the fused variables back into the small variables.

        Call in a flight, after `load`, when nothing is in flight. Until then, `variable.value` is
        stale.
        """
        self._plan.fused.store()

    def start(self, lane: int) -> list[tf.Tensor]:
        """Make the worker on whose device this runs ready for executions.

        Fills its lookup tables and sets the lane of its pushes (see `variables.Fences`). Returns
        the handles of the variables that the worker keeps, for all calls below.
        """
        self._plan.lookup_tables.bring()
        ticket = Ticket(lane, [0] * len(self.devices))
        return call_flat(self._variables.make, [sent(tf.constant(ticket.to_array()))])

    def give_ticket(self, handles: list[tf.Tensor], ticket: Ticket) -> None:
        """Set `ticket` for the worker on whose device this runs.

        Call when no execution runs there.
        """
        # A flat call: if the worker is lost, TensorFlow's check of a structured argument ends in an
        # error that does not say so.
        call_flat(self._variables.give, [*handles, sent(tf.constant(ticket.to_array()))])

    def run(
        self,
        graph: tf.types.experimental.ConcreteFunction,
        handles: list[tf.Tensor] | None,
        source: tf.Tensor | Sequence[object],
        header: Header,
    ) -> ExecutionResult:
        """Run a step graph on the current device, and return its result.

        Args:
            handles: the handles from `start`; None on the coordinator.
            source: the resource of the worker's iterator, or a list of batches.
        """
        returned = self.advance(graph, handles, source, header)
        if not self._plan.outputs:
            return self._result(returned)
        flats, leaves, sizes = returned
        result = self._result(flats)
        # Steps without data have no predictions.
        return replace(result, outputs=self._outputs_of_steps(leaves, sizes)[: result.steps])

    def advance(
        self,
        graph: tf.types.experimental.ConcreteFunction,
        handles: list[tf.Tensor] | None,
        source: tf.Tensor | Sequence[object],
        header: Header,
    ) -> Any:
        """Run a step graph, and return its outputs.

        One that adds its state to the worker's totals has none; `collect` returns the totals.
        """
        headers = [self._header(header)] if self.seeds else []
        with optimizing():
            if isinstance(source, list):
                return graph(*([] if handles is None else [handles]), sent(source), *headers)
            outputs = call_flat(graph, [*(handles or []), source, *headers])
        if not self._plan.outputs:
            return outputs
        return tf.nest.pack_sequence_as(graph.structured_outputs, outputs, expand_composites=True)

    def _header(self, header: Header) -> tf.Tensor:
        packed = header.to_bytes()
        if not self.rule.waits:
            return tf.constant(packed)
        # Made on a worker, the constant would be waited for with Python's lock held, behind
        # executions that wait for other workers, whose steps other threads of Python send.
        with tf.device(COORDINATOR_CPU):
            return tf.constant(packed)

    def collect(self, handles: list[tf.Tensor]) -> ExecutionResult:
        """Return and clear the totals of the worker on whose device this runs."""
        began = time.monotonic()
        result = self._result(self._variables.collect(handles))
        return replace(result, call_seconds=time.monotonic() - began)

    def _outputs_of_steps(self, leaves: list[tf.Tensor], sizes: tf.Tensor) -> list[Any]:
        """Return the predictions of each step, given the outputs of a step graph."""
        structure = self._trace.predicted
        if not self._plan.joins_outputs:
            return [_to_numpy(tf.nest.pack_sequence_as(structure, leaves, expand_composites=True))]
        lengths, *values = fetch([sizes, *leaves])
        ends = np.cumsum(lengths, axis=0)[:-1]
        of_steps = [np.split(value, ends[:, i]) for i, value in enumerate(values)]
        return [tf.nest.pack_sequence_as(structure, step) for step in zip(*of_steps, strict=True)]

    def _result(self, flats: list[tf.Tensor]) -> ExecutionResult:
        state = self._plan.state.unpack_numpy(fetch(flats))
        return ExecutionResult(
            steps=int(state.steps),
            metrics=state.metrics,
            rows=state.rows,
            logs=dict(zip(self._plan.log_names, state.logs, strict=True)),
            outputs=[],
        )


def _state_of(model: keras.Model) -> list[tuple[int, bool]]:
    """Return the model's variables, and which of them are trained: a trace depends on both."""
    return [(id(v), v.trainable) for v in model.variables]


def _to_numpy(structure: object) -> Any:
    return tf.nest.map_structure(
        lambda t: fetch([t])[0] if isinstance(t, tf.Tensor) else t, structure
    )
