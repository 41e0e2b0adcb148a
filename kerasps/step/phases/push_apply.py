"""The application of a push on a ps: the optimizer's own `update_step`, beside its slots.

It runs on each shard of a variable separately: on the whole shard, or, for a table that was read
by rows, on these rows of the variable and its slots. Shards that it treats alike are joined to one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps.step.contract.change import Change
from kerasps.step.phases.push_message import (
    DeviceChanges,
    DeviceUpdate,
    PushMessage,
    ShardChange,
    UpdateMessage,
)
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.rows.groups import ShardRun
from kerasps.step.rows.row_places import RowPlaces
from kerasps.step.updates.compiled import CompiledUpdates
from kerasps.step.updates.fused import FusedVariable
from kerasps.step.updates.kernels import has_kernel, update_by_kernel
from kerasps.step.updates.updating import Scalars, UpdatePhase, ValueOf, finish
from kerasps.variables import ParameterServerVariable, Shard, entering, slots_of
from kerasps.variables.rows.pooled_rows import store_of
from kerasps.variables.rows.row_store import RowStore


class _Rows:
    """Some rows of shards of tables and of their slots, which an update treats as one variable."""

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, runs: Sequence[ShardRun], places: RowPlaces
    ) -> None:
        self._runs = runs
        self._shards = shards = [shard for run in runs for shard in run.shards]
        self._places = [run.places(places[run]) for run in runs]
        # A single run needs no division.
        self._counts = places.counts(runs) if len(runs) > 1 else None
        self._rows: ByIdentity[ParameterServerVariable, tf.Tensor] = ByIdentity()
        self._changed: IdentitySet[ParameterServerVariable] = IdentitySet()
        self._alike = ByIdentity[ParameterServerVariable, Sequence[ParameterServerVariable]]()
        if len(shards) > 1:
            slots, tables = slots_of(optimizer), [shard.variable for shard in shards]
            table_slots = [slots[optimizer._get_variable_index(table)] for table in tables]
            self._alike.update(
                [
                    (tables[0], tables),
                    *zip(table_slots[0], zip(*table_slots, strict=True), strict=True),
                ]
            )

    def holds(self, variable: ParameterServerVariable) -> bool:
        """Return True if `variable` is the first table or a slot of its shape."""
        if self._alike:
            return variable in self._alike
        return bool(variable.storage.shape == self._shards[0].variable.storage.shape)

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the current rows of `variable` and of its counterparts in the other tables."""
        if variable not in self._rows:
            gathered = [store.gather(places) for store, places in self._stores(variable)]
            rows = gathered[0] if len(gathered) == 1 else tf.concat(gathered, 0)
            rows.set_shape([None, *variable.storage.shape[1:]])
            self._rows[variable] = rows
        return self._rows[variable]

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Set the rows of `variable` and of its counterparts in the other tables."""
        self._rows[variable] = value
        self._changed.add(variable)

    def write(self) -> None:
        """Write the rows that have changed."""
        for variable in self._changed:
            rows = [self._rows[variable]]
            if self._counts is not None:
                rows = tf.split(rows[0], self._counts, num=len(self._runs))
            for (store, places), part in zip(self._stores(variable), rows, strict=True):
                store.scatter(places, part)

    def _stores(self, variable: ParameterServerVariable) -> list[tuple[RowStore, tf.Tensor]]:
        """Return the store of each run of `variable` and its counterparts, and the places."""
        index, remaining = self._shards[0].index, iter(self._alike.get(variable, [variable]))
        stores = []
        for run, places in zip(self._runs, self._places, strict=True):
            members = [next(remaining) for _ in run.shards]
            store = store_of(members[0].shards[index])
            # A slot may be stored separately even if its table is in a pool.
            move = store.begin - run.store.begin
            stores.append((store, places + move if move else places))
        return stores


class OnDevice(UpdatePhase):
    """The phase in which a variable resolves to its storage on a ps (see `variables.Phase`)."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        scalars: Scalars,
        shared: list[ParameterServerVariable],
        *,
        compiles: bool,
    ) -> None:
        super().__init__(optimizer, scalars, shared)
        self._compiled = CompiledUpdates(self) if compiles else None
        self._index = 0
        self._rows: _Rows | None = None
        self._stand_ins: ByIdentity[ParameterServerVariable, tf.Variable] = ByIdentity()

    @contextlib.contextmanager
    def on_fused(self, fused: FusedVariable) -> Iterator[None]:
        """In this context, replace the first variable of `fused` by the fused variable."""
        self._stand_ins = fused.stand_ins()
        try:
            yield
        finally:
            self._stand_ins = ByIdentity()

    @contextlib.contextmanager
    def on(self, shard: Shard, rows: _Rows | None = None) -> Iterator[None]:
        """In this context, replace a variable by `shard`, or by some rows of it.

        At the end, write new rows.
        """
        self._index, self._rows = shard.index, rows
        try:
            yield
            if rows is not None:
                rows.write()
        finally:
            self._index, self._rows = 0, None

    def decay_and_update(self, variable: ParameterServerVariable, gradient: tf.Tensor) -> None:
        make_update = super().decay_and_update
        compiled = None if has_kernel(self.optimizer) else self._compiled
        if compiled is None or not compiled.update(variable, gradient, make_update):
            make_update(variable, gradient)

    def update(self, variable: ParameterServerVariable, gradient: tf.Tensor) -> None:
        if not update_by_kernel(self, variable, gradient):
            super().update(variable, gradient)

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
        if variable in self._stand_ins:
            return self._stand_ins[variable]
        return variable.shards[self._index if variable.sharding is not None else 0]


