"""Iterators on workers, whose deletion does not make anything else wait.

TensorFlow deletes the iterator of a dataset when this process drops the iterator's handle. An
iterator that reads ahead is deleted when its read ends, for example when a file has data at last,
and until then the worker takes in no handle and deletes none: it does nothing that it is told. So
an iterator here is deleted by an operation of its own, and dropping its handle deletes nothing.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import threading
import weakref

import tensorflow as tf

from kerasps.errors import ClusterClosedError
from kerasps.runtime.calls import separate_executor
from kerasps.variables.storage.named import destroy

# Held while an iterator on a device is deleted.
_LOCKS: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)


def open_iterator(dataset: tf.data.Dataset) -> tf.data.Iterator:
    """Return an iterator on the device of a dataset. Call outside functions.

    It is deleted soon after this process drops the returned object. Executions that read it fail
    from then on, so wait for them before.
    """
    variant = tf.data.experimental.to_variant(dataset)
    with tf.device(variant.device):
        handle = tf.raw_ops.AnonymousIterator(**dataset._flat_structure)
        tf.raw_ops.MakeIterator(dataset=variant, iterator=handle)
    spec = tf.data.IteratorSpec(dataset.element_spec)
    iterator = tf.nest.pack_sequence_as(spec, [handle], expand_composites=True)
    weakref.finalize(iterator, _begin_to_delete, handle).atexit = False
    return iterator


def _begin_to_delete(handle: tf.Tensor) -> None:
    # Python may call this at any instant, within anything: a `Thread` would wait until it runs.
    _thread.start_new_thread(_delete, (handle,))


def _delete(handle: tf.Tensor) -> None:
    # One at a time, since each takes one of the few threads in which a worker does what it is told.
    # The executor is a separate one, since others wait for all that goes through the common one.
    with _LOCKS[handle.device], contextlib.suppress(ClusterClosedError), separate_executor():
        destroy(handle)
