"""The training step of a model, traced, as executions for workers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import chain
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps import variables
from kerasps.compute import MAX_TRACES, Compute, Inventory, TableRows, spec_of
from kerasps.errors import KeraspsError
from kerasps.execution import StepPlan, WorkerTotals, build_execution
from kerasps.load import StepTraffic
from kerasps.optimizers import move_slots
from kerasps.pull import build_pulls, captures_of, rows_spec
from kerasps.push import PushPlan, build_pushes
from kerasps.rows import Round, plan_rounds
from kerasps.storage import Lookup
from kerasps.variables import ParameterServerVariable


@dataclass(frozen=True)
class ExecutionResult:
    """What one or more executions on a worker brought back.

    `steps` are those done; `metrics` the metric states that these steps alone add up to, `counters` what was added to each
    counter, `rows` how many rows were read of each shard of a table, `logs` what the last step's `train_step` returned.
    """

    steps: int
    metrics: list[np.ndarray]
    counters: list[np.ndarray]
    rows: list[np.ndarray]
    logs: dict[str, np.ndarray]


class TrainFunction:
    """The training step of a model as executions for workers.

    Args:
        model: a compiled and built `keras.Model` made under the strategy's scope.
        strategy: the `ParameterServerStrategy`.
        element_spec: the `tf.TypeSpec` structure of a batch.
    """

    def __init__(self, model: keras.Model, strategy: Any, element_spec: Any) -> None:
        self._model = model
        self._strategy = strategy
        self._element_spec = element_spec
        self.key: Any = None
        self._lock = threading.Lock()
        self._executions: dict[Any, Any] = {}
        self._inventory = Inventory()
        self._add_expected()
        self._trace()

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
        """Whether `train_step` returns the model's metrics, so that their merged states say more than its last return."""
        return self._logs_are_metrics

    @property
    def seeds_per_step(self) -> list[int]:
        """How many seeds a step draws from each generator."""
        return self._plan.draws

    def execution(self, source_spec: Any, num_steps: int, *, checked: bool, keeps_totals: bool) -> Any:
        """The concrete function of an execution of `num_steps` steps; traced at the first call for its arguments.

        Args:
            source_spec: the `tf.data.IteratorSpec` of the worker's iterator; None for a batch.
            num_steps: steps to do.
            checked: whether the data may end within the execution.
            keeps_totals: whether what the steps add up to stays on the worker until `collect`, or is returned.
        """
        key = (source_spec, num_steps, checked, keeps_totals)
        with self._lock:
            if key not in self._executions:
                spec = self._element_spec if source_spec is None else source_spec
                totals = self._totals if keeps_totals else None
                self._executions[key] = build_execution(self._plan, spec, num_steps, checked=checked, totals=totals)
            return self._executions[key]

    def start(self) -> None:
        """Clears what the worker on whose device this runs holds; due before its first execution that keeps totals."""
        self._totals.clear()

    def run(self, execution: Any, source: Any, header: np.ndarray) -> ExecutionResult:
        """Runs an execution on the current device, and returns its result.

        Args:
            execution: what `execution` returned.
            source: the resource of the worker's iterator, or a batch.
            header: int64: the global number of the first step, then two integers per seed generator.
        """
        return self._result(self._call(execution, source, header))

    def advance(self, execution: Any, source: Any, header: np.ndarray) -> None:
        """As `run`, for an execution that keeps totals: its result is among those that `collect` returns."""
        self._call(execution, source, header)

    def _call(self, execution: Any, source: Any, header: np.ndarray) -> Any:
        return execution(source, tf.constant(header)) if self.seeds else execution(source)

    def collect(self) -> ExecutionResult:
        """What the executions that kept totals on the worker on whose device this runs add up to since the last call."""
        return self._result(self._totals.collect())

    def _result(self, flats: list[tf.Tensor]) -> ExecutionResult:
        steps, *arrays = self._plan.state.unpack_numpy([flat.numpy() for flat in flats])
        counters, rows, logs = len(self.metrics), len(self.metrics) + len(self.counters), self._plan.num_sums - 1
        named_logs = dict(zip(self._plan.log_names, arrays[logs:], strict=True))
        return ExecutionResult(int(steps), arrays[:counters], arrays[counters:rows], arrays[rows:logs], named_logs)

    # Compute

    def _add_expected(self) -> None:
        metrics = {id(v) for v in self._model.metrics_variables}
        expected = [v for v in self._model.variables if id(v) not in metrics]
        for optimizer in optimizers_of(self._model):
            expected += [v for v in optimizer.variables if v.name in ("iteration", "learning_rate")]
        for variable in [*expected, *self._model.metrics_variables]:
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
            f"The training step of model '{self._model.name}' touched new variables in each of {MAX_TRACES} traces. Expected: "
            "the same variables in each call of `train_step`. Create variables in `build`, not in `train_step`."
        )

    def _settle_optimizers(self) -> None:
        # A step may build an optimizer, so this is due before each trace.
        optimizers = optimizers_of(self._model)
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
                logs = self._model.train_step(data)
                names, tensors = _flatten_logs(logs)
                metric_names = set(_flatten_logs(self._model.get_metrics_result())[0])
            self._logs_are_metrics = bool(names) and set(names) == metric_names
            if self._logs_are_metrics:
                names, tensors = [], []
            log_names[:] = names
            return {**phase.outputs(), "logs": tensors}

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
        rounds = plan_rounds(compute_function, phases[-1], inventory)
        if rounds is None:
            return
        self._plan = self._make_plan(compute_function, phases[-1], rounds, log_names)
        self._totals = WorkerTotals(self._plan.state)

    def _make_plan(self, compute: Any, phase: Compute, rounds: list[Round], log_names: list[str]) -> StepPlan:
        inventory, mutex = self._inventory, self._strategy.extended.mutex
        deltas, assigned = phase.state_changes()
        pulls = build_pulls(list(inventory.pulled.values()), rounds)
        push_plan = PushPlan(phase.updates, deltas, assigned, inventory.tables, self._strategy.sparse_updates)
        pushes = build_pushes(push_plan, [pull for round_pull in pulls for pull in round_pull.pulls], mutex)
        return StepPlan(
            inventory=inventory,
            compute=compute,
            inputs=phase.inputs,
            pads_rows=self._jit_compile(),
            pulls=pulls,
            pushes=pushes,
            lookup=Lookup([*captures_of(pulls), *chain.from_iterable(p.captures for p in pushes)], mutex),
            updates=phase.updates,
            deltas=deltas,
            counter_indices=[i for i, v in enumerate(deltas) if v.storage.dtype.is_integer],
            draws=[phase.draws.get(key, 0) for key in inventory.seeds],
            log_names=list(log_names),
        )

    def _jit_compile(self) -> bool:
        return bool(self._model.jit_compile)


def optimizers_of(model: keras.Model) -> list[Any]:
    """The model's optimizer, those that it wraps, and those that a custom model keeps as attributes."""
    found: dict[int, Any] = {}

    def add(optimizer: Any) -> None:
        if isinstance(optimizer, keras.optimizers.Optimizer) and id(optimizer) not in found:
            found[id(optimizer)] = optimizer
            add(getattr(optimizer, "inner_optimizer", None))
            for inner in getattr(optimizer, "optimizers", ()):
                add(inner)

    add(getattr(model, "optimizer", None))
    for value in vars(model).values():
        add(value)
    return list(found.values())


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
