"""Small variables laid end to end in fused variables, for as long as steps are in flight.

Starting an operation on a small tensor costs a ps more than the operation, and an update is some
fifteen operations per variable. An elementwise optimizer does not see where one variable ends and
the next begins. So variables of a ps that are updated in the same way are laid end to end, and are
pulled and updated as one.

Fused variables hold the values only between `FusedVariables.load` and `FusedVariables.store`. A
`flights.Flight` calls both. Code that reads a variable while no step is in flight (see
`variables.wait_for_steps`) finds the value in the variable.
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
from kerasps.variables.placing.placement import SMALL_BYTES

_Variables = Collection[ParameterServerVariable]


@dataclass(frozen=True, eq=False)
class _Layout:
    """The place of shards in a fused variable that may not be made yet."""

    update: int  # the number of the `Optimizer.apply` that changes them
    optimizer: keras.optimizers.Optimizer
    device: str  # the device of the ps
    shards: list[Shard]  # the shards that are laid end to end
    dtypes: tuple[tf.DType, ...]  # the dtypes of the values and of their slots

    def is_same(self, other: _Layout) -> bool:
        """Return True if a fused variable of the other layout serves this one."""

        def key(layout: _Layout) -> Any:
            shards = [(id(s.variable), s.index, id(s.storage)) for s in layout.shards]
            return layout.update, id(layout.optimizer), layout.device, shards, layout.dtypes

        return bool(key(self) == key(other))


@dataclass(frozen=True, eq=False)
class FusedVariable(_Layout):
    """Shards on one ps, laid end to end, and their slots likewise."""

    values: NamedVariable  # their elements
    slots: list[NamedVariable]  # the elements of their first slots, of their second ones, and so on

    @property
    def spec(self) -> WireSpec:
        """The spec of the values, and of a gradient with respect to them, as they are sent."""
        wire_dtype = self.shards[0].variable.wire_dtype
        return WireSpec(self.values.shape, self.values.dtype, wire_dtype=wire_dtype)

    def stand_ins(self) -> ByIdentity[ParameterServerVariable, tf.Variable]:
        """Return the fused storages of the first variable and its slots, to update all at once."""
        first = self.shards[0].variable
        slots = slots_of(self.optimizer)[self.optimizer._get_variable_index(first)]
        return ByIdentity([(first, self.values), *zip(slots, self.slots, strict=True)])

    def moves(self) -> Iterator[tuple[tf.Variable, list[tf.Variable]]]:
        """Return each storage of the fused variable, and the storages of its elements."""
        optimizer, slots = self.optimizer, slots_of(self.optimizer)
        yield self.values, [shard.storage for shard in self.shards]
        for number, fused_slot in enumerate(self.slots):
            slot_shards = [
                Shard(slots[optimizer._get_variable_index(s.variable)][number], s.index)
                for s in self.shards
            ]
            yield fused_slot, [shard.storage for shard in slot_shards]


class FusedVariables:
    """The fused variables of a step.

    Steps of a model for batches of different shapes share them: a step graph names them, so a step
    that is made anew finds its graph again (see `running/kept_graphs.py`).

    Args:
        before: the fused variables of another step of the model; None for none.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        read: _Variables,
        assigned: _Variables,
        before: FusedVariables | None = None,
    ) -> None:
        layouts = [
            layout
            for number, update in enumerate(updates)
            for layout in _layouts(number, update, _fusible(updates, number, read, assigned))
        ]
        if before is not None and _are_same(layouts, before.all):
            self.all: list[FusedVariable] = before.all  # the fused variables, on any ps
            self._loads: dict[str, Any] = before._loads
            self._stores: dict[str, Any] = before._stores
            return
        self.all = [_fused(layout) for layout in layouts]
        by_device: dict[str, list[FusedVariable]] = {}
        for fused in self.all:
            by_device.setdefault(fused.device, []).append(fused)
        self._loads = {device: _trace(_load, fused) for device, fused in by_device.items()}
        self._stores = {device: _trace(_store, fused) for device, fused in by_device.items()}

    def load(self) -> None:
        """Copy the variables into the fused ones on each ps. Call before steps are sent."""
        _call_all(self._loads)

    def store(self) -> None:
        """Copy the fused variables back. Call when no step is in flight.

        Until then, the variables themselves are stale.
        """
        _call_all(self._stores)


