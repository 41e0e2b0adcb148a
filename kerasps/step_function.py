"""A step of a model (to train, test or predict), traced, as executions for workers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat, variables
from kerasps.compute import MAX_TRACES, Compute, Inventory, TableRows, spec_of
from kerasps.errors import KeraspsError, UnsupportedError
from kerasps.execution import StepPlan, WorkerTotals, build_execution
from kerasps.fetch import fetch
from kerasps.flights import Flight
from kerasps.inputs import python_calls
from kerasps.load import StepTraffic
from kerasps.lookup_tables import LookupTables
from kerasps.optimizers import move_slots, optimizers_of
from kerasps.placement import COORDINATOR_CPU
from kerasps.pull import build_pulls, captures_of, rows_spec
from kerasps.push import PushPlan, build_pushes
from kerasps.reuse import EXECUTIONS
from kerasps.rows import Round, plan_rounds
from kerasps.storage import Lookup
from kerasps.variables import ParameterServerVariable
from kerasps.vectors import Vectors


@dataclass(frozen=True)
class ExecutionResult:
    """What one or more executions on a worker brought back.

    `steps` are those done; `metrics` the metric states that these steps alone add up to, `counters` what was added to each
    counter, `rows` how many rows were read of each shard of a table, `logs` what the last step returned beside the metrics,
    `outputs` what each step predicted.
    """

    steps: int
    metrics: list[np.ndarray]
    counters: list[np.ndarray]
    rows: list[np.ndarray]
    logs: dict[str, np.ndarray]
    outputs: list[Any]


class StepFunction:
    """A step of a model as executions for workers.

    Args:
        model: a built `keras.Model` made under the strategy's scope.
        strategy: the `ParameterServerStrategy`.
        element_spec: the `tf.TypeSpec` structure of a batch.
        method: the method of the model that is a step: `"train_step"`, `"test_step"` or `"predict_step"`.
        in_vectors: whether small variables lie in `Vectors` between `load` and `store`: steps are faster, beginnings slower.
    """

    def __init__(self, model: keras.Model, strategy: Any, element_spec: Any, method: str, *, in_vectors: bool) -> None:
        self._model = model
        self._in_vectors = in_vectors
        self._method = method
        self._strategy = strategy
        self._element_spec = element_spec
        self._lock = threading.Lock()
        self._executions: dict[Any, Any] = {}
        self._inventory = Inventory()
        self._add_expected()
        self._trace()
        self._state = _state_of(model)

    def serves(self, element_spec: Any, *, in_vectors: bool) -> bool:
        """Whether this is the step for batches of `element_spec`, with the model's variables as they are now.

        With `in_vectors`, it must be made so; without, it may be.
        """
        is_fast = self._in_vectors or not in_vectors
        return is_fast and self._plan.lookup_tables.are_current and self._is_for(element_spec)

    def _is_for(self, element_spec: Any) -> bool:
        return bool(self._element_spec == element_spec) and self._state == _state_of(self._model)

    @property
    def metrics(self) -> list[ParameterServerVariable]:
        """The metric states, in the order of `ExecutionResult.metrics`."""
        return self._plan.metrics

    @property
    def seeds(self) -> list[ParameterServerVariable]:
        """The states of the seed generators that a step draws from, in the order of the header."""
        return self._plan.seeds

    @property
    def counters(self) -> list[ParameterServerVariable]:
        """The integer variables that steps add to, in the order of `ExecutionResult.counters`."""
        return self._plan.counters

    @property
    def traffic(self) -> StepTraffic:
        """What each step moves, per ps."""
        return self._plan.traffic

    @property
    def logs_are_metrics(self) -> bool:
        """Whether the step returns the model's metrics, so that their merged states say more than its last return."""
        return self._logs_are_metrics

    @property
    def max_steps(self) -> int | None:
        """The most steps of an execution; None where there is no limit.

        Steps that predict are not looped, and outputs that cannot be put end to end come back step by step.
        """
        return None if not self._plan.outputs else self._plan.max_unrolled_steps if self._plan.joins_outputs else 1

    @property
    def max_fed_steps(self) -> int:
        """As `max_steps`, for an execution to which the batches are sent."""
        return self.max_steps or self._plan.max_unrolled_steps

    @property
    def seeds_per_step(self) -> list[int]:
        """How many seeds a step draws from each generator."""
        return self._plan.draws

    def execution(
        self, source_spec: Any, num_steps: int, *, checked: bool, keeps_totals: bool, on_coordinator: bool = False
    ) -> Any:
        """The concrete function of an execution of `num_steps` steps; traced at the first call for its arguments.

        Args:
            source_spec: the `tf.data.IteratorSpec` of the worker's iterator; None for a list of batches, one per step.
            num_steps: steps to do.
            checked: whether the data may end within the execution.
            keeps_totals: whether what the steps add up to stays on the worker until `collect`, or is returned.
            on_coordinator: whether it is the coordinator that runs it, and not a worker.
        """
        key = (source_spec, num_steps, checked, keeps_totals, on_coordinator)
        with self._lock:
            if key not in self._executions:
                spec = [self._element_spec] * num_steps if source_spec is None else source_spec
                totals = self._totals if keeps_totals else None
                built = build_execution(
                    self._plan, spec, num_steps, checked=checked, totals=totals, on_coordinator=on_coordinator
                )
                self._executions[key] = EXECUTIONS.shared(built)
            return self._executions[key]

    def load(self) -> None:
        """Has the ps take values to where executions find them. Call in a flight, before the first execution."""
        self._plan.vectors.load()

    def store(self) -> None:
        """Brings the values back into the variables. Call in a flight, after `load`, when no execution runs."""
        self._plan.vectors.store()

    def start(self) -> None:
        """Makes the worker on whose device this runs ready: clears what it holds, and fills its lookup tables."""
        self._totals.clear()
        self._plan.lookup_tables.bring()

    def run(self, execution: Any, source: Any, header: np.ndarray) -> ExecutionResult:
        """Runs an execution on the current device, and returns its result.

        Args:
            execution: what `execution` returned.
            source: the resource of the worker's iterator, or a list of batches.
            header: int64: the global number of the first step, then two integers per seed generator.
        """
        returned = self._call(execution, source, header)
        if not self._plan.outputs:
            return self._result(returned)
        flats, leaves, sizes = returned
        result = self._result(flats)
        return replace(result, outputs=self._split(leaves, sizes)[: result.steps])

    def run_alone(self, execution: Any, batches: list[Any], header: np.ndarray) -> ExecutionResult:
        """As `run`, on the coordinator, when no other execution runs: in a flight of its own."""
        owner = threading.Lock()

        def work(flight: Flight) -> ExecutionResult:
            self.load()
            try:
                with tf.device(COORDINATOR_CPU):
                    return self.run(execution, batches, header)
            finally:
                self.store()

        flight = Flight(owner, work, lambda: "a ps does not answer")
        with owner:
            flight.start()
            flight.wait()
        if flight.error is not None:
            raise flight.error
        result: ExecutionResult = flight.result
        return result

    def advance(self, execution: Any, source: Any, header: np.ndarray) -> None:
        """As `run`, for an execution that keeps totals: its result is among those that `collect` returns."""
        self._call(execution, source, header)

    def _call(self, execution: Any, source: Any, header: np.ndarray) -> Any:
        return execution(source, tf.constant(header)) if self.seeds else execution(source)

    def collect(self) -> ExecutionResult:
        """What the executions that kept totals on the worker on whose device this runs add up to since the last call."""
        return self._result(self._totals.collect())

    def _split(self, leaves: list[tf.Tensor], sizes: Any) -> list[Any]:
        """What each step predicted, from the tensors that an execution returned (see `build_execution`)."""
        if not self._plan.joins_outputs:
            return [_to_numpy(tf.nest.pack_sequence_as(self._outputs, leaves, expand_composites=True))]
        lengths, *values = fetch([sizes, *leaves])
        ends = np.cumsum(lengths, axis=0)[:-1]
        parts = [np.split(value, ends[:, i]) for i, value in enumerate(values)]
        return [tf.nest.pack_sequence_as(self._outputs, step) for step in zip(*parts, strict=True)]

    def _result(self, flats: list[tf.Tensor]) -> ExecutionResult:
        steps, *arrays = self._plan.state.unpack_numpy(fetch(flats))
        counters, rows, logs = len(self.metrics), len(self.metrics) + len(self.counters), self._plan.num_sums - 1
        named_logs = dict(zip(self._plan.log_names, arrays[logs:], strict=True))
        return ExecutionResult(int(steps), arrays[:counters], arrays[counters:rows], arrays[rows:logs], named_logs, [])

    # Compute

    def _add_expected(self) -> None:
        metrics = [] if self._method == "predict_step" else self._model.metrics_variables
        found = {id(v) for v in self._model.metrics_variables}
        expected = [v for v in self._model.variables if id(v) not in found]
        for optimizer in self._optimizers():
            expected += [v for v in optimizer.variables if v.name in ("iteration", "learning_rate")]
        for variable in [*expected, *metrics]:
            if isinstance(variable, ParameterServerVariable):
                self._inventory.add(variable)

    def _trace(self) -> None:
        for _ in range(MAX_TRACES):
            self._inventory.grew = False
            self._settle_optimizers()
            try:
                self._trace_once()
            except Exception:
                # A trace that met news may fail for it (a value assigned in a loop, read outside); the next one may not.
                if not self._inventory.grew:
                    raise
            if not self._inventory.grew:
                return
        raise KeraspsError(
            f"`{self._method}` of model '{self._model.name}' touched new variables in each of {MAX_TRACES} traces. Expected: "
            f"the same variables in each call. Create variables in `build`, not in `{self._method}`."
        )

    def _optimizers(self) -> list[Any]:
        found = optimizers_of(self._model) if self._method == "train_step" else []
        return list({id(optimizer): optimizer for optimizer in [*found, *self._inventory.optimizers.values()]}.values())

    def _settle_optimizers(self) -> None:
        # A step may build an optimizer, so this is due before each trace.
        optimizers = self._optimizers()
        self._inventory.add_optimizers(optimizers)
        with self._strategy.scope():
            for optimizer in optimizers:
                if optimizer.built:
                    move_slots(optimizer)

    def _trace_once(self) -> None:
        inventory = self._inventory
        phases: list[Compute] = []
        log_names: list[str] = []

        def compute(data: Any, values: list[tf.Tensor], tables: list[list[tf.Tensor]], scratch: list[tf.Tensor]) -> Any:
            phase = Compute(inventory, data, values, [TableRows(rows, positions) for rows, *positions in tables], scratch)
            phases.append(phase)
            with self._strategy.scope(), tf.distribute.ReplicaContext(self._strategy, 0), variables.entering(phase):
                returned = getattr(self._model, self._method)(data)
                predicts = self._method == "predict_step"
                names, tensors = ([], []) if predicts else _flatten_logs(returned)
                metric_names = [] if predicts else _flatten_logs(self._model.get_metrics_result())[0]
            self._logs_are_metrics = bool(names) and set(names) == set(metric_names)
            if self._logs_are_metrics:
                names, tensors = [], []
            log_names[:] = names
            self._outputs = tf.nest.map_structure(_as_tensor, returned) if predicts else None
            outputs = tf.nest.flatten(self._outputs, expand_composites=True) if predicts else []
            return {**phase.outputs(), "logs": tensors, "outputs": outputs}

        compute_function = tf.function(compute, autograph=False, jit_compile=self._jit_compile()).get_concrete_function(
            self._element_spec,
            [spec_of(v) for v in inventory.start_values()],
            [
                [rows_spec(table), *[tf.TensorSpec([None], tf.int32)] * inventory.num_lookups[key]]
                for key, table in inventory.tables.items()
            ],
            [tf.TensorSpec([], tf.resource) for _ in inventory.scratch],
        )
        inventory.settle(phases[-1])
        if inventory.grew:
            return
        _check_assigned(compute_function.graph, self._method)
        _check_python_calls(compute_function.graph, self._method)
        rounds = plan_rounds(compute_function, phases[-1], inventory)
        if rounds is None:
            return
        self._plan = self._make_plan(compute_function, phases[-1], rounds, log_names)
        self._totals = WorkerTotals(self._plan.state)

    def _make_plan(self, compute: Any, phase: Compute, rounds: list[Round], log_names: list[str]) -> StepPlan:
        inventory, mutex = self._inventory, self._strategy.extended.mutex
        deltas, assigned = phase.state_changes()
        vectors = Vectors(phase.updates if self._in_vectors else [], inventory.pulled, {id(v) for v in [*deltas, *assigned]})
        pulls = build_pulls(list(inventory.pulled.values()), rounds, vectors.all)
        push_plan = PushPlan(phase.updates, deltas, assigned, inventory.tables, self._strategy.sparse_updates, vectors.all)
        pushes = build_pushes(push_plan, [pull for round_pull in pulls for pull in round_pull.pulls], mutex)
        return StepPlan(
            inventory=inventory,
            compute=compute,
            captures=list(compute.captured_inputs),
            lookup_tables=LookupTables(compute),
            inputs=phase.inputs,
            pads_rows=self._jit_compile(),
            vectors=vectors,
            pulls=pulls,
            pushes=pushes,
            lookup=Lookup([*captures_of(pulls), *chain.from_iterable(p.captures for p in pushes)], mutex),
            updates=phase.updates,
            deltas=deltas,
            counter_indices=[i for i, v in enumerate(deltas) if v.storage.dtype.is_integer],
            draws=[phase.draws.get(key, 0) for key in inventory.seeds],
            log_names=list(log_names),
            outputs=[tf.TensorSpec(t.shape, t.dtype) for t in compute.structured_outputs["outputs"]],
            joins_outputs=_can_join(self._outputs),
        )

    def _jit_compile(self) -> bool:
        return bool(self._model.jit_compile)


