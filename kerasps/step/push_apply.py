"""What a ps does with a push: the optimizer's own `update_step`, beside its slots.

It runs on each shard of a variable by itself: on the whole shard, or, of a table that the step read
by rows, on these rows of the variable and its slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from kerasps.step.fused import FusedVariable
from kerasps.step.identity import ByIdentity
from kerasps.step.push_message import DeviceChanges, DeviceUpdate, PushMessage, UpdateMessage
from kerasps.step.updating import Scalars, UpdatePhase, ValueOf, decay_and_update, finish
from kerasps.variables import ParameterServerVariable, Shard, entering


class _ShardRows:
    """Some rows of one shard of a table and of its slots, while an update works on them.

    Args:
        shard: the shard.
        ids: the places of the rows in it.
    """

    def __init__(self, shard: Shard, ids: tf.Tensor) -> None:
        self._shard = shard
        self._ids = ids
        self._rows: ByIdentity[ParameterServerVariable, tf.Tensor] = ByIdentity()
        self._changed: ByIdentity[ParameterServerVariable, tf.Variable] = ByIdentity()

    def holds(self, variable: ParameterServerVariable) -> bool:
        """Return whether `variable` is the table or a slot of its shape."""
        return bool(variable.storage.shape == self._shard.variable.storage.shape)

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the rows of `variable` as they stand."""
        if variable not in self._rows:
            storage = self._storage(variable)
            gathered = tf.raw_ops.ResourceGather(
                resource=storage.handle, indices=self._ids, dtype=storage.dtype
            )
            gathered.set_shape([None, *storage.shape[1:]])
            self._rows[variable] = gathered
        return self._rows[variable]

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Take new rows of `variable`."""
        self._rows[variable] = value
        self._changed[variable] = self._storage(variable)

    def write(self) -> None:
        """Write the rows that have changed."""
        for variable, storage in self._changed.items():
            tf.raw_ops.ResourceScatterUpdate(
                resource=storage.handle, indices=self._ids, updates=self._rows[variable]
            )

    def _storage(self, variable: ParameterServerVariable) -> tf.Variable:
        return variable.shards[self._shard.index]


class OnDevice(UpdatePhase):
    """The phase in which variables are what a ps holds of them (see `variables.Phase`).

    Args:
        optimizer: the `keras.optimizers.Optimizer`.
        scalars: its learning rate and shared state, as the worker sent them.
        shared: the variables of the shared state.
    """

    def __init__(
        self, optimizer: Any, scalars: Scalars, shared: list[ParameterServerVariable]
    ) -> None:
        super().__init__(optimizer, scalars, shared)
        self._index = 0
        self._rows: _ShardRows | None = None
        self._stand_ins: ByIdentity[ParameterServerVariable, tf.Variable] = ByIdentity()

    @contextlib.contextmanager
    def on_fused(self, fused: FusedVariable) -> Iterator[None]:
        """In this context, let the fused variable stand for the first variable in it."""
        self._stand_ins = fused.stand_ins(self.optimizer)
        try:
            yield
        finally:
            self._stand_ins = ByIdentity()

    @contextlib.contextmanager
    def on(self, shard: Shard, rows: _ShardRows | None = None) -> Iterator[None]:
        """In this context, let `shard`, or some rows of it, stand for its variable.

        New rows are written at the end.
        """
        self._index, self._rows = shard.index, rows
        try:
            yield
            if rows is not None:
                rows.write()
        finally:
            self._index, self._rows = 0, None

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


def apply(changes: DeviceChanges, message: PushMessage, ids: Mapping[Shard, tf.Tensor]) -> None:
    """Change what the ps holds. Call while its lock is held.

    Args:
        changes: what the message is about.
        message: what the worker sent.
        ids: the places of the rows that gradients of tables have.
    """
    for update, own in zip(changes.updates, message.updates, strict=True):
        _apply_if_wanted(update, own, ids)
    for shard, value in zip(changes.deltas, message.deltas, strict=True):
        shard.storage.assign_add(value, read_value=False)
    for shard, value in zip(changes.assigned, message.assigned, strict=True):
        shard.storage.assign(value, read_value=False)


def _apply_if_wanted(
    update: DeviceUpdate, message: UpdateMessage, ids: Mapping[Shard, tf.Tensor]
) -> None:
    if message.applied is None:
        _apply_update(update, message, ids)
    else:
        tf.cond(message.applied > 0, lambda: _apply_update(update, message, ids), lambda: None)


def _apply_update(
    update: DeviceUpdate, message: UpdateMessage, ids: Mapping[Shard, tf.Tensor]
) -> None:
    """Do what follows clipping in `Optimizer.apply`, for the shards on this ps."""
    phase = OnDevice(update.update.optimizer, message.scalars, update.update.shared)
    for fused, gradient in zip(update.fused, message.fused, strict=True):
        with entering(phase), phase.on_fused(fused):
            decay_and_update(phase, fused.shards[0].variable, gradient)
    gradients = dict(zip(update.single, message.gradients, strict=True))
    coupling = {
        shard: (coupled, sent)
        for shard, sent in zip(update.single, message.sent, strict=True)
        if (coupled := update.coupled(shard)) is not None
    }
    for shard in update.rest:
        gradient, rows = gradients.get(shard), None
        if gradient is not None and shard in ids:
            if update.updates_rows(shard):
                rows = _ShardRows(shard, ids[shard])
            else:
                gradient = tf.math.unsorted_segment_sum(
                    gradient, ids[shard], shard.storage.shape[0]
                )
        if rows is None and shard in coupling:
            coupled, sent = coupling[shard]
            coupled.apply(shard, gradient, message.scalars, sent)
        else:
            with phase.on(shard, rows):
                finish(phase, shard.variable, gradient, message.scalars.clip_scale)
