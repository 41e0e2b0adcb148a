"""Variables with a name on their task, by which the graph of an execution finds them.

TensorFlow's variables are anonymous: code that reads one needs its handle. A call from the
coordinator to a worker to a ps would send one handle per variable and slot. Each handle costs all
three some 15 microseconds per call. A `NamedVariable` has a name on its task, so an execution sends
no handles: its graph finds the variables on their tasks.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.runtime.calls import persist
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.errors import comes_from_worker, lost_ps, naming_lost_ps
from kerasps.runtime.forks import is_fork
from kerasps.variables.storage.names import CALLS, NAMES

_Returned = TypeVar("_Returned")

# An initializer has up to a dozen operations, and on a ps each is a round trip: 4 ms in all on one
# machine. Making a value here and sending it takes less, up to some megabytes on one machine, and
# up to this size with a gigabit a second.
_SENT_BYTES = 256 << 10
# Keys that no index has: of an empty bucket, and of a removed key. They are drawn at random, so the
# chance that an id has one of them is 2**-63 for each id.
UNUSED_KEYS = np.array([0x5C1A5F0E7B3D9246, 0x2E94D6B18F07C35A], np.int64)
# The share of its buckets at which an index doubles.
MOST_LOAD = 0.9


class NamedVariable(_compat.ResourceVariable):
    """A `tf.Variable` with a name on its task; its resource is destroyed when it is collected.

    Args:
        initial_value: a function that returns the initial value; it runs on the current device.
            None for a variable without a value.
        shape: a fully defined shape.
    """

    def __init__(
        self,
        initial_value: Callable[[], object] | None,
        *,
        shape: tf.TensorShape | Sequence[int],
        dtype: tf.DType | str,
        trainable: bool,
        name: str,
    ) -> None:
        with tf.init_scope():
            dtype, shape = tf.as_dtype(dtype), tf.TensorShape(shape)
            kind = (dtype.name, tuple(shape))
            shared_name = self._claim_name(kind)
            handle = on_own_task(
                lambda: tf.raw_ops.VarHandleOp(
                    dtype=dtype, shape=shape, container="", shared_name=shared_name
                )
            )
            # TensorFlow's variables read their names from these two. The second is never reused,
            # not even by a variable that reuses another's name on its task.
            handle._name, handle._unique_id = f"{name}:0", uuid.uuid4().hex
            _compat.set_handle_data(handle, _compat.create_handle_data(shape, dtype))
            super().__init__(trainable=trainable, shape=shape, dtype=dtype, handle=handle)
            self._distribute_strategy = tf.distribute.get_strategy()
            self.shared_name = shared_name
            if initial_value is not None and self._takes_initial_value():
                value = make_initial(initial_value, shape, dtype)
                assign = super().assign
                on_own_task(lambda: assign(value, read_value=False))
            # A graph captures handles, but later code needs the variables of these handles.
            handle.named_variable = weakref.ref(self)
            self._destroy_with_object(kind)

    @property
    def takes_values(self) -> bool:
        """True if values that this process assigns outside of steps are written."""
        return True

    @property
    def finds(self) -> Callable[[], tf.Tensor]:
        """The function that finds the handle by name, on the variable's task."""
        return functools.partial(
            tf.raw_ops.VarHandleOp,
            dtype=self.dtype,
            shape=self.shape,
            container="",
            shared_name=self.shared_name,
        )

    def _claim_name(self, kind: Hashable) -> str:
        return NAMES.claim(kind)

    def _takes_initial_value(self) -> bool:
        return self.takes_values

    def _destroy_with_object(self, kind: Hashable) -> None:
        # Not when this process ends: TensorFlow then removes all of the process's resources from
        # the tasks, and some tasks may have ended already.
        weakref.finalize(self, _destroy, self.handle, kind, self.shared_name).atexit = False


