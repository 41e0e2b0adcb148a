"""Joints: synchronous updates from the gradients of all participating workers.

Each ps buffers the content of each push, under its lock. The push that completes the joint runs the
optimizer's own `update_step` once, on the means. A push ends when its joint is completed. The next
pull of a worker follows its push, so all workers start the next step from the same values.

When a worker leaves in the middle, each ps removes it, which may also complete the joint. Its
earlier pushes count. See `variables/lanes/joint_table.py` for which workers count when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasps.runtime.calls import separate_executor
from kerasps.runtime.on_ps import OnPS, with_stateful
from kerasps.step.contract.change import divided
from kerasps.step.phases.joint_changes import JointChange, joint_variable
from kerasps.step.phases.push_apply import apply
from kerasps.step.phases.push_message import DeviceChanges, PushMessage
from kerasps.step.phases.step_context import StepContext
from kerasps.step.records.packing import filled, leaves_of
from kerasps.step.rows.groups import ShardRun
from kerasps.step.rows.row_places import RowPlaces
from kerasps.variables.lanes.joint_table import (
    JOINT_TABLE_SIZE,
    Member,
    read_joint,
    release,
    wait_for,
)
from kerasps.variables.lanes.lane_table import apply_in_lane, is_open, read_clock

_Mutex = Callable[[str], tf.Tensor]


class _Sum:
    """A tensor of which the mean counts: a gradient."""

    def __init__(self, spec: tf.TensorSpec) -> None:
        self.variable = joint_variable(
            spec.shape, spec.dtype, lambda: tf.zeros(spec.shape, spec.dtype)
        )

    def add(self, value: tf.Tensor) -> None:
        self.variable.assign_add(value, read_value=False)

    def mean(self, count: tf.Tensor, place_of: tf.Tensor | None) -> tf.Tensor:
        del place_of
        return divided(self.variable.read_value(), count)

    def clear(self) -> None:
        self.variable.assign(tf.zeros(self.variable.shape, self.variable.dtype), read_value=False)


class _Last(_Sum):
    """A tensor of which the last value counts: every worker computes the same one."""

    def add(self, value: tf.Tensor) -> None:
        self.variable.assign(value, read_value=False)

    def mean(self, count: tf.Tensor, place_of: tf.Tensor | None) -> tf.Tensor:
        del count, place_of
        return self.variable.read_value()

    def clear(self) -> None:
        """Do nothing: the next value replaces this one."""


class _Rows:
    """Rows of tables, as a list with the rows of each push; it takes no more memory than these."""

    def __init__(self, spec: tf.TensorSpec, run: ShardRun) -> None:
        self.run = run
        self._dtype, self._shape = spec.dtype, [-1, *spec.shape[1:]]
        self.variable = joint_variable([], tf.variant, self._empty)

    def _empty(self) -> tf.Tensor:
        return tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant(self._shape), max_num_elements=-1, element_dtype=self._dtype
        )

    def _list(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self.variable.handle, dtype=tf.variant)

    def add(self, rows: tf.Tensor) -> None:
        longer = tf.raw_ops.TensorListPushBack(input_handle=self._list(), tensor=rows)
        tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=longer)

    def all(self) -> tf.Tensor:
        """Return all rows, end to end."""
        rows, _ = tf.raw_ops.TensorListConcatV2(
            input_handle=self._list(),
            element_shape=tf.constant(self._shape),
            leading_dims=tf.zeros([0], tf.int64),
            element_dtype=self._dtype,
        )
        rows.set_shape([None, *self._shape[1:]])
        return rows

    def mean(self, count: tf.Tensor, place_of: tf.Tensor | None) -> tf.Tensor:
        """Return one row for each different place.

        Args:
            count: the number of pushes; a row counts as zero in pushes that do not have it.
            place_of: for each row, the index of its place among the different places.
        """
        assert place_of is not None  # rows of gradients have places
        num_places = tf.reduce_max(tf.concat([[-1], place_of], 0)) + 1
        return divided(tf.math.unsorted_segment_sum(self.all(), place_of, num_places), count)

    def clear(self) -> None:
        tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=self._empty())


class _Aside:
    """The contents of the pushes to the open joint of one ps."""

    def __init__(self, changes: DeviceChanges, specs: PushMessage) -> None:
        self._changes = changes
        tables = dict.fromkeys(run for runs in changes.tables for run in runs)
        ids = tf.TensorSpec([None], tf.int32)
        self._ids = [_Rows(ids, run) for run in tables]

        def slots(kind: type[_Sum], record: object) -> Any:
            return filled(record, [kind(spec) for spec in leaves_of(record)])

        updates = [
            update_specs._replace(
                scalars=slots(_Last, update_specs.scalars),
                fused=slots(_Sum, update_specs.fused),
                gradients=[
                    _Rows(spec, run) if (run := ShardRun((shard,))) in tables else _Sum(spec)
                    for shard, spec in zip(update.single, update_specs.gradients, strict=True)
                ],
                # A group's rows arrive run by run within each push, not run by run over all pushes.
                groups=[[_Rows(run.spec, run) for run in group.runs] for group in update.groups],
            )
            for update, update_specs in zip(changes.updates, specs.updates, strict=True)
        ]
        self._states = [
            JointChange(state.change, state_specs)
            for state, state_specs in zip(changes.states, specs.changes, strict=True)
        ]
        self._slots = PushMessage(
            updates=updates,
            changes=[],
            lane=None,
            number=None,
            clock=None,
        )

    def add(self, message: PushMessage, places: RowPlaces, before: tf.Tensor) -> None:
        """Buffer the content of a push. Runs on the ps, under the lock.

        Args:
            before: how many pushes are buffered.
        """
        # Rows are made when the first push comes with them, and stay until the joint is applied.
        places = places.resolved(held=before)
        for rows in self._ids:
            rows.add(tf.cast(places[rows.run], tf.int32))
        updates = [
            update_message._replace(
                groups=[
                    tf.split(rows, places.counts(group.runs), num=len(group.runs))
                    for group, rows in zip(update.groups, update_message.groups, strict=True)
                ]
            )
            for update, update_message in zip(self._changes.updates, message.updates, strict=True)
        ]
        for state, change in zip(self._states, message.changes, strict=True):
            state.add(change)
        brought = message._replace(updates=updates, changes=[], lane=None, number=None, clock=None)
        for slot, value in zip(leaves_of(self._slots), leaves_of(brought), strict=True):
            slot.add(value)

    def apply(self, count: tf.Tensor) -> None:
        """Apply the mean of `count` pushes to the values on the ps, then clear the buffers.

        Runs on the ps, under the lock.
        """
        places = RowPlaces({})
        place_of: dict[ShardRun, tf.Tensor] = {}
        for rows in self._ids:
            places[rows.run], place_of[rows.run] = tf.unique(rows.all())
            rows.run.note_change(places[rows.run])
        slots = leaves_of(self._slots)
        means = [
            slot.mean(count, place_of[slot.run] if isinstance(slot, _Rows) else None)
            for slot in slots
        ]
        message = filled(self._slots, means)
        updates = [
            update_message._replace(groups=[tf.concat(rows, 0) for rows in update_message.groups])
            for update_message in message.updates
        ]
        states = [state.joined(count) for state in self._states]
        apply(self._changes, message._replace(updates=updates, changes=states), places)
        for slot in [*slots, *self._ids, *self._states]:
            slot.clear()


class DeviceJoints:
    """The joints of one ps for one step."""

    def __init__(self, device: str, mutex: _Mutex, num_backups: int) -> None:
        self.device = device
        self._mutex = mutex
        self._num_backups = num_backups
        with tf.device(device):
            self._table = joint_variable(
                [JOINT_TABLE_SIZE], tf.int64, lambda: tf.zeros([JOINT_TABLE_SIZE], tf.int64)
            )
        self._aside: _Aside | None = None

    def hold(self, changes: DeviceChanges, specs: PushMessage) -> None:
        """Allocate the buffers for pushes. Does nothing when called again."""
        if self._aside is None:
            with tf.device(self.device):
                self._aside = _Aside(changes, specs)
            lane, number = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64)
            mutex = self._mutex(self.device)
            self._admission = OnPS(self.device, self._admit, lane, mutex=mutex)
            self._excusing = OnPS(self.device, self._excuse, lane, number, mutex=mutex)
            self._departure = OnPS(self.device, self._depart, lane, mutex=mutex)
            # Without the lock: the workers that it waits for need the lock.
            self._passing = OnPS(self.device, self._passed, number)

    def admit(self, lane: int) -> int:
        """Add a worker, from the open joint on; return that joint's number."""
        return int(self._admission.call(lane)[0])

    def excuse(self, lane: int, first: int) -> int:
        """Exempt a worker from the joints before number `first`.

        Returns the number of the open joint; less than `first` if that joint waits for other
        workers.
        """
        return int(self._excusing.call(lane, first)[0])

    def depart(self, lane: int) -> None:
        """Remove a worker, so that no joint waits for it any more."""
        self._departure.call(lane)

    def wait_until_passed(self, number: int) -> None:
        """Wait until the joint with this number is completed."""
        self._passing.call(number)

    def read_number(self) -> tf.Tensor:
        """Return the number of the open joint. Runs on the ps, in a pull."""
        return read_joint(self._table.handle)

    def take_in(self, lanes: tf.Tensor, message: PushMessage, places: RowPlaces) -> tf.Tensor:
        """Buffer a push, and apply the joint if the push completes it. Call with the lock held.

        Args:
            message: the message of the worker. Its clock is the number of its joint. Its lane is
                the complement of the lane if the push arrives without content.

        Returns the number of the joint to wait for; -1 for none, if the push came too late.
        """
        brings = message.lane >= 0
        lane = tf.where(brings, message.lane, -1 - message.lane)
        member = Member.read(self._table.handle, lane)
        # A push without content is not counted in its lane. Without the check of the lane, it could
        # be taken for a push of a later lane in the same place.
        is_due = tf.logical_and(member.is_due(lane, message.clock), is_open(lanes, lane))
        aside = self._held

        def set_aside() -> None:
            aside.add(message, places, member.state.contributions)

        def count() -> None:
            # A push that is too late counts as well, so that it is not redone.
            apply_in_lane(
                lanes,
                lane,
                read_clock(lanes),
                lambda: tf.cond(is_due, set_aside, lambda: None),
            )

        _, counted = with_stateful(lambda: tf.cond(brings, count, lambda: None))
        with tf.control_dependencies(counted):
            after = member.come(is_due, tf.logical_and(is_due, brings))
            self._apply_if_complete(lane, after)
        return tf.where(is_due, message.clock, -1)

    def wait(self, number: tf.Tensor) -> None:
        """Wait until the joint with this number is completed. Runs on the ps, without the lock."""
        wait_for(self._name, self._table.handle, number)

    @property
    def _held(self) -> _Aside:
        assert self._aside is not None  # `hold` is called first
        return self._aside

    @property
    def _name(self) -> str:
        return self._table.shared_name

    def _apply_if_complete(self, lane: tf.Tensor, member: Member) -> tf.Tensor:
        """Write `member`; apply the joint first if it is complete. Return the open joint."""
        state = member.state
        is_complete = state.is_complete(self._num_backups)
        applies = tf.logical_and(is_complete, state.contributions > 0)
        _, applied = with_stateful(
            lambda: tf.cond(applies, lambda: self._held.apply(state.contributions), lambda: None)
        )
        with tf.control_dependencies(applied):
            counts = [
                tf.where(is_complete, new, old)
                for new, old in zip(state.next(), state, strict=True)
            ]
            written = Member(type(state)(*counts), member.entry)
            _, writes = with_stateful(lambda: written.write(self._table.handle, lane))
        # The release comes last, since a queue takes nothing from a worker whose call is cancelled
        # meanwhile. The workers that then still wait are released when that worker is removed.
        with tf.control_dependencies(writes):
            num_tokens = tf.where(is_complete, state.arrived, tf.zeros([], tf.int64))
            release(self._name, state.number, num_tokens)
            return tf.identity(written.state.number)

    def _admit(self, lane: tf.Tensor) -> tf.Tensor:
        return self._apply_if_complete(lane, Member.read(self._table.handle, lane).admitted())

    def _excuse(self, lane: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return self._apply_if_complete(lane, Member.read(self._table.handle, lane).excused(number))

    def _depart(self, lane: tf.Tensor) -> tf.Tensor:
        member = Member.read(self._table.handle, lane)
        number, settled = with_stateful(lambda: self._apply_if_complete(lane, member.departed()))
        with tf.control_dependencies(settled):
            release(self._name, number - 1, member.state.members)
            return tf.identity(number)

    def _passed(self, number: tf.Tensor) -> tf.Tensor:
        _, waited = with_stateful(lambda: self.wait(number))
        with tf.control_dependencies(waited):
            return tf.identity(number)


class Joints:
    """The joints of a step, on all ps that it pushes to."""

    def __init__(self, devices: Sequence[str], mutex: _Mutex, num_backups: int) -> None:
        self.num_backups = num_backups
        self.on = {device: DeviceJoints(device, mutex, num_backups) for device in devices}

    def after_pull(self, step: StepContext) -> None:
        """Mark the push as late when the step pulled from ps that were at different joints.

        Such a push is dropped. Ps can differ only if joints do not wait for all workers.
        """
        if self.num_backups and len(self.on) > 1:
            numbers = tf.stack([step.clocks[device] for device in self.on])
            number = tf.reduce_min(numbers)
            is_one = tf.equal(number, tf.reduce_max(numbers))
            step.clocks.update(
                dict.fromkeys(self.on, tf.where(is_one, number, tf.constant(-1, tf.int64)))
            )

    def join(self, lane: int) -> None:
        """Add a worker, on all ps from the same joint on. Thread: any.

        Raises tf.errors.OpError if a ps is lost.
        """
        with separate_executor():
            # From here on, joints wait for the new worker, so no ps gets more than one joint ahead
            # of another.
            numbers = [joints.admit(lane) for joints in self.on.values()]
            first = max(numbers, default=0)
            for joints, number in zip(self.on.values(), numbers, strict=True):
                while number < first:
                    before, number = number, joints.excuse(lane, first)
                    if number < first:
                        joints.wait_until_passed(before)
                        number = before + 1

    def remove_worker(self, lane: int) -> None:
        """Remove a worker, so that no joint waits for it. May be called again. Thread: any.

        Raises tf.errors.OpError if a ps is lost.
        """
        with separate_executor():
            for joints in self.on.values():
                joints.depart(lane)
