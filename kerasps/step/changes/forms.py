"""The forms of new values, as functions of a variable's old value, and operations on them.

A field of a form is a number, a tensor, None, or `SOME`: a tensor of a branch, known to exist only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from kerasps.step.contract import change
from kerasps.step.contract.change import Change, Field, is_number, largest_of, least_of


class _Some:
    """Stands for a tensor that the graph at hand cannot use."""


SOME = _Some()
_NO_CHANGE = Change()


@dataclass(frozen=True)
class Form:
    """A new value as a function of the old one."""

    change: Change = _NO_CHANGE  # the function
    # Whether the new value is, at some places or sometimes, independent of the old one.
    replaces: bool = False
    # Whether the change is the same for each old value. If not, a field of the change was computed
    # from the old value, and the new value stands as the last one.
    is_exact: bool = True

    @classmethod
    def of_value(cls, value: Field, *, is_exact: bool = False) -> Form:
        """Return the form of a value that replaces the old one."""
        return cls(Change(scale=0, addend=value), replaces=True, is_exact=is_exact)

    @property
    def is_bounded(self) -> bool:
        """True if the form has bounds."""
        return self.change.low is not None or self.change.high is not None

    @property
    def is_affine(self) -> bool:
        """True if the form scales or adds."""
        return self.change.scale is not None or self.change.addend is not None

    def mapped(self, function: Callable[[Field], Field]) -> Form:
        """Return the form with each tensor or number replaced by the result of a function."""
        fields = (None if field is None else function(field) for field in self.change)
        return replace(self, change=Change(*fields))

    # Operations with a value that does not depend on the old one

    def plus(self, term: Field) -> Form:
        """Return the form of the new value plus a term."""
        scale, addend, low, high = self.change
        moved = (None if bound is None else plus(bound, term) for bound in (low, high))
        return replace(self, change=Change(scale, plus(addend, term), *moved))

    def times(self, factor: Field) -> Form | None:
        """Return the form of the new value times a factor; None if bounds may change places."""
        scale, addend, low, high = self.change
        if self.is_bounded and not is_number(factor):
            return None
        low, high = (None if bound is None else times(bound, factor) for bound in (low, high))
        if is_number(factor) and factor < 0:
            # The smaller bound would win where the bounds are the wrong way round.
            low, high = high, low
        addend = None if addend is None else times(addend, factor)
        return replace(self, change=Change(times(scale, factor), addend, low, high))

    def at_least(self, bound: Field) -> Form:
        """Return the form of the maximum of the new value and a bound."""
        scale, addend, low, high = self.change
        high = None if high is None else largest(high, bound)
        return replace(self, change=Change(scale, addend, largest(low, bound), high))

    def at_most(self, bound: Field) -> Form:
        """Return the form of the minimum of the new value and a bound."""
        return replace(self, change=self.change._replace(high=least(self.change.high, bound)))

    # Operations with another value that depends on the old one

    def plus_form(self, other: Form) -> Form | None:
        """Return the form of the sum of two values; None if there is none."""
        if self.is_bounded or other.is_bounded or not (self.is_exact and other.is_exact):
            return None
        scale = plus(_factor(self), _factor(other))
        addend = plus(self.change.addend, other.change.addend)
        return Form(Change(_or_none(scale), addend), self.replaces and other.replaces)

    def or_else(self, condition: Field, other: Form, dtype: tf.DType) -> Form:
        """Return the form of this new value where a condition holds, and of the other elsewhere."""

        def chosen(one: Field, two: Field, default: Field) -> Field:
            if one is None and two is None:
                return None
            one, two = (default if field is None else field for field in (one, two))
            if is_number(one) and is_number(two) and one == two:
                return one
            if any(field is SOME for field in (condition, one, two)):
                return SOME
            return tf.where(condition, tensor_of(one, dtype), tensor_of(two, dtype))

        defaults = Change(1, 0, least_of(dtype), largest_of(dtype))
        fields = map(chosen, self.change, other.change, defaults)
        return Form(
            Change(*fields), self.replaces or other.replaces, self.is_exact and other.is_exact
        )


def _factor(form: Form) -> Field:
    return 1 if form.change.scale is None else form.change.scale


def _or_none(scale: Field) -> Field:
    return None if is_number(scale) and scale == 1 else scale


def tensor_of(field: Field, dtype: tf.DType) -> tf.Tensor:
    """Return a field as a tensor."""
    if isinstance(field, tf.Tensor):
        return field
    return tf.constant(dtype.as_numpy_dtype(field), dtype)


# Operations on fields. Tensors have one dtype, to which numbers are converted.


def plus(one: Field, other: Field) -> Field:
    """Return a sum of fields; None is 0."""
    return _combined(one, other, np.add, tf.add)


def times(one: Field, other: Field) -> Field:
    """Return a product of fields; None is 1."""
    if any(is_number(field) and field == 0 for field in (one, other)):
        return 0
    return _combined(one, other, np.multiply, tf.multiply)


def largest(one: Field, other: Field) -> Field:
    """Return the maximum of fields; None is no bound."""
    return _combined(one, other, np.maximum, change.largest)


def least(one: Field, other: Field) -> Field:
    """Return the minimum of fields; None is no bound."""
    return _combined(one, other, np.minimum, change.least)


def negated(field: Field) -> Field:
    """Return a field with the other sign."""
    return field if field is SOME else -field


def reciprocal(field: Field) -> Field:
    """Return 1 divided by a field."""
    return field if field is SOME else 1 / field


def _combined(
    one: Field, other: Field, of_numbers: Callable[..., Field], of_tensors: Callable[..., Field]
) -> Field:
    if one is None or other is None:
        return other if one is None else one
    if one is SOME or other is SOME:
        return SOME
    if is_number(one) and is_number(other):
        return of_numbers(one, other)
    dtype = one.dtype if isinstance(one, tf.Tensor) else other.dtype
    return of_tensors(tensor_of(one, dtype), tensor_of(other, dtype))
