"""Small values on a ps that several processes know by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.runtime.errors import naming_lost_ps
from kerasps.runtime.fetching import fetch
from kerasps.runtime.on_ps import under_lock


class Cell:
    """A value on a ps, which a process must set before another reads it."""

    def __init__(self, name: str, dtype: tf.DType, device: str) -> None:
        self._dtype = dtype
        self._device = device
        with naming_lost_ps, tf.init_scope(), tf.device(device):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=[], container="", shared_name=name
            )

    @property
    def is_set(self) -> bool:
        """True once the value was set."""
        with naming_lost_ps, tf.device(self._device):
            return bool(fetch([tf.raw_ops.VarIsInitializedOp(resource=self._handle)])[0])

    @property
    def value(self) -> Any:
        """The value, as a NumPy scalar. Call when it is set."""
        with naming_lost_ps, tf.device(self._device):
            read = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)
            return fetch([read])[0]

    def set(self, value: object) -> None:
        """Set the value."""
        with naming_lost_ps, tf.device(self._device):
            tf.raw_ops.AssignVariableOp(
                resource=self._handle, value=tf.constant(value, self._dtype)
            )


class SharedSum:
    """Numbers on a ps to which several processes add, under a lock; zeros at first.

    Args:
        num_maxima: how many of the numbers, the last ones, are maxima and not sums; less than any
            number at first.
    """

    def __init__(
        self,
        name: str,
        length: int,
        num_maxima: int,
        device: str,
        mutex: Callable[[str], tf.Tensor],
    ) -> None:
        self._length = length
        self._device = device
        sizes = [length - num_maxima, num_maxima]

        def start() -> tf.Tensor:
            numbers = (tf.constant(0.0, tf.float64), tf.constant(-np.inf, tf.float64))
            return tf.concat([tf.fill([n], x) for n, x in zip(sizes, numbers, strict=True)], 0)

        def joined(before: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
            (sums, maxima), (addends, others) = tf.split(before, sizes), tf.split(values, sizes)
            return tf.concat([sums + addends, tf.maximum(maxima, others)], 0)

        def locked(change: Callable[[tf.Tensor], tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.float64, shape=[length], container="", shared_name=name
            )
            before = tf.cond(
                tf.raw_ops.VarIsInitializedOp(resource=handle),
                lambda: tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64),
                start,
            )
            before = tf.ensure_shape(before, [length])
            after = change(before)
            tf.raw_ops.AssignVariableOp(resource=handle, value=after)
            return before, after

        def changed(change: Callable[[tf.Tensor], tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.device(device):
                return under_lock(mutex(device), lambda: locked(change))[0]

        spec = tf.TensorSpec([length], tf.float64)
        with naming_lost_ps, tf.init_scope():
            self._add = tf.function(
                lambda values: changed(lambda before: joined(before, values))[1], autograph=False
            ).get_concrete_function(spec)
            self._read_and_reset = tf.function(
                lambda: changed(lambda _: start())[0], autograph=False
            ).get_concrete_function()

    def add(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Add a value to each number; return the new numbers."""
        with naming_lost_ps, tf.device(self._device):
            return np.asarray(fetch([self._add(tf.constant(values, tf.float64))])[0])

    def read_and_reset(self) -> np.ndarray:
        """Return the numbers, and start them anew."""
        with naming_lost_ps, tf.device(self._device):
            return np.asarray(fetch([self._read_and_reset()])[0])
