"""The changes of states in a joint: one change from those of all pushes.

Additions and moving averages change by their mean, as if one worker had the batches of all. Bounds
are joined. Of values that replace the old one, the last to arrive stands, place by place.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kerasps.step.contract.change import (
    Change,
    Field,
    StateChange,
    divided,
    following,
    largest,
    largest_of,
    least,
    least_of,
    product,
)
from kerasps.variables import NamedVariable


class JointChange:
    """The change of one shard in the open joint of its ps."""

    def __init__(self, change: StateChange, specs: Change) -> None:
        self._replaces = change.replaces
        starts = self._starts(specs)
        self._buffers = Change(
            *(
                None if spec is None else joint_variable(spec.shape, spec.dtype, start)
                for spec, start in zip(specs, starts, strict=True)
            )
        )
        self._starts_of = starts

    def _starts(self, specs: Change) -> list[Field]:
        numbers = Change(
            lambda dtype: dtype.as_numpy_dtype(1 if self._replaces else 0),
            lambda dtype: dtype.as_numpy_dtype(0),
            least_of,
            largest_of,
        )
        return [
            None if spec is None else _filled(spec, number(spec.dtype))
            for spec, number in zip(specs, numbers, strict=True)
        ]

    def add(self, change: Change) -> None:
        """Add the change of a push. Runs on the ps, under the lock."""
        scale, addend, low, high = self._buffers
        if not self._replaces:
            for buffer, field in ((scale, change.scale), (addend, change.addend)):
                if buffer is not None:
                    buffer.assign_add(field, read_value=False)
        else:
            if addend is not None:
                new = change.addend
                if scale is not None:
                    new = following(addend.read_value(), change.scale, new)
                addend.assign(new, read_value=False)
            if scale is not None:
                scale.assign(product(scale.read_value(), change.scale), read_value=False)
        if low is not None:
            low.assign(largest(low.read_value(), change.low), read_value=False)
        if high is not None:
            high.assign(least(high.read_value(), change.high), read_value=False)

    def joined(self, count: tf.Tensor) -> Change:
        """Return the change of `count` pushes. Runs on the ps, under the lock."""
        scale, addend, low, high = (
            None if buffer is None else buffer.read_value() for buffer in self._buffers
        )
        if not self._replaces:
            scale, addend = (
                None if total is None else divided(total, count) for total in (scale, addend)
            )
        return Change(scale, addend, low, high)

    def clear(self) -> None:
        """Begin the next joint. Runs on the ps, under the lock."""
        for buffer, start in zip(self._buffers, self._starts_of, strict=True):
            if buffer is not None:
                buffer.assign(start(), read_value=False)


def _filled(spec: tf.TensorSpec, number: object) -> Field:
    return lambda: tf.fill(spec.shape, tf.constant(number, spec.dtype))


def joint_variable(
    shape: Sequence[int] | tf.TensorShape, dtype: tf.DType, initial_value: Field
) -> NamedVariable:
    """Return a new variable of a joint, on the current device."""
    with tf.init_scope():
        return NamedVariable(initial_value, shape=shape, dtype=dtype, trainable=False, name="joint")
