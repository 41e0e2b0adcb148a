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
from typing import Any, NamedTuple

import tensorflow as tf

from kerasps import variables
from kerasps.compute import Update
from kerasps.coupled import CoupledUpdate
from kerasps.optimizers import may_update_rows
from kerasps.packing import Packing, brought_to
from kerasps.parts import Part, parts_of
from kerasps.pull import DevicePull, PulledStep, rows_spec
from kerasps.storage import call_with
from kerasps.updating import UpdatePhase, ValueOf, finish, step
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


class Push(UpdatePhase):
    """The phase in which variables are their storage, and shared scalars what the worker sent (see `variables.Phase`)."""

    def __init__(self, optimizer: Any, learning_rate: tf.Tensor, shared: dict[int, tf.Tensor]) -> None:
        super().__init__(optimizer, learning_rate, shared)
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

    def held(self, variable: ParameterServerVariable) -> Any:
        if self._rows is not None and self._rows.holds(variable):
            return ValueOf(self._rows, variable)
        return self._storage(variable)

    def assign_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        if self._rows is not None and self._rows.holds(variable):
            self._rows.assign(variable, value)
        else:
            self._storage(variable).assign(value, read_value=False)

    def add_to_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        if self._rows is not None and self._rows.holds(variable):
            self._rows.assign(variable, self._rows.current(variable) + value)
        else:
            self._storage(variable).assign_add(value, read_value=False)

    def _storage(self, variable: ParameterServerVariable) -> tf.Variable:
        if id(variable) in self._stand_ins:
            return self._stand_ins[id(variable)]
        return variable.shards[self._shard if variable.sharding is not None else 0]


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
    parts = parts_of([*plan.deltas, *plan.assigned])
    for update in plan.updates:
        parts += plan.updated(update)
    devices = {part.storage.device for part in parts}
    return [_build_push(device, plan, [p for p in pulls if p.device == device], mutex) for device in sorted(devices)]


