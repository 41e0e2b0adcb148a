"""The message of a push to one ps: planned at trace time, filled from a step's outputs.

`push.py` sends it, and `push_apply.py` applies it on the ps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from kerasps.step.contract.change import Change, StateChange, is_number
from kerasps.step.contract.compute_messages import ComputeOutputs
from kerasps.step.phases.step_context import StepContext
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.records.packing import specs_of
from kerasps.step.records.specs import sent_part, sent_rows, sent_state, sent_value
from kerasps.step.rows.groups import GroupShard, ShardRun, TableGroup
from kerasps.step.updates.fused import FusedVariable
from kerasps.step.updates.optimizers import may_update_rows
from kerasps.step.updates.update import Update, UpdateTensors
from kerasps.step.updates.updating import Scalars
from kerasps.variables import ParameterServerVariable, Shard, shards_in
from kerasps.variables.placing.placement import SMALL_BYTES


class UpdateMessage(NamedTuple):
    """The part of an `Update` that is sent to one ps; holds tensors or their specs."""

    scalars: Scalars  # the learning rate and shared state
    # The gradient of each fused variable: a list with one for each shard on the worker, one tensor
    # on the ps.
    fused: list[Any]
    gradients: list[Any]  # the gradients of other shards
    # The gradients of each group of several tables: on the worker, a list of tensors to be put end
    # to end; on the ps, one tensor.
    groups: list[Any]
    # Whether the optimizer was applied, as a float32, if that is conditional; else None.
    applied: Any


class PushMessage(NamedTuple):
    """The part of a step that is sent to one ps; holds tensors or their specs."""

    updates: list[UpdateMessage]  # the message of each update
    changes: list[Change]  # the other changes of shards: the fields that are sent
    lane: Any  # the lane in which the worker sends it (see `variables.Fences`), an int32 scalar
    number: Any  # the number of its call in that lane, an int32 scalar; mostly None
    # The clock of the ps when the worker pulled from it, an int64 scalar; None if the worker did
    # not pull the clock.
    clock: Any


@dataclass(frozen=True)
class StepChanges:
    """The changes that a step makes on the ps tasks."""

    updates: Sequence[Update]  # the updates of the optimizers, in order
    states: Sequence[StateChange]  # the other changes of variables
    # The variables whose gradients have only the rows that the step asked for.
    tables: IdentitySet[ParameterServerVariable]
    sparse_updates: str  # the strategy's argument of that name
    fused: Sequence[FusedVariable]  # the fused variables
    groups: Sequence[TableGroup] = ()  # the groups of tables
    compiles: bool = True  # whether XLA compiles the updates of large values

    @property
    def devices(self) -> list[str]:
        """The devices of the ps that have some of the changed variables."""
        shards = shards_in([change.variable for change in self.states])
        for update in self.updates:
            shards += self.shards_of(update)
        return sorted({shard.device for shard in shards})

    def shards_of(self, update: Update) -> list[Shard]:
        """Return the shards that an update changes."""
        changed = update.variables
        if update.optimizer.use_ema:
            # The moving averages follow every variable, even without a gradient in this step.
            followed = update.optimizer._trainable_variables
            changed = [*changed, *(v for v in followed if v not in self.tables)]
        return list(dict.fromkeys(shards_in(changed)))

    def updates_rows(self, update: Update, variable: ParameterServerVariable) -> bool:
        """Return True if an update moves the touched rows of a table without the other rows."""
        if not variable.has_whole_value:  # others are refused, see `check_updates_by_rows`
            return True
        is_coupled = variable in update.coupled
        return not is_coupled and may_update_rows(update.optimizer, self.sparse_updates)

    def lazy_tables(self, update: Update) -> list[ParameterServerVariable]:
        """Return the tables of which an update moves only the touched rows."""
        tables = [variable for variable in update.variables if variable in self.tables]
        return [table for table in tables if self.updates_rows(update, table)]

    def _groups_of(self, update: Update, device: str) -> list[GroupShard]:
        """Return the groups of several tables that are updated on one ps."""
        updated = IdentitySet(update.variables)
        return [
            shard
            for group in self.groups
            if len(group.tables) > 1 and group.tables[0] in updated
            for shard in group.shards
            if shard.device == device
        ]

    def on(self, device: str) -> DeviceChanges:
        """Return the changes on one ps."""

        def here(shards: Sequence[Shard]) -> list[Shard]:
            return [shard for shard in shards if shard.device == device]

        updates = [
            DeviceUpdate(
                number,
                update,
                here(self.shards_of(update)),
                here(shards_in(update.variables)),
                [f for f in self.fused if (f.update, f.device) == (number, device)],
                self._groups_of(update, device),
                self,
            )
            for number, update in enumerate(self.updates)
        ]
        return DeviceChanges(
            device,
            self,
            [update for update in updates if update.changed],
            [
                ShardChange(number, change, shard)
                for number, change in enumerate(self.states)
                for shard in here(shards_in([change.variable]))
            ],
        )


class DeviceUpdate:
    """The changes that an `Update` makes on one ps.

    Args:
        with_gradient: those of them that have a gradient.
    """

    def __init__(
        self,
        number: int,
        update: Update,
        changed: list[Shard],
        with_gradient: list[Shard],
        fused: list[FusedVariable],
        groups: list[GroupShard],
        changes: StepChanges,
    ) -> None:
        shards_of_each = [*(part.shards for part in fused), *(part.shards for part in groups)]
        as_one = {shard for shards in shards_of_each for shard in shards}
        self.update = update
        self.changed = changed
        self.fused = fused  # the fused variables, each updated as one
        self.groups = groups  # the groups, each updated as one
        # The other shards that have a gradient.
        self.single = [shard for shard in with_gradient if shard not in as_one]
        # All shards that are not in fused variables or groups.
        self.rest = [shard for shard in changed if shard not in as_one]
        self.compiles = changes.compiles  # whether XLA compiles the updates of large values
        self.number = number
        self._changes = changes

    @property
    def tables(self) -> list[list[ShardRun]]:
        """The runs whose gradients have only the rows that the step asked for, by group.

        In the order of the message.
        """
        alone = [shard for shard in self.single if shard.variable in self._changes.tables]
        return [*([ShardRun((shard,))] for shard in alone), *(shard.runs for shard in self.groups)]

    def sums_lookups(self, group: TableGroup) -> bool:
        """Return True if the push, not the step, sums the gradients of a group's look-ups."""
        return all(table in self.update.lookups for table in group.tables)

    def updates_rows(self, shard: Shard) -> bool:
        """Return True if rows of a table are updated without the other rows."""
        return self._changes.updates_rows(self.update, shard.variable)

    def specs(
        self,
        of_fused: Callable[[FusedVariable], object],
        of_group: Callable[[GroupShard, int], object],
    ) -> UpdateMessage:
        """Return the specs of the message; functions give those of fused variables and groups.

        `of_group` also receives the number of parts in which a group's gradient is sent.
        """

        def parts(shard: GroupShard) -> int:
            is_one = shard.group.num_shards > 1 or self.sums_lookups(shard.group)
            return 1 if is_one else len(shard.group.tables)

        tensors = self.update.tensors
        return UpdateMessage(
            scalars=specs_of(tensors.scalars),
            fused=[of_fused(variable) for variable in self.fused],
            gradients=[
                sent_rows(shard.variable)
                if shard.variable in self._changes.tables
                else sent_value(shard)
                for shard in self.single
            ],
            groups=[of_group(shard, parts(shard)) for shard in self.groups],
            applied=None if tensors.applied is None else tf.TensorSpec([], tf.float32),
        )

    def select(self, step: StepContext, outputs: ComputeOutputs) -> UpdateMessage:
        """Return the message, from the outputs of the compute phase."""
        tensors: UpdateTensors = outputs.updates[self.number]
        variables = self.update.variables
        gradients = ByIdentity(zip(variables, tensors.gradients, strict=True))

        def gradient(shard: Shard) -> tf.Tensor:
            if shard.variable in self._changes.tables:
                return rows(GroupShard(step.requests[shard.variable].group, shard.index))[0]
            return shard.of(gradients[shard.variable])

        addends = ByIdentity(zip(variables, tensors.addends, strict=False))

        def rows(shard: GroupShard) -> list[tf.Tensor]:
            tables = shard.group.tables
            request = step.requests[tables[0]]
            if not self.sums_lookups(shard.group):
                return request.rows_in(shard, [gradients[table] for table in tables])
            of_tables = [(self.update.lookups[table], addends[table]) for table in tables]
            return request.rows_in(shard, [request.sum(of_tables)])

        return UpdateMessage(
            scalars=tensors.scalars,
            fused=[[gradient(shard) for shard in variable.shards] for variable in self.fused],
            gradients=[gradient(shard) for shard in self.single],
            groups=[rows(shard) for shard in self.groups],
            applied=None if tensors.applied is None else tf.cast(tensors.applied, tf.float32),
        )


