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

from kerasps import _compat
from kerasps.placement import COORDINATOR_CPU

_LOCK = threading.Lock()
_FUNCTIONS: dict[Any, Any] = {}


def fetch(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    """The values of `tensors`, which may be on any task."""
    if not all(_is_here(tensor) for tensor in tensors):
        specs = tuple(tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in tensors)
        with tf.device(COORDINATOR_CPU):
            tensors = _call(_function(specs), tensors)
    return [tensor.numpy() for tensor in tensors]


def _call(function: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    # As TensorFlow calls it, but for the cancellation manager of the executions in flight: where a function of this process and
    # of a task fails, for a lost worker, TensorFlow cancels all that goes by the same manager, now and later.
    context = _compat.eager_context()
    attributes = tuple(part for item in context.function_call_options.as_attrs().items() for part in item)
    name, num_outputs = function.name.decode(), len(function.outputs)
    return list(_compat.execute(name, num_outputs, list(tensors), attributes, context))


def _is_here(tensor: tf.Tensor) -> bool:
    try:
        return bool(tensor.device == COORDINATOR_CPU)
    except ValueError:
        # So it is called by TensorFlow when the task that was to make the tensor is lost; to read it says so as it should.
        tensor.numpy()
        raise


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
