"""The table of joints of one ps: its members, and those that have pushed to the open joint.

A *joint* is one synchronous update: each member, which is a worker that takes part, sends it one
push. The ps buffers the pushes; the push that completes the joint applies the mean. Joints are
numbered. This module counts workers; `step/phases/joints.py` holds the buffered pushes.

The table is one int64 vector: the state of the open joint, then an entry for each lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from kerasps.variables.lanes.fences import OPEN_LANE
from kerasps.variables.lanes.lane_table import NUM_LANES, place_of

# The entry of a lane: 0 if it is not a member; 1 if it is one and has pushed to no joint yet; else
# the number of the last joint that it pushed to, plus 2.
_OUT, _NEW, _CAME = 0, 1, 2
_NUM_COUNTS = 4
JOINT_TABLE_SIZE = _NUM_COUNTS + NUM_LANES

# A worker that waits for a joint takes a token from one of so many queues, which joints use in
# turn. A waiter of a later joint may take a leftover token; it then checks again and waits on. So
# there must be more than one queue.
_NUM_GATES = 4


class JointState(NamedTuple):
    """The state of the open joint of a ps: int64 scalars."""

    number: tf.Tensor  # its number, which is the number of joints completed before
    members: tf.Tensor  # the number of workers that take part
    arrived: tf.Tensor  # the number of members that have pushed to it, or are excused from it
    contributions: tf.Tensor  # the number of buffered pushes, those of workers that left included

    def is_complete(self, num_backups: int) -> tf.Tensor:
        """Return whether at most `num_backups` members are missing and one push has come."""
        has_any = self.arrived + self.contributions > 0
        return tf.logical_and(has_any, self.members - self.arrived <= num_backups)

    def next(self) -> JointState:
        """Return the state after this joint is completed."""
        zero = tf.zeros([], tf.int64)
        return JointState(self.number + 1, self.members, zero, zero)


class Member(NamedTuple):
    """The state of the open joint, and the entry of one lane in the table."""

    state: JointState  # the state of the open joint
    entry: tf.Tensor  # the lane's entry

    @classmethod
    def read(cls, table: tf.Tensor, lane: tf.Tensor) -> Member:
        """Read the entry of a lane. Call on the ps, with its lock held."""
        places = tf.stack(_places(lane))
        *counts, entry = tf.unstack(
            tf.raw_ops.ResourceGather(resource=table, indices=places, dtype=tf.int64)
        )
        return cls(JointState(*counts), entry)

    def write(self, table: tf.Tensor, lane: tf.Tensor) -> None:
        """Write state and entry to the table. Call on the ps, with its lock held."""
        tf.raw_ops.ResourceScatterUpdate(
            resource=table,
            indices=tf.stack(_places(lane)),
            updates=tf.stack([*self.state, self.entry]),
        )

    @property
    def takes_part(self) -> tf.Tensor:
        """True if the lane is a member."""
        return self.entry != _OUT

    @property
    def has_come(self) -> tf.Tensor:
        """True if the lane has pushed to the open joint, or is excused from it."""
        return tf.equal(self.entry, self.state.number + _CAME)

    def is_due(self, lane: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Return whether the open joint accepts a push of the lane for the joint `number`."""
        # Steps of the coordinator run while no worker is a member.
        is_known = tf.logical_or(self.takes_part, tf.equal(lane, OPEN_LANE))
        is_open = tf.logical_and(tf.equal(number, self.state.number), ~self.has_come)
        return tf.logical_and(is_known, is_open)

    def come(self, is_due: tf.Tensor, contributes: tf.Tensor) -> Member:
        """Return the member after a push.

        Args:
            is_due: whether the open joint accepts the push.
            contributes: whether the push was buffered.
        """
        state = self.state._replace(
            arrived=self.state.arrived + tf.cast(is_due, tf.int64),
            contributions=self.state.contributions + tf.cast(contributes, tf.int64),
        )
        comes = tf.logical_and(is_due, self.takes_part)
        return Member(state, tf.where(comes, self.state.number + _CAME, self.entry))

    def admitted(self) -> Member:
        """Return the member after the lane was admitted: the open joint waits for it."""
        is_new = tf.cast(~self.takes_part, tf.int64)
        state = self.state._replace(members=self.state.members + is_new)
        return Member(state, tf.maximum(self.entry, _NEW))

    def excused(self, number: tf.Tensor) -> Member:
        """Return the member after it was excused from the joints before `number`."""
        is_early = tf.logical_and(self.state.number < number, ~self.has_come)
        is_alone = tf.logical_and(
            tf.equal(self.state.members, 1), tf.equal(self.state.contributions, 0)
        )
        skips = tf.logical_and(is_early, is_alone)
        waits = tf.logical_and(is_early, ~is_alone)
        state = self.state._replace(
            number=tf.where(skips, number, self.state.number),
            arrived=self.state.arrived + tf.cast(waits, tf.int64),
        )
        return Member(state, tf.where(waits, self.state.number + _CAME, self.entry))

    def departed(self) -> Member:
        """Return the member after the lane left; its buffered pushes stay."""
        state = self.state._replace(
            members=self.state.members - tf.cast(self.takes_part, tf.int64),
            arrived=self.state.arrived - tf.cast(self.has_come, tf.int64),
        )
        return Member(state, tf.zeros([], tf.int64))


def _places(lane: tf.Tensor) -> list[tf.Tensor]:
    return [*(tf.constant(i) for i in range(_NUM_COUNTS)), place_of(lane) + _NUM_COUNTS]


def read_joint(table: tf.Tensor) -> tf.Tensor:
    """Return the number of the open joint, an int64 scalar. Call on the ps."""
    return tf.raw_ops.ResourceGather(
        resource=table, indices=tf.constant(0), dtype=tf.int64, validate_indices=False
    )


def release(name: str, number: tf.Tensor, num_tokens: tf.Tensor) -> None:
    """Wake the workers that wait for the joint `number`. Call on the ps, once it is completed.

    Args:
        num_tokens: at least the number of workers that wait. A later waiter that takes a surplus
            token checks again, and waits on.
    """
    tokens = tf.zeros([num_tokens], tf.bool)

    def enqueue(gate: int) -> Callable[[], None]:
        return lambda: tf.raw_ops.QueueEnqueueManyV2(handle=_queue(name, gate), components=[tokens])

    _at_gate(number, enqueue)


def wait_for(name: str, table: tf.Tensor, number: tf.Tensor) -> None:
    """Wait until the joint `number` is completed. Call on the ps, without the lock.

    The wait blocks no thread of the ps.
    """

    def dequeue(gate: int) -> Callable[[], None]:
        return lambda: tf.raw_ops.QueueDequeueV2(
            handle=_queue(name, gate), component_types=[tf.bool]
        )

    def look_again(looks: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        _at_gate(number, dequeue)
        taken = [op for op in graph.get_operations()[start:] if op.op_def.is_stateful]
        with tf.control_dependencies(taken):
            return looks + 1

    tf.while_loop(
        lambda _: read_joint(table) <= number,
        look_again,
        (tf.constant(0),),
        parallel_iterations=1,
    )


def _at_gate(number: tf.Tensor, action: Callable[[int], Callable[[], None]]) -> None:
    gate = tf.cast(tf.math.floormod(number, _NUM_GATES), tf.int32)
    tf.switch_case(gate, [action(index) for index in range(_NUM_GATES)])


def _queue(name: str, gate: int) -> tf.Tensor:
    return tf.raw_ops.FIFOQueueV2(
        component_types=[tf.bool], shapes=[[]], shared_name=f"{name}/gate {gate}"
    )
