"""Small variables gathered on few ps, for as long as steps are in flight.

A step sends each ps that holds something of it a message and takes one, and what these cost worker
and ps does not depend on how little is in them. So what is small goes where the step goes anyway:
to a ps of its larger tables, or of what is large itself, and where there is none, to one ps.

As with fused variables (`fused.py`), which are made of what was gathered, values are there between
`GatheredVariables.load` and `GatheredVariables.store` only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from kerasps.runtime.calls import persist
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.fetching import fetch, sent
from kerasps.step.layout.fused import MAX_BYTES_OF_A_VARIABLE
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.records.packing import Packing
from kerasps.step.updates.update import Update
from kerasps.variables import NamedVariable, ParameterServerVariable, shards_in, slots_of
from kerasps.variables.chunks import num_bytes
from kerasps.variables.phase import lying_elsewhere

# To move so many bytes takes about as long as the messages to one more ps.
MAX_BYTES = 2**20
# The largest table that is gathered, in units of what is no table yet: who says by
# `table_min_bytes` that all are tables wants them where they are.
MAX_TABLE = 16

_Variables = Collection[ParameterServerVariable]


@dataclass(frozen=True, eq=False)
class _Move:
    """A shard on one ps, and what holds its value on another while steps are in flight.

    Attributes:
        home: the storage of the shard.
        stand_in: what holds the value.
        returns: whether steps may change it.
    """

    home: tf.Variable
    stand_in: NamedVariable
    returns: bool


class GatheredVariables:
    """The variables of a step that lie on another ps while steps are in flight.

    Args:
        updates: what the step's optimizers apply, in order.
        read: the variables that the step reads whole.
        deltas: those that a difference is added to.
        assigned: those that take a value.
        tables: those of which it reads rows.
        table_min_bytes: the strategy's argument of that name. Tables of more than 16 times as much
            stay where they are.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        read: _Variables,
        deltas: _Variables,
        assigned: _Variables,
        tables: _Variables,
        table_min_bytes: int,
    ) -> None:
        families = _families(updates, [*read, *deltas, *assigned, *tables])
        updated = IdentitySet(v for update in updates for v in update.variables)
        set_by_steps = IdentitySet([*updated, *assigned])
        max_bytes = MAX_TABLE * table_min_bytes
        small = IdentitySet(
            v
            for v in families
            if _may_move(v, may_be_scalar=v in set_by_steps)
            and (v not in tables or num_bytes(v.storage) <= max_bytes)
        )
        self._devices = _Devices([v for v in families if v not in small], small)
        self._shards = ByIdentity[ParameterServerVariable, tuple[tf.Variable, ...]]()
        moves: list[_Move] = []
        for variable in small:
            for member in [variable, *families[variable]]:
                returns = member is not variable or variable in set_by_steps or variable in deltas
                moves += self._move(member, returns=returns)
        self._loads = _copies((move.home, move.stand_in) for move in moves)
        self._stores = _copies((move.stand_in, move.home) for move in moves if move.returns)

    def _move(self, variable: ParameterServerVariable, *, returns: bool) -> list[_Move]:
        """Have a variable lie where it is to be in flight; return which shards of it move."""
        shards, moves = list(variable.shards), []
        for index, home in enumerate(shards):
            device = self._devices.of(home.device)
            if device != home.device:
                with tf.init_scope(), tf.device(device):
                    stand_in = NamedVariable(
                        None, shape=home.shape, dtype=home.dtype, trainable=False, name="gathered"
                    )
                moves.append(_Move(home, stand_in, returns))
                shards[index] = stand_in
        if moves:
            self._shards[variable] = tuple(shards)
        return moves

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """In this context, variables have the shards that they have while steps are in flight.

        Thread: acts on this thread alone.
        """
        return lying_elsewhere(self._shards)

    def load(self) -> None:
        """Copy what is gathered to where it is in flight. Call before steps are sent."""
        _carry_out(self._loads)

    def store(self) -> None:
        """Copy what steps may have changed back. Call when no step is in flight any more.

        Until then, the variables themselves are stale.
        """
        _carry_out(self._stores)