def _are_same(layouts: Sequence[_Layout], others: Sequence[_Layout]) -> bool:
    pairs = zip(layouts, others, strict=False)
    return len(layouts) == len(others) and all(ours.is_same(its) for ours, its in pairs)


def _fusible(
    updates: Sequence[Update], number: int, read: _Variables, assigned: _Variables
) -> list[ParameterServerVariable]:
    """Return the variables of an update that the step reads, and changes only by this update.

    No other part of the step uses their slots.
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


def _layouts(
    number: int, update: Update, variables: Sequence[ParameterServerVariable]
) -> list[_Layout]:
    """Return the layouts of an update, each of shards with one placement and update."""
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
        _Layout(number, optimizer, device, shards, dtypes)
        for (device, dtypes, *_), shards in groups.items()
        if len(shards) > 1
    ]


def _fused(layout: _Layout) -> FusedVariable:
    length = sum(shard.spec.shape.num_elements() for shard in layout.shards)
    with tf.init_scope(), tf.device(layout.device):
        values, *slots = [
            NamedVariable(None, shape=[length], dtype=dtype, trainable=False, name="fused")
            for dtype in layout.dtypes
        ]
    return FusedVariable(**vars(layout), values=values, slots=slots)


def _load(fused: tf.Variable, storages: list[tf.Variable]) -> None:
    values = [_reshaped(_read(storage), storage.shape, [-1]) for storage in storages]
    _assign(fused, tf.concat(values, 0))


def _store(fused: tf.Variable, storages: list[tf.Variable]) -> None:
    values = tf.split(_read(fused), [storage.shape.num_elements() for storage in storages])
    for storage, value in zip(storages, values, strict=True):
        _assign(storage, _reshaped(value, storage.shape, storage.shape))


# A large model calls each of these a thousand times, and TensorFlow's methods take several times as
# long to add the same operations to a graph.


def _reshaped(
    value: tf.Tensor, shape: tf.TensorShape, new_shape: tf.TensorShape | list[int]
) -> tf.Tensor:
    """Return elements in another shape; a vector, the usual case, is returned unchanged."""
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
    move: Callable[[tf.Variable, list[tf.Variable]], None], all_fused: list[FusedVariable]
) -> Any:
    """Return the concrete function that moves all values of one ps and returns a constant."""

    def move_all() -> tf.Tensor:
        with tf.device(all_fused[0].device):
            for fused in all_fused:
                for values, storages in fused.moves():
                    move(values, storages)
            # TensorFlow does not wait for a remote call that returns nothing.
            return tf.constant(0)

    return tf.function(move_all, autograph=False).get_concrete_function()


def _call_all(functions: Mapping[str, Callable[[], object]]) -> None:
    """Call each function on its ps, side by side.

    Raises the first error after all calls have ended.
    """
    errors: list[Exception] = []

    def attempt(call: Callable[[], object]) -> Any:
        try:
            return call()
        except tf.errors.OpError as exc:
            errors.append(exc)

    def on(device: str, function: Callable[[], object]) -> Any:
        # Called on its ps, the function leaves nothing there when it is deleted; a remote call from
        # here would.
        with tf.device(device):
            return persist(function)

    for done in [
        attempt(functools.partial(on, device, function)) for device, function in functions.items()
    ]:
        if done is not None:
            attempt(functools.partial(persist, functools.partial(fetch, [done])))
    if errors:
        raise errors[0]
