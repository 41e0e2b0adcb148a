"""The change that a step makes to a variable: a function of the value that the ps holds.

A step computes a new value from the value that it pulled. Meanwhile other workers push. So what is
sent is not the new value but the function that led to it, and the ps applies it to the value that
it holds then. All changes have one form, `clip(scale * value + addend, low, high)`:

    a counter             value + addend
    a moving average      scale * value + addend
    the largest so far    at least `low`
    clipped weights       at least `low`, at most `high`
    anything else         addend: `scale` is 0, and the last value stands
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kerasps.variables import ParameterServerVariable

# A number, a tensor or its spec, or None.
Field = Any


class Change(NamedTuple):
    """The function `clip(scale * value + addend, low, high)` of a variable's value.

    Each field is a number, a tensor (or its spec), or None. A tensor has the variable's dtype, and
    its shape or none.
    """

    scale: Field = None  # the factor; None for 1
    addend: Field = None  # the addend; None for 0
    low: Field = None  # the least new value; None for no bound
    high: Field = None  # the largest new value, which wins over `low`; None for no bound

    @property
    def only_adds(self) -> bool:
        """True if the change is an addition, or none at all."""
        return self.scale is None and self.low is None and self.high is None

    @property
    def only_replaces(self) -> bool:
        """True if the new value does not depend on the old one."""
        return is_number(self.scale) and self.scale == 0 and self.low is None and self.high is None

    def numbers(self) -> Change:
        """Return the change with None for tensors."""
        return Change(*(field if is_number(field) else None for field in self))

    def tensors(self) -> Change:
        """Return the change with None for numbers, which are not sent."""
        return Change(*(None if is_number(field) else field for field in self))

    def filled_from(self, other: Change) -> Change:
        """Return the change with the fields of `other` in place of None."""
        return Change(
            *(theirs if ours is None else ours for ours, theirs in zip(self, other, strict=True))
        )

    def of(self, value: tf.Tensor) -> tf.Tensor:
        """Return the new value of a variable that has this value."""
        if self.only_replaces:
            addend = tf.zeros([], value.dtype) if self.addend is None else self.addend
            return tf.broadcast_to(tf.cast(addend, value.dtype), tf.shape(value))
        dtype = tf.uint8 if value.dtype.is_bool else value.dtype
        new = tf.cast(value, dtype)
        scale, addend, low, high = (
            None if field is None else tf.cast(field, dtype) for field in self
        )
        if scale is not None:
            # Where a value is replaced, the old one may be no number.
            keeps_nan = is_number(self.scale) or not dtype.is_floating
            new = new * scale if keeps_nan else tf.math.multiply_no_nan(new, scale)
        if addend is not None:
            new = new + addend
        if low is not None:
            new = tf.maximum(new, low)
        if high is not None:
            new = tf.minimum(new, high)
        return tf.cast(new, value.dtype)


def is_number(field: object) -> bool:
    """Return True if a field of a change is a number, known when the step is traced."""
    return isinstance(field, (int, float, np.generic))


@dataclass(frozen=True)
class StateChange:
    """A change that each step makes to a variable, beside the updates of optimizers."""

    variable: ParameterServerVariable
    after: int  # the number of the step's updates that come before it
    numbers: Change  # the fields that are the same in each step
    sent: Change  # the specs of the other fields, which the step computes
    # Whether the new value is, at some places or sometimes, independent of the old one. Two such
    # changes do not add up: the later one stands.
    replaces: bool

    @classmethod
    def of(
        cls, variable: ParameterServerVariable, after: int, change: Change, *, replaces: bool
    ) -> tuple[StateChange, Change]:
        """Return the change, and the tensors that a step sends for it.

        Args:
            change: the change; its tensors may have any shape that broadcasts to the variable's.
        """
        shape, dtype = variable.storage.shape, variable.storage.dtype

        def sent(tensor: Field) -> Field:
            if tensor is None:
                return None
            tensor = tf.cast(tensor, dtype)
            if tensor.shape.num_elements() == 1:
                return tf.reshape(tensor, [])
            return tensor if tensor.shape == shape else tf.broadcast_to(tensor, shape)

        numbers = change.numbers()
        if numbers.scale is not None and numbers.scale == 1:
            numbers = numbers._replace(scale=None)
        if numbers.addend is not None and numbers.addend == 0 and change.scale is None:
            numbers = numbers._replace(addend=None)
        tensors = Change(*map(sent, change.tensors()))
        specs = (
            None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
            for tensor in tensors
        )
        return cls(variable, after, numbers, Change(*specs), replaces), tensors

    def joined(self, changes: list[Change]) -> Change:
        """Return the tensors of one change in place of those of several replicas.

        Means of additions and of moving averages, the narrowest bounds; of values that replace, the
        last one stands.
        """
        if len(changes) == 1 or self.variable.aggregation == "only_first_replica":
            return changes[0]
        scale, addend, low, high = self.sent
        if self.replaces:
            scales = [change.scale for change in changes]
            addends = [change.addend for change in changes]
            fields = self._in_turn(scales, addends)
        else:
            fields = (
                None if scale is None else mean_of([change.scale for change in changes]),
                None if addend is None else self._added([change.addend for change in changes]),
            )
        lows, highs = [change.low for change in changes], [change.high for change in changes]
        return Change(
            *fields,
            None if low is None else _folded(largest, lows),
            None if high is None else _folded(least, highs),
        )

    def _in_turn(self, scales: list[Field], addends: list[Field]) -> tuple[Field, Field]:
        if self.sent.scale is None:
            return None, addends[-1]
        scale, addend = scales[0], addends[0]
        for later_scale, later_addend in zip(scales[1:], addends[1:], strict=True):
            scale = product(scale, later_scale)
            if self.sent.addend is not None:
                addend = following(addend, later_scale, later_addend)
        return scale, addend

    def of_replicas(self, count: int) -> StateChange:
        """Return the change that `count` replicas make together; see `joined` for its tensors.

        A number that each of them adds is not sent, so it is multiplied here.
        """
        addend = self.numbers.addend
        if addend is None or self.replaces or not self._adds_up:
            return self
        return replace(self, numbers=self.numbers._replace(addend=addend * count))

    @property
    def _adds_up(self) -> bool:
        """True if the additions of replicas are summed; else they are averaged.

        It follows the variable's `aggregation`. Without one, integers are counts and are summed;
        other values, such as moving averages, are averaged.
        """
        aggregation = self.variable.aggregation
        is_count = aggregation in (None, "none") and self.variable.storage.dtype.is_integer
        is_addition = self.numbers.scale is None and self.sent.scale is None
        return is_addition and (aggregation == "sum" or is_count)

    def _added(self, addends: list[tf.Tensor]) -> tf.Tensor:
        """Return the total addition of all replicas."""
        return tf.add_n(addends) if self._adds_up else mean_of(addends)


def mean_of(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Return the mean of tensors, rounded down for integers."""
    return divided(tf.add_n(tensors), tf.constant(len(tensors)))


