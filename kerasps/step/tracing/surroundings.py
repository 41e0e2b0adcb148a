"""The surroundings of a step: those of `fit`, or those of a function that users schedule.

The states of metrics and of seed generators are sent to a step of `fit`, and returned by it. Those
of a function that users schedule are on a ps meanwhile, since nobody knows where its calls run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, assert_never

from kerasps.runtime.devices import ps_device
from kerasps.step.contract.compute_messages import ComputeOutputs
from kerasps.step.contract.host import StepHost
from kerasps.step.contract.inventory import Inventory
from kerasps.step.phases.joints import Joints
from kerasps.step.phases.push_message import StepChanges
from kerasps.step.phases.seed_draw import SeedDraw
from kerasps.step.phases.update_rules import Immediate, Synchronous, UpdateRule
from kerasps.step.tracing.synchronous_checks import check_no_update, check_synchronous
from kerasps.step.updates.update import Update
from kerasps.variables import ParameterServerVariable, shards_in


class Surroundings(Protocol):
    """Decides for a step what is not of its method.

    Attributes:
        trains_bare: whether the step may assign bare `tf.Variable`s, and have an optimizer train
            them.
    """

    trains_bare: ClassVar[bool]

    def outputs(self, outputs: ComputeOutputs) -> ComputeOutputs:
        """Return what leaves the compute phase, given what the replicas return."""

    def states_on_ps(
        self,
        inventory: Inventory,
        updates: Sequence[Update],
        changed: Sequence[ParameterServerVariable],
        draws: Sequence[int],
    ) -> tuple[list[ParameterServerVariable], SeedDraw | None]:
        """Return the stand-ins of metrics that the step adds to, and what draws its seeds.

        Args:
            inventory: the variables that the step touches.
            updates: what its optimizers want done.
            changed: the variables that it changes otherwise.
            draws: how many seeds it draws from each generator.
        """

    def update_rule(
        self, method: str, updates: Sequence[Update], inventory: Inventory, changes: StepChanges
    ) -> UpdateRule:
        """Return when the pushes of the step take effect.

        Args:
            method: the name of what the step calls.
            updates: what its optimizers want done.
            inventory: the variables that it touches.
            changes: what it changes.

        Raises:
            UnsupportedError: updates are synchronous, and those of the step cannot be.
        """


@dataclass(frozen=True)
class FitSurroundings:
    """Those of a step of `fit`, `evaluate` and `predict` (see `Surroundings`).

    Attributes:
        host: of the strategy.
    """

    host: StepHost
    trains_bare: ClassVar[bool] = False

    def outputs(self, outputs: ComputeOutputs) -> ComputeOutputs:
        return outputs

    def states_on_ps(
        self,
        inventory: Inventory,
        updates: Sequence[Update],
        changed: Sequence[ParameterServerVariable],
        draws: Sequence[int],
    ) -> tuple[list[ParameterServerVariable], SeedDraw | None]:
        return [], None

    def update_rule(
        self, method: str, updates: Sequence[Update], inventory: Inventory, changes: StepChanges
    ) -> UpdateRule:
        options, extended = self.host.options, self.host.extended
        match options.update_mode:
            case "async":
                return Immediate(extended.fences)
            case "sync":
                check_synchronous(method, updates, inventory)
            case unknown:
                assert_never(unknown)
        if not changes.devices:
            return Immediate(extended.fences)
        joints = Joints(changes.devices, extended.mutex, options.num_backup_workers)
        return Synchronous(extended.fences, joints)


@dataclass(frozen=True)
class CallSurroundings:
    """Those of a step in a function that users schedule (see `Surroundings`).

    Attributes:
        host: of the strategy.
        numbers_calls: whether a push says of which call it is.
    """

    host: StepHost
    numbers_calls: bool
    trains_bare: ClassVar[bool] = True

    def outputs(self, outputs: ComputeOutputs) -> ComputeOutputs:
        return outputs._replace(deltas=[*outputs.deltas, *outputs.metrics])

    def states_on_ps(
        self,
        inventory: Inventory,
        updates: Sequence[Update],
        changed: Sequence[ParameterServerVariable],
        draws: Sequence[int],
    ) -> tuple[list[ParameterServerVariable], SeedDraw | None]:
        extended = self.host.extended
        # On a ps that the step pushes to in any case.
        variables = [*(v for update in updates for v in update.variables), *changed]
        ps = min((shard.device for shard in shards_in(variables)), default=ps_device(0))
        metrics = [extended.away.state_of(v, ps) for v in inventory.metrics]
        seeds = [extended.away.state_of(v, ps_device(0)) for v in inventory.seeds]
        return metrics, SeedDraw(seeds, draws, extended.mutex) if seeds else None

    def update_rule(
        self, method: str, updates: Sequence[Update], inventory: Inventory, changes: StepChanges
    ) -> UpdateRule:
        if self.host.options.update_mode == "sync":
            check_no_update(updates)
        return Immediate(self.host.extended.fences, self.numbers_calls)
