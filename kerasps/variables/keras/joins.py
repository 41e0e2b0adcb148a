"""The ways in which the states that workers compute for a metric become one state."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


class Join(enum.Enum):
    """The way in which two states of a metric become one; the order does not matter.

    A step of `fit` computes a state from the batches of its worker alone. That state begins at
    `start`, which changes no other state that it is joined with.
    """

    SUM = "a sum"
    MAXIMUM = "a maximum"
    MINIMUM = "a minimum"

    def start(self, spec: tf.TensorSpec) -> tf.Tensor:
        """Return the state before the first batch, in the current graph."""
        return tf.fill(spec.shape, tf.constant(self._identity(spec.dtype), spec.dtype))

    def _identity(self, dtype: tf.DType) -> Any:
        if self is Join.SUM:
            return dtype.as_numpy_dtype(0)
        is_maximum = self is Join.MAXIMUM
        if dtype.is_bool:
            return not is_maximum
        if dtype.is_floating:
            return -np.inf if is_maximum else np.inf
        return dtype.min if is_maximum else dtype.max

    def tensors(self, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        """Return the state of both, in the current graph."""
        operations: dict[Join, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
            Join.SUM: operator.add,
            Join.MAXIMUM: tf.logical_or if one.dtype.is_bool else tf.maximum,
            Join.MINIMUM: tf.logical_and if one.dtype.is_bool else tf.minimum,
        }
        return operations[self](one, other)

    def arrays(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the state of both, as an array."""
        operations = {Join.SUM: np.add, Join.MAXIMUM: np.maximum, Join.MINIMUM: np.minimum}
        joined: np.ndarray = operations[self](one, other)
        return joined
