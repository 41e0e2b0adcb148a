"""Brings values of other tasks to this process, and leaves nothing behind on them.

When TensorFlow copies a tensor from another task by itself (`tensor.numpy()`), that task keeps an
operation for it until the coordinator ends: some 3 kB for each copy. A training fetches five times
a second. A function that is called with the tensor sends it with an operation of its own, which is
the same each time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.runtime.calls import call_apart
from kerasps.runtime.devices import COORDINATOR_CPU

_LOCK = threading.Lock()
_FUNCTIONS: dict[Any, Any] = {}


def fetch(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    """Return the values of `tensors`, which may be on any task.

    Raises:
        tf.errors.OpError: a task that holds one of them is lost, or failed to make it.
    """
    if not tensors:
        return []
    # Neither where a tensor is nor what shape it has is asked here: until a task has made it, the
    # answer is waited for with Python's lock held, so that one task that hangs stops every thread.
    specs = tuple(tf.TensorSpec(None, tensor.dtype) for tensor in tensors)
    with tf.device(COORDINATOR_CPU):
        return [tensor.numpy() for tensor in call_apart(_function(specs), tensors)]


def make_ready(dtypes: Sequence[tf.DType]) -> None:
    """Trace what `fetch` needs for tensors of such dtypes, now and not when it is first called."""
    _function(tuple(tf.TensorSpec(None, dtype) for dtype in dtypes))


def sent(tensors: object) -> Any:
    """Return tensors of this process, sent to the current device, for a function to take there.

    TensorFlow may wait for ever for one that it sends for a call by itself, where it takes a worker
    back meanwhile: a call of a function waits until its arguments have arrived, and what was on the
    way then is never said to have. An operation does not wait for its arguments, and nor does a
    function for one of a single element.

    Args:
        tensors: a tensor, or a structure of tensors.
    """
    flat = tf.nest.flatten(tensors, expand_composites=True)
    return tf.nest.pack_sequence_as(tensors, tf.identity_n(flat), expand_composites=True)


def _function(specs: tuple[tf.TensorSpec, ...]) -> Any:
    """Return the function for so many tensors of such dtypes; there are few."""
    with _LOCK:
        if specs not in _FUNCTIONS:
            with tf.init_scope():
                _FUNCTIONS[specs] = tf.function(_here, autograph=False).get_concrete_function(
                    *specs
                )
        return _FUNCTIONS[specs]


def _here(*tensors: tf.Tensor) -> list[tf.Tensor]:
    with tf.device(COORDINATOR_CPU):
        return [tf.identity(tensor) for tensor in tensors]