@dataclass(frozen=True)
class ShardChange:
    """The change of one shard, beside updates."""

    number: int  # the index of the variable's change in the step
    change: StateChange  # the change of the variable
    shard: Shard

    @property
    def specs(self) -> Change:
        """The specs of the fields that are sent: in full precision."""
        return Change(
            *(
                None if spec is None else sent_state(self.shard) if spec.shape.rank else spec
                for spec in self.change.sent
            )
        )

    @property
    def key_of_averages(self) -> Hashable | None:
        """The key of small moving averages that a ps may change as one; None for other changes."""
        numbers, sent, spec = self.change.numbers, self.change.sent, self.shard.spec
        is_average = (
            numbers == Change(scale=numbers.scale)
            and sent == Change(addend=sent.addend)
            and not numbers.only_replaces
            and not numbers.only_adds
        )
        is_vector = sent.addend is not None and sent.addend.shape.rank == spec.shape.rank == 1
        is_small = spec.shape.num_elements() * spec.dtype.size <= SMALL_BYTES
        return (numbers.scale, spec.dtype) if is_average and is_vector and is_small else None

    def select(self, outputs: ComputeOutputs) -> Change:
        """Return the fields that are sent, from the outputs of the compute phase."""
        tensors = outputs.changes[self.number]
        return Change(
            *(
                self.shard.of(tensor) if spec is not None and spec.shape.rank else tensor
                for spec, tensor in zip(self.change.sent, tensors, strict=True)
            )
        )

    def apply(self, sent: Change) -> None:
        """Change the shard, given the fields that were sent. Runs on the ps, under its lock."""
        change = sent.filled_from(self.change.numbers)
        storage = self.shard.storage
        has_shape = change.addend is not None and not is_number(change.addend)
        if change.only_adds and has_shape and change.addend.shape == storage.shape:
            storage.assign_add(change.addend, read_value=False)
        else:
            storage.assign(change.of(storage.read_value()), read_value=False)


