"""Small variables laid end to end in fused variables, for as long as steps are in flight.

To start an operation on a small tensor costs a ps more than the operation itself, and an update is
some fifteen operations per variable. Where one variable is updated like another, an elementwise
optimizer does not see where one ends and the next begins: so the variables of a ps, laid end to
end, are updated as one, and pulled as they lie there.

Fused variables hold the values between `FusedVariables.load` and `FusedVariables.store` only. A
`flights.Flight` calls both: whoever looks at a variable looks when no step is in flight (see
`variables.come_to_rest`), and finds the value where it always is.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kerasps.runtime.calls import persist
from kerasps.runtime.fetching import fetch
from kerasps.step.records.identity import ByIdentity
from kerasps.step.records.packing import WireSpec
from kerasps.step.updates.optimizers import has_uniform_updates
from kerasps.step.updates.update import Update
from kerasps.variables import NamedVariable, ParameterServerVariable, Shard, shards_in, slots_of
from kerasps.variables.placement import SMALL_BYTES

_Variables = Collection[ParameterServerVariable]


@dataclass(frozen=True, eq=False)
class FusedVariable:
    """Shards on one ps, laid end to end, and their slots likewise.

    Attributes:
        update: the number of the `Optimizer.apply` that changes them.
        device: the device of the ps.
        shards: what is laid end to end.
        values: their elements.
        slots: the elements of their first slots, of their second ones, and so on.
    """

    update: int
    device: str
    shards: list[Shard]
    values: NamedVariable
    slots: list[NamedVariable]

    @property
    def spec(self) -> WireSpec:
        """The spec of the values, and of a gradient with respect to them, as they are sent."""
        wire_dtype = self.shards[0].variable.wire_dtype
        return WireSpec(self.values.shape, self.values.dtype, wire_dtype=wire_dtype)

    def stand_ins(
        self, optimizer: keras.optimizers.Optimizer
    ) -> ByIdentity[ParameterServerVariable, tf.Variable]:
        """Return what stands for the first variable and its slots, to update all as if that one."""
        first = self.shards[0].variable
        slots = slots_of(optimizer)[optimizer._get_variable_index(first)]
        return ByIdentity([(first, self.values), *zip(slots, self.slots, strict=True)])

    def moves(
        self, optimizer: keras.optimizers.Optimizer
    ) -> Iterator[tuple[tf.Variable, list[tf.Variable]]]:
        """Return each variable of this one, and the storages that its elements belong to."""
        slots = slots_of(optimizer)
        yield self.values, [shard.storage for shard in self.shards]
        for number, fused_slot in enumerate(self.slots):
            slot_shards = [
                Shard(slots[optimizer._get_variable_index(s.variable)][number], s.index)
                for s in self.shards
            ]
            yield fused_slot, [shard.storage for shard in slot_shards]


class FusedVariables:
    """The fused variables of a step.

    Args:
        updates: what the step's optimizers apply, in order.
        read: the variables that the step reads whole.
        assigned: the variables that it assigns.

    Attributes:
        all: the fused variables, on any ps.
    """

    def __init__(self, updates: Sequence[Update], read: _Variables, assigned: _Variables) -> None:
        self.all = [
            fused
            for number, update in enumerate(updates)
            for fused in _fuse(number, update, _fusible(updates, number, read, assigned))
        ]
        by_device: dict[str, list[FusedVariable]] = {}
        for fused in self.all:
            by_device.setdefault(fused.device, []).append(fused)
        self._loads = {
            device: _trace(_load, variables, updates) for device, variables in by_device.items()
        }
        self._stores = {
            device: _trace(_store, variables, updates) for device, variables in by_device.items()
        }

    def load(self) -> None:
        """Copy the variables into the fused ones on each ps. Call before steps are sent."""
        _call_all(self._loads)

    def store(self) -> None:
        """Copy the fused variables back. Call when no step is in flight any more.

        Until then, the variables themselves are stale.
        """
        _call_all(self._stores)


def _fusible(
    updates: Sequence[Update], number: int, read: _Variables, assigned: _Variables
) -> list[ParameterServerVariable]:
    """Return the variables of an update of which it is all that the step changes.

    Their slots are for the update alone.
    """
    times_updated = Counter(id(v) for update in updates for v in update.variables)
    optimizer = updates[number].optimizer
    variables, slots = updates[number].variables, slots_of(optimizer)

    def is_fusible(variable: ParameterServerVariable) -> bool:
        variable_slots = slots[optimizer._get_variable_index(variable)]
        is_alone = variable not in assigned and times_updated[id(variable)] == 1
        is_seen = any(slot in read or slot in assigned for slot in variable_slots)
        return variable in read and is_alone and not is_seen and variable.constraint is None

    return [v for v in variables if is_fusible(v)]


def _fuse(
    number: int, update: Update, variables: Sequence[ParameterServerVariable]
) -> list[FusedVariable]:
    """Return the fused variables of an update: of shards that lie, and are updated, alike."""
    optimizer = update.optimizer
    if not has_uniform_updates(optimizer):
        return []
    slots = slots_of(optimizer)
    groups: dict[Any, list[Shard]] = {}
    for variable in variables:
        variable_slots = slots[optimizer._get_variable_index(variable)]
        decays = optimizer.weight_decay is not None and bool(optimizer._use_weight_decay(variable))
        for shard in shards_in([variable]):
            if shard.spec.shape.num_elements() * shard.spec.dtype.size <= SMALL_BYTES:
                dtypes = (shard.spec.dtype, *(slot.storage.dtype for slot in variable_slots))
                key = shard.device, dtypes, decays, variable.wire_dtype
                groups.setdefault(key, []).append(shard)
    return [
        _fused(number, device, shards, dtypes)
        for (device, dtypes, *_), shards in groups.items()
        if len(shards) > 1
    ]


def _fused(
    number: int, device: str, shards: list[Shard], dtypes: Sequence[tf.DType]
) -> FusedVariable:
    length = sum(shard.spec.shape.num_elements() for shard in shards)
    with tf.init_scope(), tf.device(device):
        values, *slots = [
            NamedVariable(None, shape=[length], dtype=dtype, trainable=False, name="fused")
            for dtype in dtypes
        ]
    return FusedVariable(number, device, shards, values, slots)


def _load(fused: tf.Variable, storages: list[tf.Variable]) -> None:
    values = [_reshaped(_read(storage), storage.shape, [-1]) for storage in storages]
    _assign(fused, tf.concat(values, 0))


def _store(fused: tf.Variable, storages: list[tf.Variable]) -> None:
    values = tf.split(_read(fused), [storage.shape.num_elements() for storage in storages])
    for storage, value in zip(storages, values, strict=True):
        _assign(storage, _reshaped(value, storage.shape, storage.shape))


# A large model has a thousand of each, and TensorFlow's methods take several times as long to add
# the same operations to a graph.


def _reshaped(
    value: tf.Tensor, shape: tf.TensorShape, new_shape: tf.TensorShape | list[int]
) -> tf.Tensor:
    """Return elements in another shape; those of a vector, as most are, stay as they are."""
    return value if shape.rank == 1 else tf.raw_ops.Reshape(tensor=value, shape=new_shape)


def _read(storage: tf.Variable) -> tf.Tensor:
    if not isinstance(storage, NamedVariable):
        return storage.read_value()
    return tf.raw_ops.ReadVariableOp(resource=storage.handle, dtype=storage.dtype)


def _assign(storage: tf.Variable, value: tf.Tensor) -> None:
    if isinstance(storage, NamedVariable):
        tf.raw_ops.AssignVariableOp(resource=storage.handle, value=value)
    else:
        storage.assign(value, read_value=False)


def _trace(
    move: Callable[[tf.Variable, list[tf.Variable]], None],
    all_fused: list[FusedVariable],
    updates: Sequence[Update],
) -> Any:
    """Return the concrete function that moves all values of one ps, and then returns something."""

    def move_all() -> tf.Tensor:
        with tf.device(all_fused[0].device):
            for fused in all_fused:
                for values, storages in fused.moves(updates[fused.update].optimizer):
                    move(values, storages)
            # A remote call that returns nothing is not waited for.
            return tf.constant(0)

    return tf.function(move_all, autograph=False).get_concrete_function()


def _call_all(functions: Mapping[str, Callable[[], object]]) -> None:
    """Call each function on its ps, side by side.

    Raises the first error when each has done what it can.
    """
    errors: list[Exception] = []

    def attempt(call: Callable[[], object]) -> Any:
        try:
            return call()
        except tf.errors.OpError as exc:
            errors.append(exc)

    def on(device: str, function: Callable[[], object]) -> Any:
        # Called on its ps, it leaves nothing there when it is deleted; what the coordinator calls
        # there from here would stay.
        with tf.device(device):
            return persist(function)

    for done in [
        attempt(functools.partial(on, device, function)) for device, function in functions.items()
    ]:
        if done is not None:
            attempt(functools.partial(persist, functools.partial(fetch, [done])))
    if errors:
        raise errors[0]