class NamedIndex:
    """A hash table from int64 to int32 with a name on its task, destroyed when it is collected."""

    def __init__(self, device: str, num_buckets: int) -> None:
        self.device = device  # the device of its task
        self.num_buckets = num_buckets  # how many buckets it begins with, a power of two
        kind = ("index", num_buckets)
        self.shared_name = self._claim_name(kind)  # its name there
        with tf.init_scope(), tf.device(device):
            self.handle = on_own_task(self.finds, is_repeatable=True)
        # A graph captures the handle; `HandleFinder` finds it by this name.
        self.handle.named_variable = weakref.ref(self)
        self._destroy_with_object(kind)

    def _claim_name(self, kind: Hashable) -> str:
        return NAMES.claim(kind)

    def _destroy_with_object(self, kind: Hashable) -> None:
        weakref.finalize(self, _destroy, self.handle, kind, self.shared_name).atexit = False

    @property
    def finds(self) -> Callable[[], tf.Tensor]:
        """The function that finds the handle by name, on its task; it makes a missing one."""
        return functools.partial(
            tf.raw_ops.MutableDenseHashTableV2,
            empty_key=UNUSED_KEYS[0],
            deleted_key=UNUSED_KEYS[1],
            container="",
            shared_name=self.shared_name,
            value_dtype=tf.int32,
            initial_num_buckets=self.num_buckets,
            max_load_factor=MOST_LOAD,
        )


def on_own_task(call: Callable[[], _Returned], *, is_repeatable: bool = False) -> _Returned:
    """Run a call that involves the task of a variable and no other task.

    An error that comes from a worker then belongs to an earlier operation on a lost worker. So
    `call` has not begun, and is retried (see `persist`). In a session's thread such an error means
    that the session's worker is lost.

    Args:
        is_repeatable: whether it may run twice: it is retried if the connection to the task broke
            and the task is alive.

    Raises PSLostError if that task is lost.
    """
    with naming_lost_ps:
        return persist(call, when=_broke_off if is_repeatable else _was_left_behind)


def make_initial(
    initial_value: Callable[[], _Returned], shape: tf.TensorShape, dtype: tf.DType
) -> _Returned:
    """Make the initial value of a variable on the current device, or a small one in this process.

    Raises PSLostError if the task of the device is lost.
    """
    if shape.num_elements() * dtype.size > _SENT_BYTES:
        return on_own_task(initial_value)
    with tf.device(COORDINATOR_CPU):
        return on_own_task(initial_value)


def _was_left_behind(error: tf.errors.OpError) -> bool:
    return CALLS.are_waited_for and comes_from_worker(error)


def _broke_off(error: tf.errors.OpError) -> bool:
    return CALLS.are_waited_for and (comes_from_worker(error) or lost_ps(error) is not None)


def _wrapped(method: Callable[..., object]) -> None:
    is_repeatable = method not in (NamedVariable.assign_add, NamedVariable.assign_sub)

    @functools.wraps(method)
    def named(*args: object, **kwargs: object) -> Any:
        return on_own_task(lambda: method(*args, **kwargs), is_repeatable=is_repeatable)

    setattr(NamedVariable, method.__name__, named)


# Every read and write of a variable ends in one of these.
for _method in (
    NamedVariable._read_variable_op,
    NamedVariable.numpy,
    # These fetch what a read has returned, and an earlier operation may fail in between.
    NamedVariable.__bool__,
    NamedVariable.__complex__,
    NamedVariable.__float__,
    NamedVariable.__int__,
    NamedVariable.assign,
    NamedVariable.assign_add,
    NamedVariable.assign_sub,
    NamedVariable.sparse_read,
    NamedVariable.gather_nd,
):
    _wrapped(_method)


def plain_variable(*, use_resource: bool = True, **kwargs: object) -> tf.Variable:
    """Make the `tf.Variable` that TensorFlow makes without a strategy, on the current device.

    Active variable creators are not called.
    """
    # A strategy's creator adds the argument; TensorFlow has no other kind of variable any more.
    del use_resource
    return _compat.ResourceVariable(**kwargs)


