"""The changes of a variable that a step assigns inside conditions and loops.

No tensor gets out of a condition or a loop. So the fields of the change are kept in scratch
resources, which begin as those of no change. Each assignment that is carried out adds its change to
them. A step in which none is carried out leaves the variable unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import tensorflow as tf

from kerasps.step.changes.forms import Form, largest, least, tensor_of
from kerasps.step.contract.change import Change, Field, following, largest_of, least_of, product
from kerasps.step.contract.inventory import ScratchKey
from kerasps.variables import ParameterServerVariable

# Values of the fields that change nothing, by the kind of their scratch resource.
_STARTS: dict[str, Callable[[tf.DType], Field]] = {
    "scale": lambda dtype: True if dtype.is_bool else 1,
    "low": least_of,
    "high": largest_of,
}


def kept_start(key: ScratchKey, spec: tf.TensorSpec) -> tf.Tensor:
    """Return the initial value of a scratch resource: a field that changes nothing, else zeros."""
    start = _STARTS.get(key.kind)
    if start is None:
        return tf.zeros(spec.shape, spec.dtype)
    return tf.fill(spec.shape, tf.constant(start(spec.dtype), spec.dtype))


class Scratch(Protocol):
    """Scratch resources of a step."""

    def keep(self, key: ScratchKey, spec: tf.TensorSpec, value: tf.Tensor) -> None:
        """Assign `value` to a scratch resource, or note that one is needed."""

    def kept(self, key: ScratchKey) -> tf.Tensor:
        """Read a scratch resource."""

    def has_scratch(self, key: ScratchKey) -> bool:
        """Return True if there is such a resource, or one is needed."""


class KeptChange:
    """The change of a variable in one stage of a step, kept in scratch resources."""

    def __init__(self, scratch: Scratch, variable: ParameterServerVariable, stage: int) -> None:
        self._scratch = scratch
        self._spec = tf.TensorSpec(variable.storage.shape, variable.storage.dtype)
        # The keys of the fields.
        self.keys = Change(*(ScratchKey(field, id(variable), stage) for field in Change._fields))
        # The forms that were added, in the order in which they were traced.
        self.forms: list[Form] = []

    def add(self, form: Form, new: tf.Tensor, *, is_state: bool) -> None:
        """Add the change of one assignment, in the graph of its branch.

        Args:
            is_state: False for a metric's state, of which the value leaves the step.
        """
        self.forms.append(form)
        if not is_state:
            return
        scale, addend, low, high = (self._needs(key) for key in self.keys)
        mixes = (scale or addend or form.is_affine) and (low or high or form.is_bounded)
        if mixes:
            # Bounds would have to be moved with the values that they bind.
            form = Form.of_value(new)
        change = form.change
        if change.scale is not None or scale:
            self._follow(self.keys.scale, change.scale, product)
        if change.addend is not None or addend:
            self._add(change)
        if mixes:
            for key, start in ((self.keys.low, least_of), (self.keys.high, largest_of)):
                if self._needs(key):
                    self._write(key, start(self._spec.dtype))
            return
        if change.low is not None or low:
            self._follow(self.keys.low, change.low, largest)
        if change.low is not None and high:
            self._follow(self.keys.high, change.low, largest)
        if change.high is not None or high:
            self._follow(self.keys.high, change.high, least)

    def form(self) -> Form:
        """Return the form of all changes, in the graph of the step."""
        change = Change(
            *(self._scratch.kept(key) if self._needs(key) else None for key in self.keys)
        )
        return Form(change, any(form.replaces for form in self.forms))

    def _needs(self, key: ScratchKey) -> bool:
        return self._scratch.has_scratch(key)

    def _add(self, change: Change) -> None:
        before = self._scratch.kept(self.keys.addend) if self._needs(self.keys.addend) else None
        if before is None:
            self._write(self.keys.addend, 0)
            return
        later = self._whole(0 if change.addend is None else change.addend)
        if change.scale is None and not before.dtype.is_bool:
            self._write(self.keys.addend, before + later)
        else:
            scale = self._whole(1 if change.scale is None else change.scale)
            self._write(self.keys.addend, following(before, scale, later))

    def _follow(
        self, key: ScratchKey, field: Field, operation: Callable[[Field, Field], Field]
    ) -> None:
        if not self._needs(key):
            self._write(key, 0)
        elif field is not None:
            self._write(key, operation(self._scratch.kept(key), self._whole(field)))

    def _whole(self, field: Field) -> tf.Tensor:
        return tf.broadcast_to(tensor_of(field, self._spec.dtype), self._spec.shape)

    def _write(self, key: ScratchKey, value: Field) -> None:
        if isinstance(value, (bool, int, float, np.generic)):
            value = self._whole(value)
        self._scratch.keep(key, self._spec, value)
