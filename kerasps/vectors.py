"""Small variables as a few long vectors, for as long as steps are in flight.

To start an operation on a small tensor costs a ps more than the operation itself, and an update is some fifteen operations per
variable. Where one variable is updated like another, an elementwise optimizer does not see where one ends and the next begins:
so the variables of a ps, laid end to end, are updated as one, and pulled as they lie there.

The vectors hold the values between `Vectors.load` and `Vectors.store` only, both of which a `flights.Flight` calls: whoever
looks at a variable looks when no step is in flight (see `variables.come_to_rest`), and finds the value where it always is.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.compute import Update
from kerasps.fetch import fetch
from kerasps.optimizers import has_uniform_updates, slots_of
from kerasps.parts import Part, parts_of
from kerasps.storage import NamedVariable
from kerasps.variables import ParameterServerVariable

# An update of more elements takes longer than it takes to start, and vectors take memory.
MAX_BYTES_OF_A_VARIABLE = 2**18


@dataclass(frozen=True, eq=False)
class Vector:
    """Variables of one ps, laid end to end, and their slots likewise.

    `update` is the number of the `Optimizer.apply` that changes them, `parts` are the variables, `values` their elements, and
    `slots` those of their first slots, their second ones, and so on.
    """

    update: int
    device: str
    parts: list[Part]
    values: NamedVariable
    slots: list[NamedVariable]

    @property
    def spec(self) -> tf.TensorSpec:
        """Shape and dtype of the values, and of a gradient with respect to them."""
        return tf.TensorSpec(self.values.shape, self.values.dtype)

    def stand_ins(self, optimizer: Any) -> dict[int, tf.Variable]:
        """What stands for the first variable and its slots, by their `id`, when all are updated as if they were that one."""
        first = self.parts[0].variable
        own = slots_of(optimizer)[optimizer._get_variable_index(first)]
        return {id(first): self.values, **{id(slot): vector for slot, vector in zip(own, self.slots, strict=True)}}


class Vectors:
    """The vectors of a step.

    Args:
        updates: what the step's optimizers apply, in order.
        read: the `id`s of the variables that the step reads whole.
        assigned: the `id`s of those that it assigns.
    """

    def __init__(self, updates: Sequence[Update], read: Collection[int], assigned: Collection[int]) -> None:
        updated = Counter(id(variable) for update in updates for variable in update.variables)

        def fits(variable: ParameterServerVariable, slots: Sequence[ParameterServerVariable]) -> bool:
            # Its update is all that the step changes of it, and its slots are for the update alone.
            used = {id(slot) for slot in slots} & {*read, *assigned}
            return id(variable) in read and id(variable) not in assigned and updated[id(variable)] == 1 and not used

        self.all = [vector for number, update in enumerate(updates) for vector in _vectors_of(number, update, fits)]
        of_devices: dict[str, list[Vector]] = {}
        for vector in self.all:
            of_devices.setdefault(vector.device, []).append(vector)
        self._loads = {device: _trace(_load, vectors, updates) for device, vectors in of_devices.items()}
        self._stores = {device: _trace(_store, vectors, updates) for device, vectors in of_devices.items()}

    def load(self) -> None:
        """Takes the values of the variables; due before steps are sent."""
        _call_all(self._loads)

    def store(self) -> None:
        """Gives the values back to the variables; due when no step is in flight any more, before anyone looks at them."""
        _call_all(self._stores)


def _vectors_of(number: int, update: Update, fits: Callable[..., bool]) -> list[Vector]:
    optimizer = update.optimizer
    if not has_uniform_updates(optimizer):
        return []
    slots = slots_of(optimizer)
    groups: dict[Any, list[Part]] = {}
    for variable in update.variables:
        own = slots[optimizer._get_variable_index(variable)]
        if variable.constraint is not None or not fits(variable, own):
            continue
        decays = optimizer.weight_decay is not None and bool(optimizer._use_weight_decay(variable))
        for part in parts_of([variable]):
            if part.spec.shape.num_elements() * part.spec.dtype.size <= MAX_BYTES_OF_A_VARIABLE:
                dtypes = (part.spec.dtype, *(slot.storage.dtype for slot in own))
                groups.setdefault((str(part.storage.device), dtypes, decays), []).append(part)
    vectors = []
    for (device, dtypes, _), parts in groups.items():
        if len(parts) > 1:
            length = sum(part.spec.shape.num_elements() for part in parts)
            values, *own = [_uninitialized(device, length, dtype) for dtype in dtypes]
            vectors.append(Vector(number, device, parts, values, own))
    return vectors


def _uninitialized(device: str, length: int, dtype: tf.DType) -> NamedVariable:
    with tf.init_scope(), tf.device(device):
        return NamedVariable(None, shape=[length], dtype=dtype, trainable=False, name="vector")


def _load(vector: tf.Variable, storages: list[tf.Variable]) -> None:
    vector.assign(tf.concat([tf.reshape(storage.read_value(), [-1]) for storage in storages], 0), read_value=False)


def _store(vector: tf.Variable, storages: list[tf.Variable]) -> None:
    parts = tf.split(vector.read_value(), [storage.shape.num_elements() for storage in storages])
    for storage, part in zip(storages, parts, strict=True):
        storage.assign(tf.reshape(part, storage.shape), read_value=False)


def _trace(move: Callable[..., None], vectors: list[Vector], updates: Sequence[Update]) -> Any:
    """The concrete function that moves values into or out of the vectors of one ps, and returns when it is done."""

    def move_all() -> tf.Tensor:
        with tf.device(vectors[0].device):
            for vector in vectors:
                optimizer = updates[vector.update].optimizer
                slots = slots_of(optimizer)
                move(vector.values, [part.storage for part in vector.parts])
                for number, slot_vector in enumerate(vector.slots):
                    own = [(slots[optimizer._get_variable_index(p.variable)][number], p.shard) for p in vector.parts]
                    move(slot_vector, [slot.shards[shard] for slot, shard in own])
            return tf.constant(0)

    return tf.function(move_all, autograph=False).get_concrete_function()


def _call_all(functions: Mapping[str, Any]) -> None:
    """Calls each on its ps, side by side, and raises the first error when each has done what it can."""
    errors: list[Exception] = []

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except tf.errors.OpError as exc:
            errors.append(exc)

    def on(device: str, function: Any) -> Any:
        # Called on its ps, it leaves nothing there when it is deleted; what the coordinator calls there from here would stay.
        with tf.device(device):
            return function()

    # A remote call that returns nothing is not waited for.
    for done in [attempt(functools.partial(on, device, function)) for device, function in functions.items()]:
        if done is not None:
            attempt(functools.partial(fetch, [done]))
    if errors:
        raise errors[0]
