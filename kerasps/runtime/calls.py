"""Calls of concrete functions in fewer words than TensorFlow takes.

A concrete function checks and arranges its arguments by the structure that it was traced with. That
is Python, and takes longer than all the rest of a call: 0.3 ms of 0.5 for the step of an execution.
Here arguments are flat already, and as the function takes them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from kerasps import _compat
from kerasps.runtime.connected import connected_host
from kerasps.runtime.errors import lost_ps, ps_is_there

_Returned = TypeVar("_Returned")
_MAX_TRIES = 3
_PAUSE_S = 0.05


def call_flat(
    function: tf.types.experimental.ConcreteFunction, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Call a concrete function; return its flat outputs.

    Args:
        function: the `tf.types.experimental.ConcreteFunction`. No gradient tape may watch it.
        tensors: its arguments, flat, of the dtypes that it takes.
    """
    # A concrete function would add to an error of its graph where its operations were made. That is
    # not known here, and `runtime.errors` takes it away.
    outputs = _compat.eager_context().call_function(
        function.name, [*tensors, *function.captured_inputs], len(function.outputs)
    )
    return outputs or []


def call_apart(
    function: tf.types.experimental.ConcreteFunction, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Do as `call_flat`, apart from what is in flight.

    That is without the cancellation manager of the executions in flight. Where a function that runs
    here and on a task fails, for a lost worker, TensorFlow cancels everything that goes by the same
    manager, now and later.
    """
    context = _compat.eager_context()
    attributes = tuple(
        entry for item in context.function_call_options.as_attrs().items() for entry in item
    )
    name, num_outputs = function.name.decode(), len(function.outputs)
    return list(
        _compat.execute(
            name, num_outputs, [*tensors, *function.captured_inputs], attributes, context
        )
    )


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """In this context, have this thread's operations wait for nothing that was sent before.

    They go through an executor of their own, each to its end. What fails here is an error here, and
    nowhere else: other threads may have the executor from before, and one fails whatever comes
    after an error.
    """
    context = _compat.eager_context()
    before, executor = context.executor, _compat.new_executor(False)
    context.executor = executor
    try:
        yield
    finally:
        context.executor = before
        executor.clear_error()


def persist(
    call: Callable[[], _Returned],
    *,
    when: Callable[[tf.errors.OpError], bool] = lambda error: True,
) -> _Returned:
    """Call, and again where that ends in an error of TensorFlow's; return what it returns.

    What this process deletes of a task that is gone leaves an error, which the next operation ends
    in, whatever that is and wherever. So what must be done, and may be done twice, is tried again.

    Args:
        call: what is to be done, on tasks that are there.
        when: says of an error whether to call again.

    Raises:
        tf.errors.OpError: it has failed three times in a row, or for another reason, or a ps is
            lost.
    """
    for _ in range(_MAX_TRIES - 1):
        try:
            return call()
        except tf.errors.OpError as exc:
            if not when(exc):
                raise
            _compat.eager_context().executor.clear_error()
            ps, host = lost_ps(exc), connected_host()
            if ps is not None and host is not None and not ps_is_there(host, ps):
                raise
            time.sleep(_PAUSE_S)
    return call()
