"""Brings values of other tasks to this process, and leaves nothing there.

When TensorFlow copies a tensor from another task by itself (`tensor.numpy()`), that task keeps an operation for it until the
coordinator ends: some 3 kB for each copy. A training fetches five times a second. A function that is called with the tensor
sends it with an operation of its own, the same each time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.placement import COORDINATOR_CPU

_LOCK = threading.Lock()
_FUNCTIONS: dict[Any, Any] = {}


def fetch(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    """The values of `tensors`, which may be on any task."""
    if any(tensor.device != COORDINATOR_CPU for tensor in tensors):
        specs = tuple(tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in tensors)
        with tf.device(COORDINATOR_CPU):
            tensors = _function(specs)(*tensors)
    return [tensor.numpy() for tensor in tensors]


def _function(specs: tuple[tf.TensorSpec, ...]) -> Any:
    """The function for tensors of such dtypes and ranks; there are few."""
    with _LOCK:
        if specs not in _FUNCTIONS:
            with tf.init_scope():
                _FUNCTIONS[specs] = tf.function(_here, autograph=False).get_concrete_function(*specs)
        return _FUNCTIONS[specs]


def _here(*tensors: tf.Tensor) -> list[tf.Tensor]:
    with tf.device(COORDINATOR_CPU):
        return [tf.identity(tensor) for tensor in tensors]
