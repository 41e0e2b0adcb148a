"""The push phase: what one ps task does with the gradients and new values that a worker sends it.

The optimizer's own `update_step` runs here, beside its slots, on each shard of a variable by itself: on the whole shard, or, of
a table that the step read by rows, on these rows of the variable and its slots. One push at a time holds the lock of a ps, so
an update reads and writes the slots of its variables undisturbed and concurrent workers lose nothing. Everything that a push
needs has arrived before it takes the lock, so a worker that dies cannot hold it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps import variables
from kerasps.compute import Update
from kerasps.errors import UnsupportedError
from kerasps.optimizers import check_shards, updates_rows
from kerasps.packing import Packing, brought_to
from kerasps.parts import Part, parts_of
from kerasps.pull import DevicePull, PulledStep, rows_spec
from kerasps.sharding import TensorLike
from kerasps.storage import call_with
from kerasps.variables import ParameterServerVariable
from kerasps.vectors import Vector


class _ShardRows:
    """Some rows of one shard of a table, and the same rows of its slots, while an update works on them."""

    def __init__(self, part: Part, ids: tf.Tensor) -> None:
        self.part = part
        self._ids = ids
        self._rows: dict[int, tf.Tensor] = {}
        self._changed: dict[int, tf.Variable] = {}

    def holds(self, variable: ParameterServerVariable) -> bool:
        """Whether `variable` is the table or a slot of its shape."""
        return bool(variable.storage.shape == self.part.variable.storage.shape)

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """The rows of `variable` as they stand."""
        if id(variable) not in self._rows:
            storage = variable.shards[self.part.shard]
            gathered = tf.raw_ops.ResourceGather(resource=storage.handle, indices=self._ids, dtype=storage.dtype)
            gathered.set_shape([None, *storage.shape[1:]])
            self._rows[id(variable)] = gathered
        return self._rows[id(variable)]

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Takes new rows of `variable`."""
        self._rows[id(variable)] = value
        self._changed[id(variable)] = variable.shards[self.part.shard]

    def write(self) -> None:
        """Writes the rows that have changed."""
        for key, storage in self._changed.items():
            tf.raw_ops.ResourceScatterUpdate(resource=storage.handle, indices=self._ids, updates=self._rows[key])


class _RowsOf(TensorLike):
    """What a table or a slot of it is to `update_step`; as of a `tf.Variable`, its value is what was assigned last."""

    def __init__(self, rows: _ShardRows, variable: ParameterServerVariable) -> None:
        self._rows = rows
        self._variable = variable

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the variable."""
        return self._variable.storage.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the rows."""
        return self.read_value().shape

    def read_value(self) -> tf.Tensor:
        """The rows as they stand."""
        return self._rows.current(self._variable)


class Push:
    """The phase in which variables are their storage, and shared scalars what the worker sent (see `variables.Phase`)."""

    hides_constraints = False

    def __init__(self, optimizer: Any, learning_rate: tf.Tensor, shared: dict[int, tf.Tensor]) -> None:
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self._shared = shared
        self._shard = 0
        self._rows: _ShardRows | None = None
        self._stand_ins: dict[int, tf.Variable] = {}

    @contextlib.contextmanager
    def on_vector(self, vector: Vector) -> Iterator[None]:
        """While active, the first variable of the vector and its slots are what all of them lie in."""
        self._stand_ins = vector.stand_ins(self.optimizer)
        try:
            yield
        finally:
            self._stand_ins = {}

    @contextlib.contextmanager
    def on(self, part: Part, rows: _ShardRows | None = None) -> Iterator[None]:
        """While active, a variable is the shard of `part`, or those rows of it."""
        self._shard, self._rows = part.shard, rows
        try:
            yield
            if rows is not None:
                rows.write()
        finally:
            self._shard, self._rows = 0, None

    def read(self, variable: ParameterServerVariable) -> Any:
        if id(variable) in self._shared:
            return self._shared[id(variable)]
        if self._rows is not None and self._rows.holds(variable):
            return _RowsOf(self._rows, variable)
        return self._storage(variable)

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return self.read(variable).shape

    def source(self, variable: ParameterServerVariable) -> Any:
        value = self.read(variable)
        return value.handle if isinstance(value, tf.Variable) else tf.convert_to_tensor(value)

    def take(self, variable: ParameterServerVariable, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.read(variable), ids)

    def regularizer(self, variable: ParameterServerVariable, regularizer: Any) -> Any:
        return regularizer

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._check(variable)
        if self._rows is not None and self._rows.holds(variable):
            self._rows.assign(variable, value)
        else:
            self._storage(variable).assign(value, read_value=False)

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._check(variable)
        if self._rows is not None and self._rows.holds(variable):
            self._rows.assign(variable, self._rows.current(variable) + value)
        else:
            self._storage(variable).assign_add(value, read_value=False)

    def _storage(self, variable: ParameterServerVariable) -> tf.Variable:
        if id(variable) in self._stand_ins:
            return self._stand_ins[id(variable)]
        return variable.shards[self._shard if variable.sharding is not None else 0]

    def _check(self, variable: ParameterServerVariable) -> None:
        if id(variable) in self._shared:
            raise UnsupportedError(
                f"Optimizer {self.optimizer.name!r} assigns '{variable.path}' in `update_step`, which runs on every ps, and no "
                "ps sees another's state. Expected: `update_step` assigns the variable and its slots, kept in lists parallel "
                f"to the variables. Received: an assignment to shared state of shape {tuple(variable.shape)}. Assign it in "
                "`_backend_update_step`, as `keras.optimizers.Nadam` does."
            )