def divided(total: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return a total divided by a count, rounded down for integers."""
    count = tf.cast(count, total.dtype)
    return total / count if total.dtype.is_floating or total.dtype.is_complex else total // count


def product(scale: tf.Tensor, later: tf.Tensor) -> tf.Tensor:
    """Return the factor of two changes in turn."""
    return tf.logical_and(scale, later) if scale.dtype.is_bool else scale * later


def following(addend: tf.Tensor, scale: tf.Tensor, later: tf.Tensor) -> tf.Tensor:
    """Return the addend of a change with `addend`, then one with `scale` and addend `later`."""
    if addend.dtype.is_bool:
        return tf.logical_or(tf.logical_and(addend, scale), later)
    if addend.dtype.is_floating:
        return tf.math.multiply_no_nan(addend, scale) + later
    return addend * scale + later


def _folded(operation: Callable[[Field, Field], Field], tensors: list[tf.Tensor]) -> tf.Tensor:
    first, *others = tensors
    for tensor in others:
        first = operation(first, tensor)
    return first


def largest(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the larger of two bounds, place by place."""
    return tf.logical_or(one, other) if one.dtype.is_bool else tf.maximum(one, other)


def least(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the smaller of two bounds, place by place."""
    return tf.logical_and(one, other) if one.dtype.is_bool else tf.minimum(one, other)


def least_of(dtype: tf.DType) -> Field:
    """Return the least value of a dtype: a bound that binds nothing."""
    if dtype.is_bool:
        return False
    return -np.inf if dtype.is_floating else dtype.min


def largest_of(dtype: tf.DType) -> Field:
    """Return the largest value of a dtype: a bound that binds nothing."""
    if dtype.is_bool:
        return True
    return np.inf if dtype.is_floating else dtype.max