def apply(changes: DeviceChanges, message: PushMessage, places: RowPlaces) -> None:
    """Apply a push to the values on the ps. Call while its lock is held."""
    states = list(zip(changes.states, message.changes, strict=True))

    def apply_states(first: int, last: int) -> None:
        """Apply the changes that come after `first` to `last` updates of the step."""
        averages: dict[Hashable, list[tuple[ShardChange, Change]]] = {}
        for state, sent in states:
            if first <= state.change.after <= last:
                key = state.key_of_averages
                if key is None:
                    state.apply(sent)
                else:
                    averages.setdefault(key, []).append((state, sent))
        for alike in averages.values():
            _apply_averages(*zip(*alike, strict=True))

    done = 0
    for update, update_message in zip(changes.updates, message.updates, strict=True):
        apply_states(done, update.number)
        _apply_update(update, update_message, places)
        done = update.number + 1
    apply_states(done, len(changes.changes.updates))


def _apply_averages(states: Sequence[ShardChange], sent: Sequence[Change]) -> None:
    """Apply moving averages of one factor, laid end to end: operations cost more than elements."""
    storages = [state.shard.storage for state in states]
    change = states[0].change.numbers._replace(addend=tf.concat([c.addend for c in sent], 0))
    new = change.of(tf.concat([storage.read_value() for storage in storages], 0))
    for storage, value in zip(
        storages, tf.split(new, [storage.shape[0] for storage in storages]), strict=True
    ):
        storage.assign(value, read_value=False)


def _apply_update(update: DeviceUpdate, message: UpdateMessage, places: RowPlaces) -> None:
    """Run the part of `Optimizer.apply` after clipping, for the shards on this ps, if wanted."""
    if message.applied is not None:
        wanted = message._replace(applied=None)
        tf.cond(message.applied > 0, lambda: _apply_update(update, wanted, places), lambda: None)
        return
    optimizer, shared = update.update.optimizer, update.update.shared
    phase = OnDevice(optimizer, message.scalars, shared, compiles=update.compiles)
    for fused, gradient in zip(update.fused, message.fused, strict=True):
        with entering(phase), phase.on_fused(fused):
            phase.decay_and_update(fused.shards[0].variable, gradient)
    for group, gradient in zip(update.groups, message.groups, strict=True):
        shards = group.shards
        rows = _Rows(optimizer, group.runs, places)
        with entering(phase), phase.on(shards[0], rows):
            phase.decay_and_update(shards[0].variable, gradient)
    gradients = dict(zip(update.single, message.gradients, strict=True))
    for shard in update.rest:
        gradient = gradients.get(shard)
        touched: _Rows | None = None
        run = ShardRun((shard,))
        if gradient is not None and run in places:
            if update.updates_rows(shard):
                touched = _Rows(optimizer, [run], places)
            else:
                begin, of_run = run.store.begin, run.places(places[run])
                shard_places = of_run - begin if begin else of_run
                gradient = tf.math.unsorted_segment_sum(
                    gradient, shard_places, shard.storage.shape[0]
                )
        with phase.on(shard, touched):
            finish(phase, shard.variable, gradient, message.scalars.clip_scale)