class _Devices:
    """Where shards are while steps are in flight, by where they are otherwise.

    Args:
        staying: the variables that stay where they are.
        small: those that may move.
    """

    def __init__(self, staying: _Variables, small: _Variables) -> None:
        held: dict[str, int] = {}
        for shard in shards_in(small):
            held[shard.device] = held.get(shard.device, 0) + num_bytes(shard.storage)
        by_bytes = sorted(held, key=lambda device: (-held[device], device))
        kept = {shard.device for shard in shards_in(staying)} or set(by_bytes[:1])
        if sum(held.values()) > MAX_BYTES:
            kept.update(by_bytes)
        self._kept = kept
        self._goal = next((device for device in by_bytes if device in kept), min(kept, default=""))

    def of(self, device: str) -> str:
        """Return where a shard is in flight that is on `device` otherwise."""
        return device if device in self._kept else self._goal


class _Copies:
    """Copies of variables on one ps to variables on another, by way of this process.

    A function that ran on both would leave a part of it on the second (see `kept_graphs.py`).

    Args:
        pairs: what is copied, on one ps, and where to, on one other.
    """

    def __init__(self, pairs: Sequence[tuple[tf.Variable, tf.Variable]]) -> None:
        sources, targets = zip(*pairs, strict=True)
        self._source, self._target = str(sources[0].device), str(targets[0].device)
        packing = Packing([tf.TensorSpec(source.shape, source.dtype) for source in sources])

        def take() -> list[tf.Tensor]:
            with tf.device(self._source):
                return packing.pack([source.read_value() for source in sources])

        def put(*flats: tf.Tensor) -> tf.Tensor:
            with tf.device(self._target):
                for target, value in zip(targets, packing.unpack(flats), strict=True):
                    target.assign(value, read_value=False)
                # A remote call that returns nothing is not waited for.
                return tf.constant(0)

        self._take = tf.function(take, autograph=False).get_concrete_function()
        self._put = tf.function(put, autograph=False).get_concrete_function(*packing.carrier_specs)

    def take(self) -> list[tf.Tensor]:
        """Return the values, on the ps that has them."""
        with tf.device(self._source):
            return list(self._take())

    def put(self, flats: Sequence[np.ndarray]) -> tf.Tensor:
        """Assign the values that `take` returned; return what is there when that is done."""
        with tf.device(COORDINATOR_CPU):
            tensors = [tf.constant(flat) for flat in flats]
        with tf.device(self._target):
            done: tf.Tensor = self._put(*sent(tensors))
            return done


def _copies(pairs: Iterable[tuple[tf.Variable, tf.Variable]]) -> list[_Copies]:
    between: dict[tuple[str, str], list[tuple[tf.Variable, tf.Variable]]] = {}
    for source, target in pairs:
        between.setdefault((source.device, target.device), []).append((source, target))
    return [_Copies(own) for own in between.values()]


def _carry_out(all_copies: Sequence[_Copies]) -> None:
    """Do all copies, side by side."""
    taken = [persist(copies.take) for copies in all_copies]
    flats = iter(persist(functools.partial(fetch, [flat for own in taken for flat in own])))
    values = [[next(flats) for _ in own] for own in taken]
    done = [
        persist(functools.partial(copies.put, own))
        for copies, own in zip(all_copies, values, strict=True)
    ]
    persist(functools.partial(fetch, done))


def _families(
    updates: Sequence[Update], touched: Iterable[ParameterServerVariable]
) -> Mapping[ParameterServerVariable, list[ParameterServerVariable]]:
    """Return the variables of a step, each with its slots, which an update needs beside it."""
    slots = ByIdentity[ParameterServerVariable, list[ParameterServerVariable]]()
    owners = ByIdentity[ParameterServerVariable, ParameterServerVariable]()
    members = [*(v for update in updates for v in update.variables), *touched]
    for optimizer in IdentitySet(update.optimizer for update in updates):
        trained = optimizer._trainable_variables
        for variable, own in zip(trained, slots_of(optimizer), strict=True):
            slots.setdefault(variable, []).extend(own)
            owners.update((slot, variable) for slot in own)
        if optimizer.use_ema:  # whose averages follow what has no gradient too
            members += trained
    return ByIdentity((owners.get(v, v), slots.get(owners.get(v, v), [])) for v in members)


def _may_move(variable: ParameterServerVariable, *, may_be_scalar: bool) -> bool:
    """Return whether a variable is small, and may lie elsewhere in flight.

    Scalars that steps do not set themselves, counters and rates, are looked at and set from other
    threads while steps run, so they stay.
    """
    is_small = all(num_bytes(shard) <= MAX_BYTES_OF_A_VARIABLE for shard in variable.shards)
    return is_small and (may_be_scalar or len(variable.shape) > 0)
