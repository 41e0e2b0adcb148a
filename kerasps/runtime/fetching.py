"""Fetches values from other tasks, without leaving operations on them.

When TensorFlow implicitly copies a tensor from another task (`tensor.numpy()`), that task keeps an
operation for it until the coordinator ends: some 3 kB for each copy. A training fetches five times
a second. A function that is called with the tensor sends it with its operation, which is the same
each time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.runtime.calls import call_uncancellable
from kerasps.runtime.devices import COORDINATOR_CPU

_LOCK = threading.Lock()
_FUNCTIONS: dict[Any, Any] = {}


def fetch(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    """Return the values of `tensors`, which may be on any task."""
    if not tensors:
        return []
    # Read neither the device nor the shape of a tensor here: until a task has computed it, the read
    # waits with Python's lock held, so that one task that hangs would stop every thread.
    specs = tuple(tf.TensorSpec(None, tensor.dtype) for tensor in tensors)
    with tf.device(COORDINATOR_CPU):
        return [tensor.numpy() for tensor in call_uncancellable(_function(specs), tensors)]


def make_ready(dtypes: Sequence[tf.DType]) -> None:
    """Trace the function that `fetch` needs for tensors of these dtypes, before its first call."""
    _function(tuple(tf.TensorSpec(None, dtype) for dtype in dtypes))


def sent(tensors: object) -> Any:
    """Return tensors of this process, sent to the current device, as arguments of a function there.

    A call of a function waits until its arguments have arrived. If TensorFlow sends them implicitly
    and reconnects a worker meanwhile, the arrival of arguments in flight is never reported, and the
    call waits for ever. An operation does not wait for its arguments. A function does not wait for
    an argument of one element. None, for an input that a model can do without, stays None.
    """
    flat = tf.nest.flatten(tensors, expand_composites=True)
    passed_on = iter(tf.identity_n([tensor for tensor in flat if tensor is not None]))
    flat = [None if tensor is None else next(passed_on) for tensor in flat]
    return tf.nest.pack_sequence_as(tensors, flat, expand_composites=True)


def _function(specs: tuple[tf.TensorSpec, ...]) -> Any:
    """Return the function that fetches tensors with these specs; there are few such functions."""
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
