"""Calls concrete functions with flat arguments, without TensorFlow's argument checks.

A concrete function checks and arranges its arguments by the structure that it was traced with. This
is Python code, and takes longer than the rest of a call: 0.3 ms of 0.5 for the step of an
execution. Here arguments are flat already, in the function's order.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from kerasps import _compat
from kerasps.runtime.connected import connected_host
from kerasps.runtime.errors import lost_ps, ps_is_there

_Returned = TypeVar("_Returned")
_MAX_TRIES = 3
# More than the operations that an executor of a session holds.
_MAX_ERRORS = 5
_PAUSE_S = 0.05
_POLL_S = 0.1
# The modules that call TensorFlow's C++.
_TENSORFLOW = os.path.dirname(tf.__file__), _compat.__file__
# The threads whose calls the end of the process waits for.
_calling: set[int] = set()


def call_flat(
    function: tf.types.experimental.ConcreteFunction, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Call a concrete function that no gradient tape watches; return its flat outputs."""
    # A concrete function would add the stack traces of its operations to an error of its graph.
    # They are not known here, and `runtime.errors` removes them.
    outputs = _compat.eager_context().call_function(
        function.name, [*tensors, *function.captured_inputs], len(function.outputs)
    )
    return outputs or []


def call_uncancellable(
    function: tf.types.experimental.ConcreteFunction, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Call a concrete function as `call_flat` does, without the executions' cancellation manager.

    If a function that runs here and on a task fails because a worker is lost, TensorFlow cancels
    all calls with the same manager, present and future ones.
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
def calling() -> Iterator[None]:
    """In this context, the end of the process waits a while for the calls of this thread."""
    thread = threading.get_ident()
    is_outermost = thread not in _calling
    _calling.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            _calling.discard(thread)


def wait_for_calls(limit: float) -> None:
    """Wait until no other thread is `calling` or in TensorFlow, for at most `limit` seconds.

    Call before the process ends. Python ends a thread whose call returns later in a way that makes
    TensorFlow abort the process, with another exit code (134).
    """
    deadline = time.monotonic() + limit
    while _others_call() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _others_call() -> bool:
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    in_tensorflow = any(f.f_code.co_filename.startswith(_TENSORFLOW) for f in frames.values())
    return in_tensorflow or bool(_calling - {threading.get_ident()})


@contextlib.contextmanager
def separate_executor() -> Iterator[None]:
    """In this context, this thread's operations do not wait for operations that were sent before.

    They go through a separate executor, and each call returns when its operation is complete. An
    error is raised only here: other threads may use the previous executor, and an executor fails
    all operations after an error.
    """
    context = _compat.eager_context()
    before, executor = context.executor, _compat.new_executor(False)
    context.executor = executor
    try:
        with calling():
            yield
    finally:
        context.executor = before
        executor.clear_error()


def drain(executor: Any) -> None:
    """Wait until an executor that has failed is empty, and clear its errors.

    The remaining operations fail too, at the latest when they are cancelled. TensorFlow prints the
    errors that an executor has when it is deleted.
    """
    for _ in range(_MAX_ERRORS):
        try:
            executor.wait()
            return
        except tf.errors.OpError:
            executor.clear_error()


def persist(
    call: Callable[[], _Returned],
    *,
    when: Callable[[tf.errors.OpError], bool] = lambda error: True,
) -> _Returned:
    """Run a call, and retry it after errors of TensorFlow; return its result.

    When this process deletes an object of an ended task, TensorFlow raises that error in the next
    operation, whichever it is and on whatever task. So a call that must succeed, and may run twice,
    is retried.

    Raises:
        tf.errors.OpError: the call failed three times, or with an error for which `when` returns
            False, or a ps is lost.
    """
    for _ in range(_MAX_TRIES - 1):
        try:
            return call()
        except tf.errors.OpError as exc:
            if not when(exc):
                raise
            drain(_compat.eager_context().executor)
            ps, host = lost_ps(exc), connected_host()
            if ps is not None and host is not None and not ps_is_there(host, ps):
                raise
            time.sleep(_PAUSE_S)
    return call()
