"""The replacements of TensorFlow's functions: tracing, graphs, executors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.connection.connect import tasks_lock
from kerasps.hooks.in_place import Original
from kerasps.runtime.errors import naming_closed
from kerasps.runtime.python_errors import keep_exception
from kerasps.step import Compute
from kerasps.variables import current_phase
from kerasps.variables.lanes.phase import is_outside_replica


def call(
    original: Original,
    self: tf.types.experimental.PolymorphicFunction,
    *args: object,
    **kwargs: object,
) -> Any:
    """`tf.function`'s call: within a step, trace the function as a part of the step.

    As a separate function it would keep the tensors of this trace for the next one, and a
    GradientTape around it would not see the variables that it reads. In a scheduled function the
    same holds: kerasps must know how often it calls this one, and what this one pushes.
    """
    is_in_step = isinstance(current_phase(), Compute)
    # Keras compiles its grouped convolutions by XLA, and a CPU supports them in no other way.
    of_keras = self.python_function.__module__.startswith("keras.")
    is_compiled = self._jit_compile and (of_keras or not is_in_step)
    if is_compiled or not (is_in_step or is_outside_replica()):
        with naming_closed:
            return original(self, *args, **kwargs)
    function = self.python_function
    if not self._autograph:
        return function(*args, **kwargs)
    status = _compat.autograph_context.Status.ENABLED  # the trace of the step disables it
    with _compat.autograph_context.ControlStatusCtx(status):
        return _compat.py_func_from_autograph(function)(*args, **kwargs)


def call_python(
    original: Original, self: object, token: object, device: object, args: object
) -> Any:
    """`FuncRegistry.__call__`: keep the exception of a Python function that TensorFlow calls."""
    try:
        return original(self, token, device, args)
    except StopIteration:  # the end of a generator
        raise
    except Exception as exc:
        keep_exception(exc)
        raise


def raise_status(original: Original, *args: object, **kwargs: object) -> None:
    """`raise_from_not_ok_status`: if the cluster is closed, raise an error that says so."""
    with naming_closed:
        original(*args, **kwargs)


def add_to_tasks(original: Original, self: object, *args: object, **kwargs: object) -> Any:
    """`Context.add_c_function`: send a function to all tasks, while their list does not change."""
    with tasks_lock:
        return original(self, *args, **kwargs)


def reset_default_graph(original: Original) -> None:
    """`tf.compat.v1.reset_default_graph`: keep the strategies whose scopes each thread is in.

    `keras.utils.clear_session` calls this. The default graph holds those scopes. With a new graph,
    the next model would be trained in this process, and leaving the scopes would fail.
    """
    before = tf.compat.v1.get_default_graph()
    original()
    tf.compat.v1.get_default_graph()._thread_local = before._thread_local


# The two functions below get names as arguments, because Python calls them while it ends, when a
# module's names no longer exist.


def delete_executor(
    original: Original, self: Any, _op_error: type[BaseException] = tf.errors.OpError
) -> None:
    """`Executor.__del__`: delete an executor whose task is lost without printing why.

    TensorFlow waits for an executor before it deletes it. If its task is lost, the wait fails:
    TensorFlow prints this second error, after the one that reported the loss, and keeps the
    executor.
    """
    for _ in range(3):
        try:
            original(self)
            return
        except _op_error:
            self.clear_error()


_LEAVING: dict[str, bool] = {}


def remove_function(
    original: Original, self: Any, name: str, _leaving: dict[str, bool] = _LEAVING
) -> None:
    """`Context.remove_function`: do nothing once this process leaves the cluster."""
    if not _leaving:
        original(self, name)


def leave_remote_functions() -> None:
    """Leave functions on their tasks from here on. Call when the process, or the cluster, ends.

    Deleting a function would call every task. The tasks forget all functions with the coordinator
    anyway; if a task has ended already, TensorFlow would print five lines of errors per function.
    """
    _LEAVING["leaving"] = True
