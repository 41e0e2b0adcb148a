"""Builds what is scheduled on a worker: pull, compute, push, for each of `steps_per_execution` steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps import variables
from kerasps.compute import MAX_TRACES, Compute, Inventory, spec_of
from kerasps.errors import KeraspsError
from kerasps.packing import Packing
from kerasps.push import build_pushes, move_slots
from kerasps.variables import ParameterServerVariable

# Steps are unrolled up to these bounds, and the unrolled block is looped beyond them. A `tf.while_loop` across devices costs
# about 1 ms an iteration, which the steps of a block share. Building the graph costs a worker some 0.5 ms an operation, so a
# deep model, whose steps are slow enough not to feel the loop, is unrolled less.
MAX_UNROLLED_STEPS = 10
MAX_UNROLLED_OPERATIONS = 6000

# The name that makes a resource anonymous: each execution gets a new one, freed when the execution ends.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"


@dataclass(frozen=True)
class ExecutionResult:
    """What an execution brought back.

    `steps` are those done; `metrics` the metric states that these steps alone add up to, `counters` what was added to each
    counter, `logs` what the last step's `train_step` returned.
    """

    steps: int
    metrics: list[np.ndarray]
    counters: list[np.ndarray]
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
        return list(self._inventory.metrics.values())

    @property
    def seeds(self) -> list[ParameterServerVariable]:
        """The states of the seed generators that a step draws from, in the order of the header."""
        return list(self._inventory.seeds.values())

    @property
    def counters(self) -> list[ParameterServerVariable]:
        """The integer variables that steps add to, in the order of `ExecutionResult.counters`."""
        return [self._deltas[i] for i in self._counter_indices]

    @property
    def logs_are_metrics(self) -> bool:
        """Whether `train_step` returns the model's metrics, so that their merged states say more than its last return."""
        return self._logs_are_metrics

    @property
    def seeds_per_step(self) -> list[int]:
        """How many seeds a step draws from each generator."""
        return self._draws

    def run(self, execution: Any, source: Any, header: np.ndarray) -> ExecutionResult:
        """Runs one execution on the current device.

        Args:
            execution: what `execution` returned.
            source: the worker's `tf.data.Iterator`, or a batch.
            header: int64: the global number of the first step, then two integers per seed generator.
        """
        # A step number that nothing draws from stays here: to send it costs a millisecond.
        flats = execution(source, tf.constant(header)) if self.seeds else execution(source)
        steps, *arrays = self._results.unpack_numpy([flat.numpy() for flat in flats])
        num_metrics, num_counters = len(self.metrics), len(self.counters)
        logs = dict(zip(self._log_names, arrays[num_metrics + num_counters :], strict=True))
        return ExecutionResult(int(steps), arrays[:num_metrics], arrays[num_metrics : num_metrics + num_counters], logs)

    def execution(self, iterator: Any, num_steps: int, *, checked: bool) -> Any:
        """The concrete function of an execution of `num_steps` steps; traced at the first call for its arguments.

        Args:
            iterator: the worker's `tf.data.Iterator`, or a batch.
            num_steps: steps to do.
            checked: whether the data may end within the execution.
        """
        is_iterator = isinstance(iterator, tf.data.Iterator)
        spec = iterator._type_spec if is_iterator else self._element_spec
        key = (spec if is_iterator else None, num_steps, checked)
        with self._lock:
            if key not in self._executions:
                self._executions[key] = self._build_execution(spec, num_steps, checked, is_iterator)
            return self._executions[key]

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

        def compute(data: Any, values: list[tf.Tensor], scratch: list[tf.Tensor]) -> Any:
            phase = Compute(inventory, values, scratch)
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

        self._compute = tf.function(compute, autograph=False, jit_compile=self._jit_compile()).get_concrete_function(
            self._element_spec,
            [spec_of(v) for v in inventory.start_values()],
            [tf.TensorSpec([], tf.resource) for _ in inventory.scratch],
        )
        if inventory.grew:
            return
        phase = phases[-1]
        self._deltas, assigned = phase.state_changes()
        self._counter_indices = [i for i, v in enumerate(self._deltas) if v.storage.dtype.is_integer]
        self._draws = [phase.draws.get(key, 0) for key in inventory.seeds]
        self._log_names = list(log_names)
        self._pushes = build_pushes(phase.updates, self._deltas, assigned, self._strategy.extended.mutex)
        self._pulls = _build_pulls(list(inventory.pulled.values()))
        operations = sum(len(f.graph.get_operations()) for f in [self._compute, *[push.function for push in self._pushes]])
        self._unrolled_steps = max(1, min(MAX_UNROLLED_STEPS, MAX_UNROLLED_OPERATIONS // operations))
        self._results = Packing(
            [
                tf.TensorSpec([], tf.int64),
                *[spec_of(v) for v in self.metrics],
                *[spec_of(v) for v in self.counters],
                *[tf.TensorSpec([], tf.float32) for _ in log_names],
            ]
        )

    def _jit_compile(self) -> bool:
        return bool(self._model.jit_compile)

    # Execution

    def _build_execution(self, spec: Any, num_steps: int, checked: bool, is_iterator: bool) -> Any:
        def execution(source: Any, *headers: tf.Tensor) -> list[tf.Tensor]:
            step = _Step(self, headers[0] if headers else None)
            state = step.initial_state()
            blocks, rest = divmod(num_steps, self._unrolled_steps)
            if blocks < 2 and num_steps <= MAX_UNROLLED_STEPS:
                blocks, rest = 0, num_steps
            read = source.get_next if is_iterator else lambda: source

            def unrolled(state: list[tf.Tensor], count: int) -> list[tf.Tensor]:
                for _ in range(count):
                    state = step.if_data(source, state) if checked else step(read(), state)
                return state

            if blocks:
                (_, *state) = tf.while_loop(
                    lambda block, *_: block < blocks,
                    lambda block, *state: (block + 1, *unrolled(list(state), self._unrolled_steps)),
                    (tf.constant(0), *state),
                    parallel_iterations=1,
                )
            return self._results.pack(unrolled(state, rest))

        headers = [tf.TensorSpec([1 + 2 * len(self.seeds)], tf.int64)] if self.seeds else []
        return tf.function(execution, autograph=False).get_concrete_function(spec, *headers)


class _Step:
    """Adds the operations of one step to the graph of an execution.

    The state that goes from step to step is what the execution returns: steps done, metric states, counters, logs.
    """

    def __init__(self, function: TrainFunction, header: tf.Tensor | None) -> None:
        self._f = function
        self._header = header
        self._scratch = {key: _anonymous_variable(spec) for key, spec in function._inventory.scratch.items()}

    def initial_state(self) -> list[tf.Tensor]:
        return [tf.zeros(spec.shape, spec.dtype) for spec in self._f._results.specs]

    def __call__(self, data: Any, state: list[tf.Tensor]) -> list[tf.Tensor]:
        f = self._f
        steps, num_metrics, num_counters = state[0], len(f.metrics), len(f.counters)
        values = [*self._pull(), *state[1 : 1 + num_metrics], *self._seeds(steps)]
        for handle, value in self._scratch_values(values):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        outputs = f._compute(data, values, list(self._scratch.values()))
        for push in f._pushes:
            push(outputs)
        added = [outputs["deltas"][i] for i in f._counter_indices]
        counters = [c + a for c, a in zip(state[1 + num_metrics : 1 + num_metrics + num_counters], added, strict=True)]
        return [steps + 1, *outputs["metrics"], *counters, *outputs["logs"]]

    def if_data(self, iterator: Any, state: list[tf.Tensor]) -> list[tf.Tensor]:
        """A step if the iterator has a batch left, else nothing."""
        batch = iterator.get_next_as_optional()
        step, skip = lambda: self(batch.get_value(), state), lambda: [tf.identity(s) for s in state]
        return list(tf.cond(batch.has_value(), step, skip))

    def _pull(self) -> list[tf.Tensor]:
        pulled = {}
        for device, held, packing, function in self._f._pulls:
            with tf.device(device):
                flats = function()
            pulled.update({id(v): t for v, t in zip(held, packing.unpack(flats), strict=True)})
        return [pulled[key] for key in self._f._inventory.pulled]

    def _seeds(self, steps: tf.Tensor) -> list[tf.Tensor]:
        seeds: list[tf.Tensor] = []
        if self._header is None:
            return seeds
        for i, (variable, draws) in enumerate(zip(self._f.seeds, self._f.seeds_per_step, strict=True)):
            seed, counter = self._header[1 + 2 * i], self._header[2 + 2 * i]
            seeds.append(tf.cast(tf.stack([seed, counter + steps * draws]), variable.storage.dtype))
        return seeds

    def _scratch_values(self, values: list[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        start = {id(v): t for v, t in zip(self._f._inventory.start_values(), values, strict=True)}
        specs = self._f._inventory.scratch
        return [
            (handle, start[key] if key in start else tf.zeros(specs[key].shape, specs[key].dtype))
            for key, handle in self._scratch.items()
        ]


def _build_pulls(
    pulled: Sequence[ParameterServerVariable],
) -> list[tuple[str, list[ParameterServerVariable], Packing, Callable[..., Any]]]:
    """Per ps: its device, the variables that are read there, how they travel, and the function that reads them."""
    by_device: dict[str, list[ParameterServerVariable]] = {}
    for variable in pulled:
        by_device.setdefault(variable.device, []).append(variable)
    return [_build_pull(device, held) for device, held in sorted(by_device.items())]


def _build_pull(
    device: str, held: list[ParameterServerVariable]
) -> tuple[str, list[ParameterServerVariable], Packing, Callable[..., Any]]:
    packing = Packing([spec_of(v) for v in held])

    def hand_out() -> list[tf.Tensor]:
        with tf.device(device):
            return packing.pack([v.storage.read_value() for v in held])

    return device, held, packing, tf.function(hand_out, autograph=False).get_concrete_function()


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


def _anonymous_variable(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.raw_ops.VarHandleOp(dtype=spec.dtype, shape=spec.shape, container="", shared_name=_ANONYMOUS)