def _build_push(device: str, plan: PushPlan, pulls: list[DevicePull], mutex: Callable[[str], tf.Tensor]) -> DevicePush:
    contents = _Contents(plan, device)
    pulls = [pull for pull in pulls if set(contents.tables) & set(pull.tables)]
    sent, received = contents.sent_specs(), contents.received_specs()
    sent_packing, received_packing = Packing(tf.nest.flatten(sent)), Packing(tf.nest.flatten(received))

    def select(outputs: dict[str, Any], pulled: PulledStep) -> list[tf.Tensor]:
        return list(tf.nest.flatten(contents.select(outputs, pulled)))

    def take_in(*arguments: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        with tf.device(device):
            messages, flats = arguments[: len(pulls)], arguments[len(pulls) :]
            ids: dict[Part, tf.Tensor] = {}
            for pull, message in zip(pulls, messages, strict=True):
                ids.update(zip(pull.tables, pull.ids_in(message), strict=True))
            tensors = received_packing.unpack(flats, [tf.size(ids[part]) for part in contents.tables])
            with tf.control_dependencies(list(arguments)):
                lock = tf.raw_ops.MutexLock(mutex=mutex(device))
            start = len(graph.get_operations())
            with tf.control_dependencies([lock]):
                contents.apply(tf.nest.pack_sequence_as(received, tensors), ids)
            done = [op for op in graph.get_operations()[start:] if op.op_def.is_stateful]
            with tf.control_dependencies(done):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    messages = [spec for pull in pulls for spec in pull.message_specs]
    function = tf.function(take_in, autograph=False).get_concrete_function(*messages, *sent_packing.carrier_specs)
    return DevicePush(device, contents.tables, select, sent_packing, pulls, function, list(function.captured_inputs))


class _Message(NamedTuple):
    """What one ps is sent of a step: of each update, and the new values of other variables. Holds tensors, or their specs."""

    updates: list[_UpdateMessage]
    deltas: list[Any]
    assigned: list[Any]


class _UpdateMessage(NamedTuple):
    """What one ps is sent of an `Update`.

    `scalars` are its scalars, `of_vectors` the gradients of each vector (part by part as it is sent, in one piece as it is
    received), `gradients` those of other parts, `sent` what each of these needs of the whole variable, and `applied` whether
    the optimizer was applied, where that depends.
    """

    scalars: list[Any]
    of_vectors: list[Any]
    gradients: list[Any]
    sent: list[list[Any]]
    applied: list[Any]


class _Contents:
    """What a push to one ps is made of: selected and packed on the worker, carried out on the ps."""

    def __init__(self, plan: PushPlan, device: str) -> None:
        def here(variables: Sequence[ParameterServerVariable]) -> list[tuple[int, Part]]:
            parts = [(number, part) for number, v in enumerate(variables) for part in parts_of([v])]
            return [(number, part) for number, part in parts if part.storage.device == device]

        self._updates = [_DeviceUpdate(plan, number, device) for number in range(len(plan.updates))]
        self._updates = [update for update in self._updates if update.changed]
        self._deltas = here(plan.deltas)
        self._assigned = here(plan.assigned)
        self.tables = [part for update in self._updates for part in update.parts if plan.is_table(part.variable)]

    def sent_specs(self) -> _Message:
        """The specs of what `select` returns."""
        return self._specs(lambda vector: [part.spec for part in vector.parts])

    def received_specs(self) -> _Message:
        """The specs of what `apply` takes, which is laid out as what is sent."""
        return self._specs(lambda vector: vector.spec)

    def _specs(self, of_vector: Callable[[Vector], Any]) -> _Message:
        updates = [update.specs(of_vector) for update in self._updates]
        return _Message(updates, [part.spec for _, part in self._deltas], [part.spec for _, part in self._assigned])

    def select(self, outputs: dict[str, Any], pulled: PulledStep) -> _Message:
        """What the ps needs of the compute phase's `outputs`."""
        return _Message(
            [update.select(outputs, pulled) for update in self._updates],
            [part.of(outputs["deltas"][number]) for number, part in self._deltas],
            [part.of(outputs["assigned"][number]) for number, part in self._assigned],
        )

    def apply(self, message: _Message, ids: dict[Part, tf.Tensor]) -> None:
        """Changes what the ps holds; `ids` are the places of the rows that gradients of `tables` have."""
        for update, own in zip(self._updates, message.updates, strict=True):
            update.apply(own, ids)
        for (_, part), value in zip(self._deltas, message.deltas, strict=True):
            part.storage.assign_add(value, read_value=False)
        for (_, part), value in zip(self._assigned, message.assigned, strict=True):
            part.storage.assign(value, read_value=False)


class _DeviceUpdate:
    """One `Update`, as far as it changes what one ps holds.

    `vectors` are updated in one piece; `parts` are the other shards that have a gradient; `changed` are all shards.
    """

    def __init__(self, plan: PushPlan, number: int, device: str) -> None:
        self._plan = plan
        self._number = number
        self._update = plan.updates[number]
        self.changed = [part for part in plan.updated(self._update) if part.storage.device == device]
        self.vectors = [vector for vector in plan.vectors if (vector.update, vector.device) == (number, device)]
        in_vectors = {part for vector in self.vectors for part in vector.parts}
        own = parts_of(self._update.variables)
        self.parts = [part for part in own if part.storage.device == device and part not in in_vectors]
        self._rest = [part for part in self.changed if part not in in_vectors]

    def specs(self, of_vector: Callable[[Vector], Any]) -> _UpdateMessage:
        """The specs of a message, with those of a vector from `of_vector`."""
        update = self._update
        return _UpdateMessage(
            [tf.TensorSpec(t.shape, t.dtype) for t in update.tensors[: update.num_scalars]],
            [of_vector(vector) for vector in self.vectors],
            [rows_spec(part.variable) if self._plan.is_table(part.variable) else part.spec for part in self.parts],
            [coupled.specs_of(part) if (coupled := self._coupled(part)) else [] for part in self.parts],
            [] if update.applied is None else [tf.TensorSpec([], tf.float32)],
        )

    def select(self, outputs: dict[str, Any], pulled: PulledStep) -> _UpdateMessage:
        """The message, from the outputs of the compute phase."""
        own = outputs["updates"][self._number]
        tensors = self._update.of(own["tensors"])

        def gradient(part: Part) -> tf.Tensor:
            whole = tensors.gradients[id(part.variable)]
            if self._plan.is_table(part.variable):
                return pulled.requests[id(part.variable)].part(whole, part.shard)
            return part.of(whole)

        def sent(part: Part) -> list[tf.Tensor]:
            coupled = self._coupled(part)
            return coupled.sent_to(part, tensors.sent.get(id(part.variable), [])) if coupled else []

        return _UpdateMessage(
            tensors.scalars,
            [[gradient(part) for part in vector.parts] for vector in self.vectors],
            [gradient(part) for part in self.parts],
            [sent(part) for part in self.parts],
            [tf.cast(own["applied"], tf.float32)] if "applied" in own else [],
        )

    def apply(self, message: _UpdateMessage, ids: dict[Part, tf.Tensor]) -> None:
        """What follows clipping in `Optimizer.apply`, for the shards on this ps."""
        if message.applied:
            tf.cond(message.applied[0] > 0, lambda: self._carry_out(message, ids), lambda: None)
        else:
            self._carry_out(message, ids)

    def _carry_out(self, message: _UpdateMessage, ids: dict[Part, tf.Tensor]) -> None:
        update, scalars = self._update, message.scalars
        shared = {id(v): t for v, t in zip(update.shared, scalars[1 : 1 + len(update.shared)], strict=True)}
        phase = Push(update.optimizer, scalars[0], shared)
        clip_scale = scalars[-1] if update.has_clip_scale else None
        for vector, gradient in zip(self.vectors, message.of_vectors, strict=True):
            with variables.entering(phase), phase.on_vector(vector):
                step(phase, vector.parts[0].variable, gradient)
        gradients = dict(zip(self.parts, message.gradients, strict=True))
        sent = dict(zip(self.parts, message.sent, strict=True))
        for part in self._rest:
            gradient, rows = gradients.get(part), None
            if gradient is not None and part in ids:
                if self._updates_rows(part):
                    rows = _ShardRows(part, ids[part])
                else:
                    gradient = tf.math.unsorted_segment_sum(gradient, ids[part], part.storage.shape[0])
            coupled = self._coupled(part)
            if gradient is not None and rows is None and coupled is not None:
                coupled.apply(part, gradient, scalars, sent[part])
                continue
            with phase.on(part, rows):
                finish(phase, part.variable, gradient, clip_scale)

    def _coupled(self, part: Part) -> CoupledUpdate | None:
        """How the whole of a variable takes part in the update of a shard of it, where it may."""
        return None if part.variable.sharding is None else self._update.coupled.get(id(part.variable))

    def _updates_rows(self, part: Part) -> bool:
        coupled = self._update.coupled.get(id(part.variable))
        treats_rows_alone = coupled is None or not coupled.couples_rows
        return treats_rows_alone and may_update_rows(self._update.optimizer, self._plan.sparse_updates)
