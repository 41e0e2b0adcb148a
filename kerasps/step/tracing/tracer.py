"""Traces a step's method until all variables that the step touches are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.description.worker_devices import FIRST_CPU
from kerasps.errors import KeraspsError, UnsupportedError
from kerasps.inputs import has_loops, python_calls
from kerasps.step.changes.metric_joins import check_metrics
from kerasps.step.compute.compute import Compute
from kerasps.step.compute.derived_logs import DerivedLog, derived_logs
from kerasps.step.compute.methods import Method
from kerasps.step.compute.replicas import OnlyReplica, Replicas, mean_logs
from kerasps.step.compute.returned import MetricResult, Returned
from kerasps.step.compute.scalars import place_scalars
from kerasps.step.contract.compute_messages import ComputeInputs, ComputeOutputs
from kerasps.step.contract.host import StepHost
from kerasps.step.contract.inventory import Inventory
from kerasps.step.draws.seeded_draws import (
    count_of,
    is_count,
    repeats_draws,
    with_draws_of_step,
)
from kerasps.step.phases.compute_phase import ComputePhase
from kerasps.step.phases.pull import PullPhase
from kerasps.step.phases.push import PushPhase
from kerasps.step.phases.push_message import StepChanges
from kerasps.step.phases.update_rules import UpdateRule
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.rows.groups import grouping
from kerasps.step.rows.lookups import MustReadWhole, Round, plan_rounds
from kerasps.step.tracing.plan import StepPlan
from kerasps.step.tracing.surroundings import Surroundings
from kerasps.step.updates.fused import FusedVariables
from kerasps.step.updates.optimizers import check_updates_by_rows
from kerasps.variables import (
    LookupTables,
    ParameterServerVariable,
    entering,
)
from kerasps.variables.keras.joins import Join
from kerasps.variables.keras.slots import move_slots
from kerasps.variables.storage.named import HandleFinder

# The most traces of a step; each trace can only add to the inventory, and two are usual.
MAX_TRACES = 8


@dataclass(frozen=True)
class Trace:
    """A step as it was traced."""

    plan: StepPlan  # all that a step graph needs to know
    # The predictions of the step, as tensors of the trace; [] if it predicts nothing.
    predicted: Any
    logs_are_metrics: bool  # whether the step returned the model's metrics and nothing else
    # Those of the other logs that are, or follow from, results of metrics.
    results: dict[str, MetricResult | DerivedLog]


class _Call(NamedTuple):
    """A call of the method in a trace."""

    phases: list[Compute]  # the compute phase of each replica
    returned: list[Returned]  # the results of each replica
    outputs: ComputeOutputs  # the tensors that leave the step
    # Returns the replica of an operation, by its place in the graph.
    replica_of: Callable[[int], int]


class Tracer:
    """Traces a step."""

    def __init__(
        self,
        method: Method,
        surroundings: Surroundings,
        host: StepHost,
        element_spec: object,
        *,
        fused: bool,
        known: Tracer | None = None,
    ) -> None:
        self._host = host
        self._element_spec = element_spec
        self._method = method
        self._surroundings = surroundings
        self._fused = fused
        self._inventory = Inventory(host.options.table_min_bytes)
        self._known = None if known is None else known._inventory
        self._fused_variables: FusedVariables | None = (
            None if known is None else known._fused_variables
        )
        self._has_loops: bool = known is not None and known._has_loops
        self._has_gpu: bool | None = None

    def trace(self, device: str, *, has_gpu: bool | None = None) -> Trace:
        """Trace until a trace meets nothing new.

        Args:
            has_gpu: whether the step may use kernels that only a GPU has. Default: True if the
                device is a GPU.

        Raises KeraspsError if more than `MAX_TRACES` traces are needed.
        """
        if has_gpu is not None:
            self._has_gpu = has_gpu
        self._add_expected()
        for _ in range(MAX_TRACES):
            self._inventory.grew = False
            self._settle_optimizers()
            try:
                trace = self._trace_once([device])
            except Exception:
                # A trace that met something new may fail because of it (a value assigned in a loop,
                # read outside); the next one may succeed.
                if not self._inventory.grew:
                    raise
                continue
            if trace is not None:
                return trace
        raise KeraspsError(
            f"{self._method.name}{self._method.whose} touched new variables in each of "
            f"{MAX_TRACES} traces. Expected: the same variables in each call. Create variables in "
            "`build`, or before, and not in each call."
        )

    def trace_for(
        self, devices: Sequence[str], known: StepPlan, single: StepPlan | None = None
    ) -> StepPlan:
        """Trace once more, for other devices, and return the plan. Call after `trace`.

        Raises UnsupportedError if the step cannot run on these devices.
        """
        if self._method.jit_compile and len(devices) > 1:
            raise UnsupportedError(
                "XLA compiles a step for one device, and the workers use several. Expected: "
                "jit_compile=False, or one device per worker. Received: jit_compile=True with "
                f'{", ".join(devices)}. Give `jit_compile=False` or "auto" to `compile`, or one '
                "device as `worker_devices`."
            )
        self._inventory.grew = False
        trace = self._trace_once(devices, known, single)
        if trace is None:
            raise UnsupportedError(
                f"{self._method.name}{self._method.whose} touches other variables on workers with "
                "other devices. Expected: the same ones. Received: a step that differs on "
                f"{', '.join(devices)}. Make it independent of the devices and of "
                "`num_replicas_in_sync`, or give one device as `worker_devices`."
            )
        return trace.plan

    def _add_expected(self) -> None:
        """Add the variables that a step usually reads to the inventory, to save traces."""
        expected = self._method.expected()
        for optimizer in self._optimizers():
            expected += [v for v in optimizer.variables if v.name in ("iteration", "learning_rate")]
        with self._host.strategy.scope():
            metrics = self._method.expected_metrics(self._element_spec)
        variables = [*expected, *metrics]
        self._inventory.presume(
            [v for v in variables if isinstance(v, ParameterServerVariable)], self._known
        )
        self._known = None  # so that it can be collected

    def _optimizers(self) -> IdentitySet[Any]:
        return IdentitySet([*self._method.optimizers(), *self._inventory.optimizers])

    def _settle_optimizers(self) -> None:
        # A step may build an optimizer, so this is done before each trace.
        self._inventory.add_optimizers(self._optimizers())
        self._move_slots()

    def _move_slots(self) -> bool:
        """Move slots beside their variables; return True if any moved."""
        with self._host.strategy.scope():
            moved = [move_slots(optimizer) for optimizer in self._optimizers() if optimizer.built]
        return any(moved)

    def _trace_once(
        self, devices: Sequence[str], known: StepPlan | None = None, single: StepPlan | None = None
    ) -> Trace | None:
        """Trace once, with a replica on each device; return None if the trace met something new."""
        inventory = self._inventory
        function, call = self._trace_function(devices)
        phases, returned, phase = call.phases, call.returned[0], call.phases[0]
        phase.settle_reads()
        inventory.settle_reads(phase.whole, phase.lookups)
        for replica in phases[1:]:
            replica.settle_reads()
        graph_def = function.graph.as_graph_def()
        if not self._has_loops and has_loops(graph_def):
            self._has_loops = True
            return None
        draws = repeats_draws(graph_def, compiled=self._method.jit_compile)
        if draws:
            inventory.add(self._count)
        # A trace that built an optimizer may have slots that are not beside their variables.
        if inventory.grew or self._move_slots():
            return None
        if not self._surroundings.trains_bare:
            _check_assigned(function.graph, self._method.name)
        _check_python_calls(graph_def, self._method.name)
        check_metrics(self._method.name, inventory.metrics, phase.joins)
        derived = derived_logs(phase, function.graph, returned, self._method.name)
        lookups = ByIdentity(
            (table, [looked_up for replica in phases for looked_up in replica.lookups[table]])
            for table in inventory.tables
        )
        names = [replica.inputs for replica in phases]
        drawn = self._with_draws(function, call, devices) if draws else function
        divide = grouping(phase.updates, self._host.options.sparse_updates)
        rounds = plan_rounds(drawn, names, lookups, list(inventory.pulled), divide)
        if isinstance(rounds, MustReadWhole):
            for table, why in rounds.reasons.items():
                inventory.read_whole(table, why)
            return None
        tables = LookupTables(function)
        plan = self._make_plan(drawn, call, rounds, tables, devices[0], known, single)
        ledger = self._host.extended.ledger
        ledger.note_looked_up(inventory.tables, small=False)
        ledger.note_looked_up(inventory.small, small=True)
        results: dict[str, MetricResult | DerivedLog] = {**returned.results, **derived}
        return Trace(plan, returned.predicted, returned.logs_are_metrics, results)

    def _trace_function(
        self, devices: Sequence[str]
    ) -> tuple[tf.types.experimental.ConcreteFunction, _Call]:
        """Trace the method for a replica on each device."""
        inventory = self._inventory
        traced: list[_Call] = []

        def compute(*arguments: object) -> ComputeOutputs:
            call = self._compute(arguments, devices)
            traced.append(call)
            returned = call.returned
            is_inlined = not (self._method.jit_compile or self._has_loops)
            if is_inlined and list(devices) != [FIRST_CPU]:
                by_replica = ComputeInputs.by_replica(arguments, len(devices))
                values = [replica.values(inventory).values() for replica in by_replica]
                graph = tf.compat.v1.get_default_graph()
                place_scalars(graph, itertools.chain(*values), devices)
            return self._surroundings.outputs(call.outputs, _joins(call.phases[0]))._replace(
                logs=returned[0].logs if len(returned) == 1 else mean_logs(returned),
                predicted=[
                    leaf
                    for replica in returned
                    for leaf in tf.nest.flatten(replica.predicted, expand_composites=True)
                ],
            )

        # TensorFlow traces twice where variables are made
        return self._concrete(compute, devices), traced[-1]

    def _concrete(self, compute: Callable[..., object], devices: Sequence[str]) -> Any:
        """Return the concrete function of a compute phase for these devices."""
        # TensorFlow would inline the loops of a step (of a recurrent layer) into the step graph's
        # loop, across tasks, where they wait for each other forever. So the step stays a function.
        return tf.function(
            compute,
            autograph=False,
            jit_compile=self._method.jit_compile,
            experimental_attributes={"_noinline": True} if self._has_loops else None,
        ).get_concrete_function(
            *ComputeInputs.specs(self._element_spec, self._inventory) * len(devices)
        )

    @property
    def _count(self) -> ParameterServerVariable:
        """The count of steps by which TensorFlow's random operations draw."""
        strategy = self._host.strategy
        return count_of(self._method.owner or strategy, strategy)

    def _with_draws(
        self,
        function: tf.types.experimental.ConcreteFunction,
        call: _Call,
        devices: Sequence[str],
    ) -> Any:
        """Return the function of a compute phase that draws by the number of its step."""
        return with_draws_of_step(
            function,
            [phase.inputs.values[self._count] for phase in call.phases],
            call.replica_of,
            lambda compute: self._concrete(compute, devices),
            compiled=self._method.jit_compile,
        )

    def _compute(self, arguments: Sequence[object], devices: Sequence[str]) -> _Call:
        """Call the method once per device."""
        inputs = ComputeInputs.by_replica(arguments, len(devices))
        trains_bare = self._surroundings.trains_bare
        has_gpu = self._has_gpu
        if has_gpu is None:
            has_gpu = all(device.startswith("GPU:") for device in devices)
        if len(devices) == 1:
            phase = Compute(self._inventory, inputs[0], trains_bare=trains_bare, has_gpu=has_gpu)
            returned = self._call_method(phase, inputs[0].batch)
            return _Call([phase], [returned], phase.outputs(), lambda place: 0)
        replicas = Replicas(
            self._host.strategy, self._inventory, inputs, trains_bare=trains_bare, has_gpu=has_gpu
        )
        of_all = replicas.call(self._method.call, devices)
        return _Call(replicas.phases, of_all, replicas.outputs(), replicas.replica_of)

    def _call_method(self, phase: Compute, batch: object) -> Returned:
        """Call the method, in `phase`."""
        with (
            self._host.strategy.scope(),
            OnlyReplica(self._host.strategy, 0),
            entering(phase),
        ):
            return self._method.call(batch)

    def _make_plan(
        self,
        function: tf.types.experimental.ConcreteFunction,
        call: _Call,
        rounds: list[Round],
        lookup_tables: LookupTables,
        device: str,
        known: StepPlan | None,
        single: StepPlan | None,
    ) -> StepPlan:
        inventory, phases, phase = self._inventory, call.phases, call.phases[0]
        states, joins = list(phase.changes), _joins(phase)
        # All plans of a step share the fused variables.
        fused = known.fused if known is not None else self._fuse(phase)
        draws = self._num_draws(phase)
        stand_ins, draw = self._surroundings.states_on_ps(
            inventory, phase.updates, [change.variable for change in states], draws, joins
        )
        changes = StepChanges(
            phase.updates,
            states + stand_ins,
            IdentitySet(inventory.tables),
            self._host.options.sparse_updates,
            fused.all,
            [group for planned in rounds for group in planned.groups],
            self._host.options.jit_compile_updates,
        )
        for update in phase.updates:
            check_updates_by_rows(update.optimizer, update.variables, changes.sparse_updates)
            self._host.lazy_updates.note(update.optimizer, changes.lazy_tables(update))
        pull, push = self._transfers(changes, rounds, self._update_rule(phase, changes, known))
        captures = [*pull.captures, *push.captures, *(draw.captures if draw else [])]
        captures += [] if single is None else [*single.pull.captures, *single.push.captures]
        outputs = function.structured_outputs.predicted
        outputs = outputs[: len(outputs) // len(phases)]  # of the first replica
        return StepPlan(
            pull=pull,
            compute=ComputePhase(
                function,
                list(function.captured_inputs),
                inventory,
                phase.updates,
                device,
                pads_rows=self._method.jit_compile,
            ),
            push=push,
            names=[replica.inputs for replica in phases],
            fused=fused,
            find_handles=HandleFinder(captures, self._host.extended.mutex),
            lookup_tables=lookup_tables,
            joins=joins,
            draws=draws,
            draw=draw,
            log_names=call.returned[0].log_names,
            outputs=[tf.TensorSpec(t.shape, t.dtype) for t in outputs],
            joins_outputs=_can_join(call.returned[0].predicted),
            # Steps that push nothing have no push to wait for.
            overlaps=self._host.options.overlap and bool(changes.devices),
            single=single,
        )

    def _num_draws(self, phase: Compute) -> list[int]:
        """Return the number of seeds that a step draws from each generator."""
        # A step adds one to the count of steps.
        return [
            1 if is_count(generator) else phase.values.draws.get(generator, 0)
            for generator in self._inventory.seeds
        ]

    def _transfers(
        self, changes: StepChanges, rounds: list[Round], rule: UpdateRule
    ) -> tuple[PullPhase, PushPhase]:
        """Return the phases that send values to a worker, and changes to the ps."""
        pull = PullPhase(
            list(self._inventory.pulled),
            rounds,
            changes.fused,
            {device: rule.clock(device) for device in changes.devices},
            needs_clocks=rule.waits,
        )
        return pull, PushPhase(changes, pull.pulls, self._host.extended.mutex, rule)

    def _update_rule(
        self, phase: Compute, changes: StepChanges, known: StepPlan | None
    ) -> UpdateRule:
        """Return the rule for when pushes take effect, which all plans of a step share."""
        if known is not None:
            return known.push.rule
        return self._surroundings.update_rule(
            self._method.name, phase.updates, self._inventory, changes
        )

    def _fuse(self, phase: Compute) -> FusedVariables:
        self._fused_variables = FusedVariables(
            phase.updates if self._fused else [],
            self._inventory.pulled,
            phase.values.assigned,
            self._fused_variables,
        )
        return self._fused_variables


def _joins(phase: Compute) -> list[Join]:
    """Return the joins of the metrics' states; any for those that `check_metrics` refuses."""
    return [join or Join.SUM for join in phase.joins]


def _check_assigned(graph: tf.Graph, method: str) -> None:
    """Check that a step assigns only variables of Keras.

    Raises UnsupportedError with the name of the first other one: workers would overwrite it.
    """
    unchanged = {
        id(graph.inputs[i]) for i in _compat.get_read_only_resource_input_indices_graph(graph)
    }
    assigned = {id(outer) for outer, inner in graph.captures if id(inner) not in unchanged}
    for variable in graph.variables:
        # A `tf.random.Generator` reads and advances its state in one operation.
        if id(variable.handle) in assigned and not variable.name.endswith("StateVar:0"):
            raise UnsupportedError(
                f"{method} assigns the `tf.Variable` '{variable.name}', and several workers "
                "would overwrite each other's values. Expected: a variable of Keras. Received: a "
                f"tf.Variable of shape {tuple(variable.shape)} on {variable.device}. Make it a "
                "`keras.Variable`, or a weight of the model: `self.add_weight(shape=..., "
                "initializer=..., trainable=False)`."
            )


def _check_python_calls(graph_def: tf.compat.v1.GraphDef, method: str) -> None:
    """Check that a step calls no Python function of this process; raise UnsupportedError if so."""
    calls = python_calls(graph_def)
    if calls:
        raise UnsupportedError(
            f"{method} calls Python functions (`tf.py_function`, `tf.numpy_function`), which "
            "live in this process, which the workers cannot call. Expected: operations of "
            f"Keras or TensorFlow. Received: {', '.join(calls)}. Write it with `keras.ops`, or do "
            "it to the data: batches that a generator yields are made in this process."
        )


def _can_join(outputs: object) -> bool:
    """Return True if the predictions of several steps can be put end to end."""

    def joins(tensor: tf.Tensor) -> bool:
        return (
            isinstance(tensor, tf.Tensor)
            and bool(tensor.shape.rank)
            and tensor.shape[1:].is_fully_defined()
        )

    return all(joins(tensor) for tensor in tf.nest.flatten(outputs))