@dataclass(frozen=True)
class DeviceChanges:
    """The changes that a step makes on one ps."""

    device: str  # the device of the ps
    changes: StepChanges  # the changes of the step on all ps
    updates: list[DeviceUpdate]  # the updates that change shards there
    states: list[ShardChange]  # the other changes of shards there

    @property
    def tables(self) -> list[list[ShardRun]]:
        """The runs whose gradients have only the rows that the step asked for, by group.

        In the order of the message.
        """
        return [runs for update in self.updates for runs in update.tables]

    def sent_specs(self, *, clocked: bool, numbered: bool) -> PushMessage:
        """Return the specs of the result of `select`."""
        return self._specs(
            lambda variable: [sent_part(shard) for shard in variable.shards],
            lambda shard, num_parts: [shard.spec] * num_parts,
            clocked,
            numbered,
        )

    def received_specs(self, *, clocked: bool, numbered: bool) -> PushMessage:
        """Return the specs of what arrives: the same flat tensors in another structure."""
        return self._specs(
            lambda variable: variable.spec, lambda shard, num_parts: shard.spec, clocked, numbered
        )

    def _specs(
        self,
        of_fused: Callable[[FusedVariable], object],
        of_group: Callable[[GroupShard, int], object],
        clocked: bool,
        numbered: bool,
    ) -> PushMessage:
        return PushMessage(
            updates=[update.specs(of_fused, of_group) for update in self.updates],
            changes=[state.specs for state in self.states],
            lane=tf.TensorSpec([], tf.int32),
            number=tf.TensorSpec([], tf.int32) if numbered else None,
            clock=tf.TensorSpec([], tf.int64) if clocked else None,
        )

    def select(self, step: StepContext) -> PushMessage:
        """Return the message, from the outputs of the compute phase in `step`."""
        outputs = step.outputs
        return PushMessage(
            updates=[update.select(step, outputs) for update in self.updates],
            changes=[state.select(outputs) for state in self.states],
            lane=step.lanes[self.device],
            number=step.number,
            clock=step.clocks.get(self.device),
        )