@dataclass(frozen=True)
class DevicePush:
    """The push to one ps: which tensors of a step go there, how they travel, and the function that takes them in.

    `tables` are the shards of which it sends gradients of rows; `pulls` are those whose messages say which rows these are.
    """

    device: str
    tables: list[Part]
    select: Callable[[dict[str, Any], PulledStep], list[tf.Tensor]]
    packing: Packing
    pulls: list[DevicePull]
    function: Any
    captures: list[tf.Tensor]

    def __call__(self, handles: dict[int, tf.Tensor], outputs: dict[str, Any], pulled: PulledStep) -> None:
        """Sends what `device` needs of the compute phase's `outputs`, in a graph that finds variables by `handles`."""
        # The lock waits for them as the update does, and is not taken before they are there.
        flats = brought_to(self.device, self.packing.pack(self.select(outputs, pulled)))
        messages = [tensor for pull in self.pulls for tensor in pulled.messages[pull]]
        with tf.device(self.device):
            call_with(handles, self.function, self.captures, *messages, *flats)


@dataclass(frozen=True)
class PushPlan:
    """What a step changes on the ps tasks.

    `updates` are what the optimizers want applied, in order; `deltas` the variables that a difference is added to; `assigned`
    those that take a value; `tables` those of which the gradient has the rows that were asked for, by their `id`; `vectors`
    are what is updated in one piece.
    """

    updates: Sequence[Update]
    deltas: Sequence[ParameterServerVariable]
    assigned: Sequence[ParameterServerVariable]
    tables: dict[int, ParameterServerVariable]
    sparse_updates: str
    vectors: Sequence[Vector]

    def is_table(self, variable: ParameterServerVariable) -> bool:
        """Whether the gradient of `variable` has the rows that were asked for."""
        return id(variable) in self.tables

    def updated(self, update: Update) -> list[Part]:
        """The shards that an update changes."""
        changed = update.variables
        if update.optimizer.use_ema:
            # The moving averages follow every variable, also one without a gradient in this step.
            changed = [*changed, *(v for v in update.optimizer._trainable_variables if not self.is_table(v))]
        return list(dict.fromkeys(parts_of(changed)))


def build_pushes(plan: PushPlan, pulls: Sequence[DevicePull], mutex: Callable[[str], tf.Tensor]) -> list[DevicePush]:
    """One `DevicePush` per ps that a step changes.

    Args:
        plan: what the step changes.
        pulls: all pulls of the step.
        mutex: the lock of a device, by the device's name.
    """
    for update in plan.updates:
        for variable in update.variables:
            check_shards(update.optimizer, variable)
    parts = parts_of([*plan.deltas, *plan.assigned])
    for update in plan.updates:
        parts += plan.updated(update)
    devices = {part.storage.device for part in parts}
    return [_build_push(device, plan, [p for p in pulls if p.device == device], mutex) for device in sorted(devices)]


