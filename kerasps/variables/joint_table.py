"""The table of joints of one ps: which workers take part, and who has come to the one that is open.

A *joint* is one synchronous update: each worker that takes part comes to it with one push. The ps
buffers the pushes; the one that completes the joint applies the mean. Joints are numbered.
Workers are counted here; `step/phases/joints.py` holds the buffered pushes.

The table is one int64 vector: the state of the joint, and behind it an entry for each lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from kerasps.variables.fences import OPEN_LANE
from kerasps.variables.lane_table import NUM_LANES, place_of

# The entry of a lane: 0 where it takes no part; 1 where it does and has come to no joint yet; else
# the number of the last joint that it has come to, and 2 more.
_OUT, _NEW, _CAME = 0, 1, 2
_NUM_COUNTS = 4
JOINT_TABLE_SIZE = _NUM_COUNTS + NUM_LANES

# Who waits for a joint takes a token from one of so many queues in turn. A token that is left over
# is found by a later joint, whose waiter looks again; so there must be more than one.
_NUM_GATES = 4


class JointState(NamedTuple):
    """The state of the open joint of a ps: int64 scalars.

    Attributes:
        number: its number: how many were completed before.
        members: how many workers take part.
        arrived: how many of them have come to it.
        contributions: how many pushes were buffered, those of workers that left included.
    """

    number: tf.Tensor
    members: tf.Tensor
    arrived: tf.Tensor
    contributions: tf.Tensor

    def is_complete(self, num_backups: int) -> tf.Tensor:
        """Return whether all have come that are waited for, and somebody has."""
        has_any = self.arrived + self.contributions > 0
        return tf.logical_and(has_any, self.members - self.arrived <= num_backups)

    def next(self) -> JointState:
        """Return the state when this joint is completed."""
        zero = tf.zeros([], tf.int64)
        return JointState(self.number + 1, self.members, zero, zero)


class Member(NamedTuple):
    """The view of a table from one lane: the state, and the lane's entry.

    Attributes:
        state: the state of the open joint.
        entry: what the table has of the lane.
    """

    state: JointState
    entry: tf.Tensor

    @classmethod
    def read(cls, table: tf.Tensor, lane: tf.Tensor) -> Member:
        """Look up a lane. Call on the ps, with its lock held."""
        places = tf.stack(_places(lane))
        *counts, entry = tf.unstack(
            tf.raw_ops.ResourceGather(resource=table, indices=places, dtype=tf.int64)
        )
        return cls(JointState(*counts), entry)

    def write(self, table: tf.Tensor, lane: tf.Tensor) -> None:
        """Write it back. Call on the ps, with its lock held."""
        tf.raw_ops.ResourceScatterUpdate(
            resource=table,
            indices=tf.stack(_places(lane)),
            updates=tf.stack([*self.state, self.entry]),
        )

    @property
    def takes_part(self) -> tf.Tensor:
        """True if the lane takes part."""
        return self.entry != _OUT

    @property
    def has_come(self) -> tf.Tensor:
        """True if the lane has come to the open joint."""
        return tf.equal(self.entry, self.state.number + _CAME)

    def is_due(self, lane: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Return whether a push of the lane for the joint `number` is for the open one."""
        # The coordinator's own steps run while no worker takes part.
        is_known = tf.logical_or(self.takes_part, tf.equal(lane, OPEN_LANE))
        is_open = tf.logical_and(tf.equal(number, self.state.number), ~self.has_come)
        return tf.logical_and(is_known, is_open)

    def come(self, is_due: tf.Tensor, contributes: tf.Tensor) -> Member:
        """Return what there is after a push has come, where it is due, and brings something."""
        state = self.state._replace(
            arrived=self.state.arrived + tf.cast(is_due, tf.int64),
            contributions=self.state.contributions + tf.cast(contributes, tf.int64),
        )
        comes = tf.logical_and(is_due, self.takes_part)
        return Member(state, tf.where(comes, self.state.number + _CAME, self.entry))

    def admitted(self) -> Member:
        """Return what there is when the lane takes part: the open joint waits for it."""
        is_new = tf.cast(~self.takes_part, tf.int64)
        state = self.state._replace(members=self.state.members + is_new)
        return Member(state, tf.maximum(self.entry, _NEW))

    def excused(self, number: tf.Tensor) -> Member:
        """Return what there is when the lane takes part from joint `number` on, and not before."""
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
        """Return what there is when the lane takes part no more; what it has brought stays."""
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
        name: the name of the joints of the ps.
        number: the number of the joint.
        num_tokens: at least as many as wait. Who finds one too many looks again, and waits on.
    """
    tokens = tf.zeros([num_tokens], tf.bool)

    def enqueue(gate: int) -> Callable[[], None]:
        return lambda: tf.raw_ops.QueueEnqueueManyV2(handle=_queue(name, gate), components=[tokens])

    _at_gate(number, enqueue)


def wait_for(name: str, table: tf.Tensor, number: tf.Tensor) -> None:
    """Wait until the joint `number` is completed. Call on the ps, without the lock.

    No thread of the ps waits.
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
