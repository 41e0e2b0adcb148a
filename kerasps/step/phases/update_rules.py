"""When a push takes effect on its ps: at once, or jointly with those of other workers.

A rule is chosen when a step is traced. The phases and the step graph ask it and know none of its
kinds, so a further update mode is a further class here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import tensorflow as tf

from kerasps.step.phases.joints import Joints
from kerasps.step.phases.push_apply import apply
from kerasps.step.phases.push_message import DeviceChanges, PushMessage
from kerasps.step.phases.step_context import StepContext
from kerasps.step.rows.row_places import RowPlaces
from kerasps.variables.fences import Fences
from kerasps.variables.lane_table import NO_LANE, apply_if_in_lane, apply_in_lane, read_clock


class UpdateRule(Protocol):
    """When the pushes of a step take effect.

    Attributes:
        redoes: whether steps may have been applied on some ps before, and are not applied twice.
        numbers_calls: whether a push says of which call of a function it is.
        waits: whether a step waits for those of other workers.
        num_backups: how many workers an update does not wait for.
    """

    @property
    def redoes(self) -> bool: ...

    @property
    def numbers_calls(self) -> bool: ...

    @property
    def waits(self) -> bool: ...

    @property
    def num_backups(self) -> int: ...

    def redoing(self) -> UpdateRule:
        """Return the rule for steps that may have been applied on some ps before."""

    def clock(self, device: str) -> Callable[[], tf.Tensor]:
        """Return what reads, on a ps, the number that a pull from it brings."""

    def lane(self, lane: tf.Tensor, is_applied: tf.Tensor) -> tf.Tensor:
        """Return the lane of a push, given whether its step was applied on the ps before."""

    def hold(self, device: str, changes: DeviceChanges, specs: PushMessage) -> None:
        """Make room on a ps for what pushes bring. May be called again."""

    def take_in(
        self, device: str, changes: DeviceChanges, message: PushMessage, places: RowPlaces
    ) -> tf.Tensor | None:
        """Take in a push that has arrived. Runs on the ps, under its lock.

        Args:
            device: the device of the ps.
            changes: what the step changes there.
            message: what the worker sent.
            places: those of the rows that gradients of tables have.

        Returns:
            What `after_lock` is given.
        """

    def after_lock(self, device: str, taken: tf.Tensor | None) -> None:
        """Do what a push does when it has released the lock. Runs on the ps."""

    def after_pull(self, step: StepContext) -> None:
        """Look at what the pull of a step has brought."""

    def join(self, lane: int) -> None:
        """Have the steps of a worker be waited for. Call when nothing runs there."""

    def leave(self, lane: int) -> None:
        """Have the steps of a worker be waited for no more. It may be called again."""


@dataclass(frozen=True)
class Immediate:
    """Each push is applied when it arrives, once (see `UpdateRule`).

    Attributes:
        fences: the lanes on the ps tasks.
    """

    fences: Fences
    numbers_calls: bool = False
    redoes: bool = False
    waits: ClassVar[bool] = False
    num_backups: ClassVar[int] = 0

    def redoing(self) -> Immediate:
        return replace(self, redoes=True)

    def clock(self, device: str) -> Callable[[], tf.Tensor]:
        table = self.fences.table(device)
        return lambda: read_clock(table.handle)

    def lane(self, lane: tf.Tensor, is_applied: tf.Tensor) -> tf.Tensor:
        return tf.where(is_applied, NO_LANE, lane)

    def hold(self, device: str, changes: DeviceChanges, specs: PushMessage) -> None:
        self.fences.table(device)

    def take_in(
        self, device: str, changes: DeviceChanges, message: PushMessage, places: RowPlaces
    ) -> None:
        apply_once = apply_if_in_lane if self.redoes else apply_in_lane
        apply_once(
            self.fences.table(device).handle,
            message.lane,
            message.clock,
            functools.partial(apply, changes, message, places),
            message.number,
        )

    def after_lock(self, device: str, taken: tf.Tensor | None) -> None:
        """Do nothing."""

    def after_pull(self, step: StepContext) -> None:
        """Do nothing."""

    def join(self, lane: int) -> None:
        """Do nothing: nobody waits."""

    def leave(self, lane: int) -> None:
        """Do nothing: nobody waits."""


@dataclass(frozen=True)
class Synchronous:
    """A push is set aside until those of all workers are there (see `UpdateRule`, `Joints`).

    Attributes:
        fences: the lanes on the ps tasks.
        joints: the updates that workers make together.
    """

    fences: Fences
    joints: Joints
    redoes: bool = False
    numbers_calls: ClassVar[bool] = False
    waits: ClassVar[bool] = True

    @property
    def num_backups(self) -> int:
        return self.joints.num_backups

    def redoing(self) -> Synchronous:
        return replace(self, redoes=True)

    def clock(self, device: str) -> Callable[[], tf.Tensor]:
        return self.joints.on[device].read_number

    def lane(self, lane: tf.Tensor, is_applied: tf.Tensor) -> tf.Tensor:
        # To a joint a worker comes all the same: the others wait for it.
        return tf.where(is_applied, -1 - lane, lane)

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

    def leave(self, lane: int) -> None:
        self.joints.leave(lane)
