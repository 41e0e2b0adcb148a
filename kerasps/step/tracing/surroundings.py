"""The surroundings of a step: those of `fit`, or those of a function that users schedule.

A step of `fit` receives the states of metrics and of seed generators and returns them. For a
scheduled function they are on a ps, since no worker is fixed for its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, assert_never

from kerasps.runtime.devices import ps_device
from kerasps.step.contract.change import Change, Field, StateChange
from kerasps.step.contract.compute_messages import ComputeOutputs
from kerasps.step.contract.host import StepHost
from kerasps.step.contract.inventory import Inventory
from kerasps.step.phases.joints import Joints
from kerasps.step.phases.push_message import StepChanges
from kerasps.step.phases.seed_draw import SeedDraw
from kerasps.step.phases.update_rules import Immediate, Synchronous, UpdateRule
from kerasps.step.records.specs import spec_of
from kerasps.step.tracing.synchronous_checks import check_no_update, check_synchronous
from kerasps.step.updates.update import Update
from kerasps.variables import ParameterServerVariable, shards_in
from kerasps.variables.keras.joins import Join


def _joining(join: Join, state: Field) -> Change:
    """Return the change by which a state, or its spec, is joined to a stand-in."""
    match join:
        case Join.SUM:
            return Change(addend=state)
        case Join.MAXIMUM:
            return Change(low=state)
        case Join.MINIMUM:
            return Change(high=state)
        case unknown:
            assert_never(unknown)


@dataclass(frozen=True)
class Surroundings:
    """Decides how metric states, seeds and updates enter and leave a step."""

    host: StepHost  # the host of the strategy
    # Whether the step may assign bare `tf.Variable`s and train them with an optimizer.
    trains_bare: ClassVar[bool] = False

    def outputs(self, outputs: ComputeOutputs, joins: Sequence[Join]) -> ComputeOutputs:
        """Return the outputs of the compute phase, given those of the replicas."""
        del joins
        return outputs

    def states_on_ps(
        self,
        inventory: Inventory,
        updates: Sequence[Update],
        changed: Sequence[ParameterServerVariable],
        draws: Sequence[int],
        joins: Sequence[Join],
    ) -> tuple[list[StateChange], SeedDraw | None]:
        """Return the changes of the stand-ins of metrics, and the draw of the step's seeds."""
        del inventory, updates, changed, draws, joins
        return [], None

    def update_rule(
        self, method: str, updates: Sequence[Update], inventory: Inventory, changes: StepChanges
    ) -> UpdateRule:
        """Return the rule for when the pushes of the step take effect.

        Raises UnsupportedError if updates are synchronous, and the step does not support that.
        """
        raise NotImplementedError


class FitSurroundings(Surroundings):
    """The surroundings of a step of `fit`, `evaluate` and `predict`: the worker keeps states."""

    def update_rule(
        self, method: str, updates: Sequence[Update], inventory: Inventory, changes: StepChanges
    ) -> UpdateRule:
        options, extended = self.host.options, self.host.extended
        if options.update_mode == "sync":
            check_synchronous(method, updates, inventory)
        if not changes.devices:  # a step that changes no variables waits for no other worker
            return Immediate(extended.fences)
        match options.update_mode:
            case "async":
                return Immediate(extended.fences, max_staleness=options.max_staleness)
            case "sync":
                joints = Joints(changes.devices, extended.mutex, options.num_backup_workers)
                return Synchronous(extended.fences, joints=joints)
            case unknown:
                assert_never(unknown)


@dataclass(frozen=True)
class CallSurroundings(Surroundings):
    """The surroundings of a step in a function that users schedule: a ps keeps states."""

    numbers_calls: bool  # whether a push carries the number of its call
    trains_bare: ClassVar[bool] = True

    def outputs(self, outputs: ComputeOutputs, joins: Sequence[Join]) -> ComputeOutputs:
        metrics = map(_joining, joins, outputs.metrics)
        return outputs._replace(changes=[*outputs.changes, *metrics])

    def states_on_ps(
        self,
        inventory: Inventory,
        updates: Sequence[Update],
        changed: Sequence[ParameterServerVariable],
        draws: Sequence[int],
        joins: Sequence[Join],
    ) -> tuple[list[StateChange], SeedDraw | None]:
        extended = self.host.extended
        # On a ps that the step pushes to anyway.
        variables = [*(v for update in updates for v in update.variables), *changed]
        ps = min((shard.device for shard in shards_in(variables)), default=ps_device(0))
        metrics = [
            StateChange(
                extended.stand_ins.of(v, ps, join),
                after=0,
                numbers=Change(),
                sent=_joining(join, spec_of(v)),
                replaces=False,
            )
            for v, join in zip(inventory.metrics, joins, strict=True)
        ]
        seeds = [extended.stand_ins.of(v, ps_device(0)) for v in inventory.seeds]
        return metrics, SeedDraw(seeds, draws, extended.mutex) if seeds else None

    def update_rule(
        self, method: str, updates: Sequence[Update], inventory: Inventory, changes: StepChanges
    ) -> UpdateRule:
        if self.host.options.update_mode == "sync":
            check_no_update(updates)
        return Immediate(self.host.extended.fences, self.numbers_calls)