def _state_of(model: keras.Model) -> list[tuple[int, bool]]:
    """What a trace depends on: which variables there are, and which of them are trained."""
    return [(id(v), v.trainable) for v in model.variables]


def _check_assigned(graph: Any, method: str) -> None:
    """Raises UnsupportedError, naming it, where a step assigns a variable that is not Keras's: workers would overwrite it."""
    unchanged = {id(graph.inputs[i]) for i in _compat.get_read_only_resource_input_indices_graph(graph)}
    assigned = {id(outer) for outer, inner in graph.captures if id(inner) not in unchanged}
    for variable in graph.variables:
        # The state of a `tf.random.Generator` is read and moved on in one operation.
        if id(variable.handle) in assigned and not variable.name.endswith("StateVar:0"):
            raise UnsupportedError(
                f"`{method}` assigns the `tf.Variable` '{variable.name}', and several workers would overwrite each other's "
                f"values. Expected: a variable of Keras. Received: a tf.Variable of shape {tuple(variable.shape)} on "
                f"{variable.device}. Make it a `keras.Variable`, or a weight of the model: `self.add_weight(shape=..., "
                "initializer=..., trainable=False)`."
            )


def _check_python_calls(graph: Any, method: str) -> None:
    calls = python_calls(graph.as_graph_def())
    if calls:
        raise UnsupportedError(
            f"`{method}` calls Python functions (`tf.py_function`, `tf.numpy_function`), which live in this process, where "
            f"the workers cannot reach them. Expected: operations of Keras or TensorFlow. Received: {', '.join(calls)}. Write "
            "it with `keras.ops`, or do it to the data: batches that a generator yields are made in this process."
        )


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(value)


def _to_numpy(structure: Any) -> Any:
    return tf.nest.map_structure(lambda t: fetch([t])[0] if isinstance(t, tf.Tensor) else t, structure)


def _can_join(outputs: Any) -> bool:
    """Whether what several steps predict can be put end to end."""

    def joins(tensor: Any) -> bool:
        return isinstance(tensor, tf.Tensor) and bool(tensor.shape.rank) and tensor.shape[1:].is_fully_defined()

    return all(joins(tensor) for tensor in tf.nest.flatten(outputs))


def _flatten_logs(logs: Any) -> tuple[list[str], list[tf.Tensor]]:
    if not isinstance(logs, dict):
        return [], []
    names: list[str] = []
    tensors: list[tf.Tensor] = []
    for name, value in logs.items():
        if isinstance(value, dict):
            inner = _flatten_logs(value)
            names += inner[0]
            tensors += inner[1]
            continue
        tensor = tf.cast(tf.convert_to_tensor(value), tf.float32)
        if tensor.shape.num_elements() == 1:
            names.append(name)
            tensors.append(tf.reshape(tensor, []))
    return names, tensors
