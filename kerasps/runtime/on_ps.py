"""Functions that a ps runs for this process, under the ps's lock and with retries.

All such functions follow these rules:

- It is traced once and called on its task's device, so its deletion leaves nothing there.
- It is called separately from the executions in flight: when a worker is lost, TensorFlow cancels
  all calls with the same cancellation manager.
- Its arguments are made on the coordinator. TensorFlow waits for a tensor of another task with
  Python's lock held, after all calls that wait for workers. So pass such a tensor only when no step
  is in flight.
- It returns a value, because TensorFlow does not wait for a remote call that returns nothing.
- An error of the runtime may come from an object that this process deleted on an ended task. So a
  call is retried (`persist`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from kerasps.runtime import fetching
from kerasps.runtime.calls import call_uncancellable, persist
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.fetching import fetch, sent

_Returned = TypeVar("_Returned")


def with_stateful(work: Callable[[], _Returned]) -> tuple[_Returned, list[tf.Operation]]:
    """Add the operations of `work` to the current graph.

    Returns:
        The result of `work`, and its stateful operations, for others to wait for.
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

    Returns:
        The result of `work`, and the operation that releases the lock after all stateful
        operations.
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
        body: adds the operations, given a tensor for each spec; returns a tensor, or a list.
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
        """The dtypes of its results."""
        return [output.dtype for output in self._function.outputs]

    def start(self, *arguments: object) -> list[tf.Tensor]:
        """Call it; return tensors on the ps, which may still be in progress."""
        with tf.device(COORDINATOR_CPU):
            tensors: list[Any] = [
                argument if tf.is_tensor(argument) else tf.constant(argument, spec.dtype)
                for argument, spec in zip(arguments, self._specs, strict=True)
            ]
        with tf.device(self._device):
            # A tensor of one element is sent with the call.
            return call_uncancellable(
                self._function, [sent(t) if t.shape.rank else t for t in tensors]
            )

    def call(self, *arguments: object) -> list[np.ndarray]:
        """Call it, with retries; return the values of its results.

        Use it for functions that may run twice. Thread: any.
        """
        return call_on_each([self], *arguments)

    def run_once(self, *arguments: object) -> list[np.ndarray]:
        """Run it once; return the values of its results. Use it for functions that must run once.

        A call that fails because another task ended has done nothing, and is retried. Thread: any.
        """
        taken = persist(lambda: self.start(*arguments))
        return persist(functools.partial(fetch, taken))


def make_ready(functions: Sequence[OnPS]) -> None:
    """Trace the functions that `call_on_each` needs for these functions, before its first call.

    TensorFlow registers every traced function with all tasks, and blocks this process until each
    has replied. So functions that are needed when a worker hangs must be traced before.
    """
    fetching.make_ready([dtype for function in functions for dtype in function.dtypes])


def call_on_each(functions: Sequence[OnPS], *arguments: object) -> list[np.ndarray]:
    """Call functions concurrently, with the same arguments; return their values, in their order.

    If one fails, all are called again. Thread: any.
    """
    return persist(lambda: fetch([t for function in functions for t in function.start(*arguments)]))