class HandleFinder:
    """Finds variables, and the locks of their tasks, by name, in the graph of an execution.

    Args:
        captures: captured handles, possibly with repetitions. The handles of variables and indexes
            with a name are found by that name.
    """

    def __init__(self, captures: Iterable[tf.Tensor], mutex: Callable[[str], tf.Tensor]) -> None:
        by_device: dict[str, dict[int, NamedVariable | NamedIndex]] = {}
        for captured in captures:
            if hasattr(captured, "named_variable"):
                variable = captured.named_variable()
                by_device.setdefault(variable.device, {})[id(captured)] = variable
        self._functions = {
            device: _handles_function(device, list(stored.values()))
            for device, stored in sorted(by_device.items())
        }
        self._keys = {device: [id(mutex(device)), *stored] for device, stored in by_device.items()}

    def __call__(self) -> dict[int, tf.Tensor]:
        """Return the handles in the current graph, by the `id` of the handles they replace."""
        handles: dict[int, tf.Tensor] = {}
        for device, function in self._functions.items():
            # In TensorFlow, calls without a resource argument wait for each other, across machines.
            # A resource that nothing else uses lets the calls to several tasks run at the same
            # time. It is on the worker, so that no task waits for another task to send it. With
            # one task only, it is on that task.
            with tf.device(device if len(self._functions) == 1 else None):
                token = tf.raw_ops.VarHandleOp(
                    dtype=tf.bool, shape=[], container="", shared_name=f"token of {device}"
                )
            with tf.device(device):
                handles.update(zip(self._keys[device], function(token), strict=True))
        return handles


def _handles_function(device: str, stored: Sequence[NamedVariable | NamedIndex]) -> Any:
    # Functions that find them by name, so that nothing here keeps them alive.
    finds = [resource.finds for resource in stored]

    def look_up(token: tf.Tensor) -> list[tf.Tensor]:
        del token
        with tf.device(device):
            mutex = tf.raw_ops.MutexV2(container="", shared_name=mutex_name(device))
            return [mutex, *(find() for find in finds)]

    return tf.function(
        look_up, autograph=False, input_signature=[tf.TensorSpec([], tf.resource)]
    ).get_concrete_function()


def call_with(
    handles: dict[int, tf.Tensor],
    function: tf.types.experimental.ConcreteFunction,
    captures: Iterable[tf.Tensor],
    *args: object,
) -> Any:
    """Call a concrete function with handles of the current graph in place of captured ones.

    Args:
        handles: the handles of the current graph, by the `id` of the captured handle that each
            replaces. A captured handle that is not among these keys is not replaced.
        captures: its `captured_inputs` at the time of its trace.
    """
    function.set_external_captures([handles.get(id(captured), captured) for captured in captures])
    return function(*args)


def mutex_name(device: str) -> str:
    """Return the name of the lock of a task."""
    return f"kerasps/{device}"


def anonymous_handle(shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """Return the handle of a variable that each execution of the current graph creates separately.

    TensorFlow frees it when the execution ends.
    """
    return tf.raw_ops.VarHandleOp(
        dtype=dtype, shape=shape, container="", shared_name=_compat.anonymous_name()
    )


def _destroy(handle: tf.Tensor, kind: Hashable, shared_name: str) -> None:
    # If nobody waited for the destruction, it may still be in flight, and would destroy a new
    # variable of that name.
    if destroy(handle) and CALLS.are_waited_for:
        NAMES.give_back(kind, shared_name)


def destroy(handle: tf.Tensor) -> bool:
    """Free the resource of a handle on its task, and return whether the task has done so.

    Thread: any, at any instant. Python calls this when it collects an object, possibly while
    TensorFlow builds a graph.
    """
    if is_fork():  # the parent process still uses the resource
        return False
    # The task may have ended, and the resource with it. TensorFlow raises ValueError for a handle
    # that was never made.
    with (
        contextlib.suppress(tf.errors.OpError, ValueError),
        tf.__internal__.eager_context.eager_mode(),
        tf.device(handle.device),
    ):
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
        return True
    return False
