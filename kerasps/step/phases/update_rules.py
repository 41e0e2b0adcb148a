"""The rules by which a push takes effect: at once, or jointly with those of other workers.

The trace of a step chooses a rule. The phases and the step graph call its methods and do not ask
which class it is, so a new update mode is a new class here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from kerasps.step.phases.joints import Joints
from kerasps.step.phases.push_apply import apply
from kerasps.step.phases.push_message import DeviceChanges, PushMessage
from kerasps.step.phases.step_context import StepContext
from kerasps.step.rows.row_places import RowPlaces
from kerasps.strategy_arguments import AdmissionTerms
from kerasps.variables.lanes.fences import Fences
from kerasps.variables.lanes.lane_table import NO_LANE, apply_if_in_lane, apply_in_lane, read_clock


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which the pushes of a step take effect. A subclass overrides what differs."""

    fences: Fences  # the lanes on the ps tasks
    numbers_calls: bool = False  # whether a push carries the number of its call of a function
    # The most steps of an execution that may be laid out one after the other; None for no limit.
    max_unrolled_steps: ClassVar[int | None] = None
    waits: ClassVar[bool] = False  # whether a step waits for those of other workers

    def admission(self, batches_per_step: int) -> AdmissionTerms:
        """Return the terms, counted in batches, on which workers are given steps."""
        del batches_per_step
        return AdmissionTerms()

    def redoing(self) -> UpdateRule:
        """Return the rule for steps that some ps may have applied before."""
        raise NotImplementedError

    def clock(self, device: str) -> Callable[[], tf.Tensor]:
        """Return a function that reads, on a ps, the clock that a pull returns."""
        raise NotImplementedError

    def lanes(
        self, devices: Sequence[str], lane: tf.Tensor, are_applied: Callable[[], list[tf.Tensor]]
    ) -> dict[str, tf.Tensor]:
        """Return the lane that the push of a step names to each ps, by its device.

        Args:
            are_applied: returns, for each ps, whether it applied the step before.
        """
        del are_applied
        return dict.fromkeys(devices, lane)

    def hold(self, device: str, changes: DeviceChanges, specs: PushMessage) -> None:
        """Allocate room on a ps for the content of pushes. May be called again."""

    def take_in(
        self, device: str, changes: DeviceChanges, message: PushMessage, places: RowPlaces
    ) -> tf.Tensor | None:
        """Process a push that has arrived. Runs on the ps, under its lock.

        Returns the argument of `after_lock`.
        """
        raise NotImplementedError

    def after_lock(self, device: str, taken: tf.Tensor | None) -> None:
        """Run the part of a push that follows the release of the lock. Runs on the ps."""

    def after_pull(self, step: StepContext) -> None:
        """Check or change the context after the pull of a step."""

    def join(self, lane: int) -> None:
        """Make updates wait for the steps of a worker. Call when no step runs there."""

    def stop_waiting_for(self, lane: int) -> None:
        """Stop waiting for the steps of a worker. May be called again."""


@dataclass(frozen=True)
class Immediate(UpdateRule):
    """Applies each push when it arrives, once (see `UpdateRule`)."""

    # The number of steps by which a worker may lead the slowest; None for no limit.
    max_staleness: int | None = None

    def admission(self, batches_per_step: int) -> AdmissionTerms:
        if self.max_staleness is None:
            return AdmissionTerms()
        return AdmissionTerms(max_ahead=self.max_staleness * batches_per_step)

    def redoing(self) -> Immediate:
        return ImmediateAgain(self.fences, self.numbers_calls, self.max_staleness)

    def clock(self, device: str) -> Callable[[], tf.Tensor]:
        table = self.fences.table(device)
        return lambda: read_clock(table.handle)

    def hold(self, device: str, changes: DeviceChanges, specs: PushMessage) -> None:
        self.fences.table(device)

    # Applies a push that carries its lane.
    _apply_once = staticmethod(apply_in_lane)

    def take_in(
        self, device: str, changes: DeviceChanges, message: PushMessage, places: RowPlaces
    ) -> None:
        self._apply_once(
            self.fences.table(device).handle,
            message.lane,
            message.clock,
            functools.partial(apply, changes, message, places),
            message.number,
        )


@dataclass(frozen=True)
class ImmediateAgain(Immediate):
    """The rule of steps that some ps may have applied before (see `UpdateRule`).

    A push to a ps that has applied the step names no lane, and changes nothing there.
    """

    # Such steps are few, and most of their cost is making their graph ready on a worker.
    max_unrolled_steps: ClassVar[int | None] = 1
    _apply_once = staticmethod(apply_if_in_lane)

    def lanes(
        self, devices: Sequence[str], lane: tf.Tensor, are_applied: Callable[[], list[tf.Tensor]]
    ) -> dict[str, tf.Tensor]:
        return {
            device: tf.where(is_applied, NO_LANE, lane)
            for device, is_applied in zip(devices, are_applied(), strict=True)
        }


@dataclass(frozen=True, kw_only=True)
class Synchronous(UpdateRule):
    """A ps buffers pushes until those of all workers have arrived (see `UpdateRule`, `Joints`)."""

    joints: Joints  # the updates that workers make together
    waits: ClassVar[bool] = True

    def admission(self, batches_per_step: int) -> AdmissionTerms:
        return AdmissionTerms(joins=True, num_backups=self.joints.num_backups)

    def redoing(self) -> Synchronous:
        return SynchronousAgain(self.fences, joints=self.joints)

    def clock(self, device: str) -> Callable[[], tf.Tensor]:
        return self.joints.on[device].read_number

    def hold(self, device: str, changes: DeviceChanges, specs: PushMessage) -> None:
        self.joints.on[device].hold(changes, specs)

    def take_in(
        self, device: str, changes: DeviceChanges, message: PushMessage, places: RowPlaces
    ) -> tf.Tensor:
        lanes = self.fences.table(device).handle
        return self.joints.on[device].take_in(lanes, message, places)

    def after_lock(self, device: str, taken: tf.Tensor | None) -> None:
        self.joints.on[device].wait(taken)

    def after_pull(self, step: StepContext) -> None:
        self.joints.after_pull(step)

    def join(self, lane: int) -> None:
        self.joints.join(lane)

    def stop_waiting_for(self, lane: int) -> None:
        self.joints.remove_worker(lane)


@dataclass(frozen=True)
class SynchronousAgain(Synchronous):
    """The rule of steps that some ps may have counted before (see `UpdateRule`).

    The worker still comes to the joint, since the others wait for it, but its push has no content.
    """

    max_unrolled_steps: ClassVar[int | None] = 1

    def lanes(
        self, devices: Sequence[str], lane: tf.Tensor, are_applied: Callable[[], list[tf.Tensor]]
    ) -> dict[str, tf.Tensor]:
        return {
            device: tf.where(is_applied, -1 - lane, lane)
            for device, is_applied in zip(devices, are_applied(), strict=True)
        }
