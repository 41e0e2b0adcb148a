"""Functions that a ps runs for this process: under its lock, and again where that fails.

The rules for such a function, which hold here for all:

- It is traced once and called on its task's device, so nothing is left there when it is deleted.
- It is called apart from the executions in flight: when a worker is lost, TensorFlow cancels what
  goes by the same cancellation manager.
- Its arguments are made on the coordinator. A tensor that is made elsewhere is waited for with
  Python's lock held, behind what waits for workers.
- It returns something, since a remote call that returns nothing is not waited for.
- An error of the runtime may be about something that this process has deleted on a task that is
  gone. So a call is made again (`persist`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from kerasps.runtime import fetching
from kerasps.runtime.calls import call_apart, persist
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.fetching import fetch, sent

_Returned = TypeVar("_Returned")


def with_stateful(work: Callable[[], _Returned]) -> tuple[_Returned, list[tf.Operation]]:
    """Add the operations of `work` to the current graph.

    Returns:
        What it returned, and those of its operations that change something, for others to wait for.
    """
    graph = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    returned = work()
    return returned, [op for op in graph.get_operations()[start:] if op.op_def.is_stateful]


def under_lock(
    mutex: tf.Tensor,
    work: Callable[[], _Returned],
    *,
    after: Sequence[tf.Tensor | tf.Operation] = (),
) -> tuple[_Returned, tf.Operation]:
    """Add the operations of `work` to the current graph, with a lock held around them.

    Args:
        mutex: the lock.
        work: adds the operations.
        after: what is waited for before the lock is taken.

    Returns:
        What `work` returned, and the operation that releases the lock, when all that changes
        something is done.
    """
    with tf.control_dependencies(after):
        lock = tf.raw_ops.MutexLock(mutex=mutex)

    def locked() -> _Returned:
        with tf.control_dependencies([lock]):
            return work()

    returned, changes = with_stateful(locked)
    with tf.control_dependencies(changes):
        return returned, tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


class OnPS:
    """A function that a ps runs for this process.

    Args:
        device: the device of the ps.
        body: adds the operations, given a tensor for each spec; returns a tensor, or a list.
        specs: those of its arguments.
        mutex: the lock that it holds. Default: none.
    """

    def __init__(
        self,
        device: str,
        body: Callable[..., object],
        *specs: tf.TensorSpec,
        mutex: tf.Tensor | None = None,
    ) -> None:
        def run(*arguments: tf.Tensor) -> Any:
            with tf.device(device):
                arguments = tuple(tf.identity(argument) for argument in arguments)
                if mutex is None:
                    return body(*arguments)
                returned, _ = under_lock(
                    mutex, functools.partial(body, *arguments), after=arguments
                )
                return returned

        self._device = device
        self._specs = specs
        with tf.init_scope():
            self._function = tf.function(run, autograph=False).get_concrete_function(*specs)

    @property
    def dtypes(self) -> list[tf.DType]:
        """The dtypes of what it returns."""
        return [output.dtype for output in self._function.outputs]

    def start(self, *arguments: object) -> list[tf.Tensor]:
        """Call it; return tensors on the ps, which may not be there yet."""
        with tf.device(COORDINATOR_CPU):
            tensors = [
                tf.constant(argument, spec.dtype)
                for argument, spec in zip(arguments, self._specs, strict=True)
            ]
        with tf.device(self._device):
            # A tensor of one element goes with the call.
            return call_apart(self._function, [sent(t) if t.shape.rank else t for t in tensors])

    def call(self, *arguments: object) -> list[np.ndarray]:
        """Call it, again where that fails; return the values that it returned.

        For what may be done twice. Thread: any.

        Raises:
            tf.errors.OpError: the ps is lost.
        """
        return call_on_each([self], *arguments)

    def take(self) -> list[np.ndarray]:
        """Call it once; return the values that it returned. For what may not be done twice.

        A call that fails for the end of another task has done nothing. Thread: any.

        Raises:
            tf.errors.OpError: the ps is lost.
        """
        taken = persist(self.start)
        return persist(functools.partial(fetch, taken))


def make_ready(functions: Sequence[OnPS]) -> None:
    """Trace what `call_on_each` needs for these functions, now and not when it is first called.

    TensorFlow tells every task of a function that is traced, and keeps this process from all else
    until each has replied. So nothing should be traced that is needed when a worker hangs.
    """
    fetching.make_ready([dtype for function in functions for dtype in function.dtypes])


def call_on_each(functions: Sequence[OnPS], *arguments: object) -> list[np.ndarray]:
    """Call functions side by side, with the same arguments; return their values, in their order.

    All are called again where one fails. Thread: any.

    Raises:
        tf.errors.OpError: a ps is lost.
    """
    return persist(lambda: fetch([t for function in functions for t in function.start(*arguments)]))