def _build_push(device: str, plan: PushPlan, pulls: list[DevicePull], mutex: Callable[[str], tf.Tensor]) -> DevicePush:
    def here(parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if part.storage.device == device]

    updates = [(i, u) for i, u in enumerate(plan.updates) if here(plan.updated(u))]
    vectors = {i: [vector for vector in plan.vectors if (vector.update, vector.device) == (i, device)] for i, _ in updates}
    in_vectors = {i: dict.fromkeys(part for vector in vectors[i] for part in vector.parts) for i, _ in updates}
    gradients = {i: [part for part in here(parts_of(u.variables)) if part not in in_vectors[i]] for i, u in updates}
    pulls = [pull for pull in pulls if any(part in pull.tables for parts in gradients.values() for part in parts)]
    deltas = [(i, part) for i, v in enumerate(plan.deltas) for part in here(parts_of([v]))]
    assigned = [(i, part) for i, v in enumerate(plan.assigned) for part in here(parts_of([v]))]

    def select(outputs: dict[str, Any], pulled: PulledStep) -> list[tf.Tensor]:
        tensors: list[tf.Tensor] = []
        for i, update in updates:
            sent = outputs["updates"][i]["tensors"]
            tensors += sent[: update.num_scalars]
            by_variable = {id(v): t for v, t in zip(update.variables, sent[update.num_scalars :], strict=True)}
            for part in [*in_vectors[i], *gradients[i]]:
                gradient = by_variable[id(part.variable)]
                request = pulled.requests[id(part.variable)] if plan.is_table(part.variable) else None
                tensors.append(part.of(gradient) if request is None else request.part(gradient, part.shard))
            if "applied" in outputs["updates"][i]:
                tensors.append(tf.cast(outputs["updates"][i]["applied"], tf.float32))
        tensors += [part.of(outputs["deltas"][i]) for i, part in deltas]
        return tensors + [part.of(outputs["assigned"][i]) for i, part in assigned]

    def packing(of_vectors: dict[int, list[tf.TensorSpec]]) -> Packing:
        specs: list[tf.TensorSpec] = []
        for i, update in updates:
            specs += [tf.TensorSpec(t.shape, t.dtype) for t in update.tensors[: update.num_scalars]]
            specs += of_vectors[i]
            specs += [rows_spec(part.variable) if plan.is_table(part.variable) else part.spec for part in gradients[i]]
            if update.applied is not None:
                specs.append(tf.TensorSpec([], tf.float32))
        return Packing([*specs, *(part.spec for _, part in [*deltas, *assigned])])

    sent = packing({i: [part.spec for part in parts] for i, parts in in_vectors.items()})
    # The same, with what is updated in one piece in one piece.
    received = packing({i: [vector.spec for vector in own] for i, own in vectors.items()})

    def take_in(*arguments: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        with tf.device(device):
            messages, flats = arguments[: len(pulls)], arguments[len(pulls) :]
            ids: dict[Part, tf.Tensor] = {}
            for pull, message in zip(pulls, messages, strict=True):
                ids.update(zip(pull.tables, pull.ids_in(message), strict=True))
            tensors = received.unpack(flats, [tf.size(ids[part]) for part in tables])
            with tf.control_dependencies(list(arguments)):
                lock = tf.raw_ops.MutexLock(mutex=mutex(device))
            start = len(graph.get_operations())
            with tf.control_dependencies([lock]):
                remaining = iter(tensors)
                for i, update in updates:
                    scalars = [next(remaining) for _ in range(update.num_scalars)]
                    of_vectors = [(vector, next(remaining)) for vector in vectors[i]]
                    of_parts = {part: next(remaining) for part in gradients[i]}
                    apply = _Apply(plan, update, scalars, of_vectors, of_parts, ids, device)
                    if update.applied is None:
                        apply()
                    else:
                        tf.cond(next(remaining) > 0, apply, lambda: None)
                for _, part in deltas:
                    part.storage.assign_add(next(remaining), read_value=False)
                for _, part in assigned:
                    part.storage.assign(next(remaining), read_value=False)
            done = [op for op in graph.get_operations()[start:] if op.op_def.is_stateful]
            with tf.control_dependencies(done):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    messages = [spec for pull in pulls for spec in pull.message_specs]
    tables = [part for i, _ in updates for part in gradients[i] if plan.is_table(part.variable)]
    function = tf.function(take_in, autograph=False).get_concrete_function(*messages, *sent.carrier_specs)
    return DevicePush(device, tables, select, sent, pulls, function, list(function.captured_inputs))


class _Apply:
    """What follows clipping in `Optimizer.apply`, for the shards on one ps.

    Args:
        plan: what the step changes.
        update: the `Optimizer.apply`.
        scalars: learning rate, shared state and, where it is sent, the scale of clipping.
        of_vectors: vectors and their gradients.
        gradients: those of other shards; of a table, those of its rows.
        ids: the places of these rows in the shard.
        device: the device of the ps.
    """

    def __init__(
        self,
        plan: PushPlan,
        update: Update,
        scalars: list[tf.Tensor],
        of_vectors: list[tuple[Vector, tf.Tensor]],
        gradients: dict[Part, tf.Tensor],
        ids: dict[Part, tf.Tensor],
        device: str,
    ) -> None:
        self._plan = plan
        self._update = update
        self._optimizer = update.optimizer
        self._of_vectors = of_vectors
        self._gradients = gradients
        self._ids = {part: places for part, places in ids.items() if part in gradients}
        self._device = device
        self._clip_scale = scalars[-1] if update.has_clip_scale else None
        shared = {id(v): t for v, t in zip(update.shared, scalars[1 : 1 + len(update.shared)], strict=True)}
        self._phase = Push(update.optimizer, scalars[0], shared)

    def __call__(self) -> None:
        in_vectors = {part for vector, _ in self._of_vectors for part in vector.parts}
        parts = [part for part in self._plan.updated(self._update) if part.storage.device == self._device]
        with variables.entering(self._phase):
            for vector, gradient in self._of_vectors:
                with self._phase.on_vector(vector):
                    self._step(vector.parts[0].variable, gradient)
            for part in (part for part in parts if part not in in_vectors):
                gradient, rows = self._gradients.get(part), None
                if part in self._ids:
                    if updates_rows(self._optimizer, part.variable, self._plan.sparse_updates):
                        rows = _ShardRows(part, self._ids[part])
                    else:
                        gradient = tf.math.unsorted_segment_sum(gradient, self._ids[part], part.storage.shape[0])
                with self._phase.on(part, rows):
                    self._update_part(part.variable, gradient)

    def _update_part(self, variable: ParameterServerVariable, gradient: tf.Tensor | None) -> None:
        if gradient is not None and self._optimizer.gradient_accumulation_steps:
            self._accumulate(variable, gradient)
        elif gradient is not None:
            self._step(variable, gradient)
        if self._optimizer.use_ema:
            self._move_average(variable)
        if gradient is not None and variable.constraint is not None:
            variable.assign(variable.constraint(variable))

    def _step(self, variable: ParameterServerVariable, gradient: tf.Tensor) -> None:
        self._optimizer._apply_weight_decay([variable])
        self._optimizer.update_step(gradient, variable, self._phase.learning_rate)

    def _accumulate(self, variable: ParameterServerVariable, gradient: tf.Tensor) -> None:
        optimizer = self._optimizer
        steps = optimizer.gradient_accumulation_steps
        accumulator = optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]

        def accumulate() -> None:
            accumulator.assign_add(gradient)

        def update() -> None:
            mean = (gradient + accumulator) / steps
            mean = optimizer._clip_gradients([mean])[0] if self._clip_scale is None else mean * self._clip_scale
            self._step(variable, mean)
            accumulator.assign(tf.zeros_like(gradient))

        tf.cond(tf.equal((optimizer._iterations.value + 1) % steps, 0), update, accumulate)

    def _move_average(self, variable: ParameterServerVariable) -> None:
        # As `BaseOptimizer._update_model_variables_moving_average`, which goes through all variables wherever they are.
        optimizer = self._optimizer
        average = optimizer._model_variables_moving_average[optimizer._get_variable_index(variable)]
        if average is None:
            return
        frequency = optimizer.ema_overwrite_frequency
        iterations = tf.convert_to_tensor(optimizer.iterations)
        momentum = tf.cast(iterations != 0, variable.dtype) * optimizer.ema_momentum
        average.assign(momentum * average + (1 - momentum) * variable)
        if frequency:
            variable.assign(tf.where((iterations + 1) % frequency == 0, average, variable))
