"""The Keras variable that lives on a ps task.

`keras.Variable(...)` returns a `ParameterServerVariable` while a `kerasps.ParameterServerStrategy` is current. Outside a
training step it is an ordinary Keras variable whose storage is remote. What it resolves to while a step is traced depends on
the phase, which `phase()` names for the current thread:

* `Compute` (see `compute.py`): the tensor that was pulled for this step; assignments become values of the step;
* `Push` (see `push.py`): the storage itself, and for shared scalars the value that the worker sent.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat, flights
from kerasps.errors import InputError, UnsupportedError
from kerasps.failures import naming_lost_ps
from kerasps.fetch import fetch
from kerasps.forks import check_not_forked
from kerasps.initialization import RowInitializer
from kerasps.pieces import PIECE_BYTES, StoredRows, pieces, read_rows, write_rows
from kerasps.placement import COORDINATOR_CPU
from kerasps.sharding import ShardedStorage, Sharding, shards_of


class Phase(Protocol):
    """What a variable resolves to during one phase of a training step.

    `hides_constraints` says whether a variable shows no constraint, because another phase applies it.
    """

    hides_constraints: bool

    def read(self, variable: ParameterServerVariable) -> Any:
        """The value of `variable`: a tensor or a `tf.Variable`."""

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        """The shape of what `read` returns."""

    def source(self, variable: ParameterServerVariable) -> Any:
        """What a GradientTape takes gradients with respect to, for `variable`; asking for it is not reading."""

    def take(self, variable: ParameterServerVariable, ids: tf.Tensor) -> tf.Tensor:
        """The rows `ids` of `variable`, of shape `ids.shape + variable.shape[1:]`."""

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> Any:
        """Takes the new value of `variable`."""

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> Any:
        """Adds `value` to `variable`."""

    def regularizer(self, variable: ParameterServerVariable, regularizer: Any) -> Any:
        """What stands for the regularizer of `variable`, which may be None."""


class _ThreadState(threading.local):
    phase: Phase | None = None
    before_access: Callable[[], None] | None = None
    strategy: Any = None


_STATE = _ThreadState()


def phase() -> Phase | None:
    """The phase that the current thread traces, or None outside a step."""
    return _STATE.phase


@contextlib.contextmanager
def _holding(name: str, value: Any) -> Iterator[None]:
    """Makes `value` the thread's state of that name, for a while."""
    previous = getattr(_STATE, name)
    setattr(_STATE, name, value)
    try:
        yield
    finally:
        setattr(_STATE, name, previous)


def entering(new_phase: Phase | None) -> contextlib.AbstractContextManager[None]:
    """Makes `new_phase` what variables resolve through, in this thread."""
    return _holding("phase", new_phase)


def before_access(call: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Calls `call` once in here: before this thread first reads or writes a variable, or at `come_to_rest`."""
    return _holding("before_access", call)


def come_to_rest() -> None:
    """Sees to it that no step is in flight, as far as this thread can: within a callback that is called while steps are."""
    check_not_forked()
    call, _STATE.before_access = _STATE.before_access, None
    if call is not None:
        call()
    flights.come_to_rest()


def creating_under(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[None]:
    """Makes new variables belong to `strategy`, in this thread, whichever strategy is current."""
    return _holding("strategy", strategy)


def _strategy_of_new_variables() -> Any:
    return tf.distribute.get_strategy() if _STATE.strategy is None else _STATE.strategy


class ParameterServerVariable(keras.Variable, _compat.NativeObject):  # the latter for `tf.nn.embedding_lookup`
    """A `keras.Variable` whose storage is on ps tasks: a `tf.Variable` each, its shards (metric states, seeds: coordinator).

    Made by `keras.Variable(...)` and by layers, optimizers and metrics under `strategy.scope()`; the constructor is Keras's.
    The strategy's `variable_partitioner` decides how many shards there are. To Keras they are one variable.
    The initial value is computed on the tasks that store it and never travels. `assign_add` and `assign_sub` are atomic (per
    shard): concurrent workers lose nothing.
    """

    # Until there is a value: where a step makes a variable, its shape is asked for before.
    _value: Any = None

    @property
    def storage(self) -> tf.Variable | ShardedStorage:
        """What holds the value."""
        come_to_rest()
        return self._value

    @property
    def shards(self) -> tuple[tf.Variable, ...]:
        """The `tf.Variable`s that hold the value, one per shard; a variable that is whole has one."""
        return shards_of(self.storage)

    @property
    def sharding(self) -> Sharding | None:
        """Which rows are in which shard; None for a variable that is whole."""
        return self._value.sharding if isinstance(self._value, ShardedStorage) else None

    @property
    def device(self) -> str:
        """The device of the (first) shard, such as `/job:ps/replica:0/task:0/device:CPU:0`."""
        return str(self._value.device)

    def _initialize(self, value: Any) -> None:
        if isinstance(value, tf.Variable):
            self._value = value
            return
        value = tf.cast(value, self._dtype)
        if not tf.executing_eagerly():
            value = self._constant(value)
        self._create_storage(tuple(value.shape), lambda: value, lambda sharding, shard: sharding.part(value, shard))

    def _constant(self, value: tf.Tensor) -> Any:
        """A value that a step made for a variable which it makes; the variable outlives the step, and its tensors do not."""
        constant = tf.get_static_value(value)
        if constant is None:
            raise InputError(
                f"Variable '{self._name}' is made in a step, from a value that follows from the step's data. Expected: a "
                f"number, an array or an initializer. Received: {value}. Make the variable in `__init__` or `build`, and "
                "assign it in the step."
            )
        return constant

    def _initialize_with_initializer(self, initializer: Any) -> None:
        shape = tuple(self._shape)

        @functools.cache
        def rows() -> RowInitializer:
            return RowInitializer(initializer, shape, self._dtype)

        self._create_storage(
            shape,
            lambda: initializer(shape, dtype=self._dtype),
            lambda sharding, shard: rows()(sharding.rows(shard)),
        )

    def _create_storage(
        self, shape: tuple[int, ...], initial_value: Callable[[], Any], initial_part: Callable[[Sharding, int], Any]
    ) -> None:
        """Makes the storage, where the strategy says; the values are computed by functions that run where they are stored."""
        check_not_forked()
        strategy = _strategy_of_new_variables()
        # Current already, in a step too, unless variables are made under another.
        scope = contextlib.nullcontext if _STATE.strategy is None else strategy.scope
        extended = strategy.extended
        dtype = tf.as_dtype(self._dtype)

        def create(device: str | None, shape: tuple[int, ...], initial_value: Callable[[], Any], name: str) -> tf.Variable:
            with tf.init_scope(), scope(), extended.placing(device), entering(None):
                return tf.Variable(initial_value, shape=shape, dtype=dtype, trainable=self._trainable, name=name)

        if is_metric_state(self) or is_seed_state(self):
            self._value = create(COORDINATOR_CPU, shape, initial_value, self._name)
            return
        sharded = extended.shards(shape, dtype)
        if sharded is None:
            self._value = create(None, shape, initial_value, self._name)
            return
        sharding, devices = sharded
        shards = [
            create(
                device,
                (len(sharding.rows(shard)), *shape[1:]),
                functools.partial(initial_part, sharding, shard),
                f"{self._name}/part_{shard}",
            )
            for shard, device in enumerate(devices)
        ]
        self._value = ShardedStorage(shards, sharding, self._name)

    def take_over(self, value: tf.Variable) -> None:
        """Makes the storage of a variable that was made outside the strategy, with `value`, which is what it was."""
        self._move(value)
        self._value._unique_id = value._unique_id  # what optimizers know it by

    def _move(self, value: tf.Variable) -> None:
        shape = tuple(value.shape)
        if not shape or value.shape.num_elements() * value.dtype.size <= PIECE_BYTES:

            def part(sharding: Sharding, shard: int) -> tf.Tensor:
                with tf.device(value.device):  # so that a ps is sent its part alone
                    return sharding.part(value.read_value(), shard)

            self._create_storage(shape, value.read_value, part)
            return

        def empty(shape: tuple[int, ...]) -> tf.Tensor:
            return tf.zeros(shape, value.dtype)

        self._create_storage(
            shape, lambda: empty(shape), lambda sharding, shard: empty((len(sharding.rows(shard)), *shape[1:]))
        )
        with tf.init_scope():
            for rows in pieces(self._value):
                write_rows(self._value, rows, read_rows(value, rows, COORDINATOR_CPU), COORDINATOR_CPU)

    def lies_beside(self, other: ParameterServerVariable) -> bool:
        """Whether each shard is on the device of that shard of `other`; of another shape, whether it is beside the first."""
        if tuple(self.shape) != tuple(other.shape):
            return self.device == other.device and self.sharding is None
        return self.sharding == other.sharding and [s.device for s in self.shards] == [s.device for s in other.shards]

    def move_to(self, other: ParameterServerVariable) -> None:
        """Moves the storage, with its value, beside that of `other`; sharded alike where the shapes are the same."""
        value = self._value
        with tf.distribute.get_strategy().extended.colocate_vars_with(other.storage):
            self._create_storage(
                tuple(value.shape), value.read_value, lambda sharding, shard: sharding.part(value.read_value(), shard)
            )

    def _resolves_through(self) -> Phase | None:
        """The phase that this variable resolves through now; a `keras.StatelessScope` that holds it goes first."""
        current = _STATE.phase
        if current is None or self._value is None:
            return None
        scope = _compat.get_stateless_scope()
        if scope is not None and scope.get_current_value(self) is not None:
            return None
        return current

    def compiled_graph(self, *, in_call: bool = False) -> Any:
        """The graph of the function that is traced for XLA to compile, so that it cannot reach the storage; None elsewhere.

        With `in_call`, the current graph is not that function, but is about to call one.
        """
        if tf.executing_eagerly() or self._value is None or "/job:ps" not in self.device:
            return None
        scope = _compat.get_stateless_scope()
        if scope is not None and scope.get_current_value(self) is not None:
            return None
        # TensorFlow marks the graph in which such a function is called, or the function itself where it is not called.
        graph, inner = tf.compat.v1.get_default_graph(), None
        while graph is not None:
            marked = _compat.containing_xla_context(graph._get_control_flow_context()) is not None
            if marked and not (in_call and inner is None):
                # A branch or a loop is a graph in the function's.
                return graph if inner is None or type(inner).__name__ != "FuncGraph" else inner
            graph, inner = getattr(graph, "outer_graph", None), graph
        return None

    def _check_assignment(self) -> None:
        if _compat.get_stateless_scope() is None and self.compiled_graph() is not None:
            raise UnsupportedError(
                f"A function that is compiled by XLA assigns to '{self.path}', which is on a ps, and XLA cannot reach another "
                "machine. Expected: the variable read there, and assigned outside. Received: `jit_compile=True`. Leave it out, "
                "or train with `model.fit`, whose steps may be compiled."
            )

    @property
    def value(self) -> Any:
        current = self._resolves_through()
        if current is None:
            come_to_rest()
            compiled = self.compiled_graph()
            if compiled is None:
                return super().value
            value = compiled_value(compiled, self)
        else:
            value = current.read(self)
        if self._trainable and not isinstance(value, tf.Variable):
            _compat.record_variable_access(self)
        return self._maybe_autocast(value)

    @property
    def shape(self) -> tf.TensorShape:
        current = self._resolves_through()
        return super().shape if current is None else current.shape(self)

    @property
    def handle(self) -> Any:
        # A GradientTape takes gradients with respect to this: in a step, the pulled tensor.
        current = self._resolves_through()
        if current is not None:
            return current.source(self)
        compiled = self.compiled_graph()
        if compiled is not None:
            return compiled_value(compiled, self)
        if isinstance(self._value, ShardedStorage) and tf.executing_eagerly():
            raise AttributeError(
                f"'{self.path}' is in {len(self.shards)} shards, each with a handle, and has none of its own. Expected: a use "
                "of its value, or gradients by `tf.GradientTape`. Leave it whole to hand its handle to TensorFlow."
            )
        return self.shards[0].handle  # in a graph, TensorFlow asks where a look-up should be placed

    def take(self, ids: Any) -> tf.Tensor:
        """The rows `ids` of the variable; in a step, without its other rows.

        Args:
            ids: integers of any shape, from 0 to the number of rows.

        Returns:
            A tensor of shape `ids.shape + shape[1:]`.
        """
        ids = tf.convert_to_tensor(ids)
        current = self._resolves_through()
        if current is None:
            come_to_rest()
            compiled = self.compiled_graph()
            return tf.gather(super().value if compiled is None else self.value, ids)
        if self._trainable:
            _compat.record_variable_access(self)  # before the rows are read, or a GradientTape does not see them
        return self._maybe_autocast(current.take(self, ids))

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """As `take`; what `tf.gather` calls."""
        del name
        return self.take(indices)

    def assign(self, value: Any) -> Any:
        if _STATE.phase is None or _compat.get_stateless_scope() is not None:
            come_to_rest()
            self._check_assignment()
            return self._assign_rows(value) if isinstance(value, StoredRows) else super().assign(value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        _STATE.phase.assign(self, value)
        return value

    def _assign_rows(self, value: StoredRows) -> StoredRows:
        """Takes a value that is in a file, a piece of it at a time."""
        if value.shape != tuple(self._value.shape):
            raise ValueError(
                f"A file has a value of another shape than the variable '{self.path}'. Expected: {tuple(self._value.shape)}. "
                f"Received: {value.shape}. Load it into a model of the size that was saved."
            )
        for rows in pieces(self._value):
            with tf.device(COORDINATOR_CPU):
                part = tf.cast(value[rows.start : rows.stop], self._dtype)
            write_rows(self._value, rows, part, COORDINATOR_CPU)
        return value

    def assign_add(self, value: Any) -> Any:
        if _compat.get_stateless_scope() is not None:
            return super().assign_add(value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if _STATE.phase is None:
            self._check_assignment()
            self.storage.assign_add(value)  # atomic; Keras's own reads and writes
        else:
            _STATE.phase.assign_add(self, value)
        return self.value

    def assign_sub(self, value: Any) -> Any:
        return self.assign_add(-self._convert_to_tensor(value, dtype=self._dtype))

    def _serialize_to_tensors(self) -> Any:
        return self._value._serialize_to_tensors()

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self._value._restore_from_tensors(restored_tensors)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # For a checkpoint that is written while training goes on; the copies lie beside what they are copies of.
        for shard in self.shards:
            shard._copy_trackable_to_cpu(object_map)
        copies = [object_map[shard] for shard in self.shards]
        sharding = self.sharding
        object_map[self] = copies[0] if sharding is None else ShardedStorage(copies, sharding, self._name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # what comes from a ps is a copy
        with naming_lost_ps:
            return np.asarray(fetch([tf.convert_to_tensor(self.value)])[0], dtype)

    @property
    def constraint(self) -> Any:
        # `Optimizer.apply` would run it on the worker, on the value from before the update; the push runs it on the ps.
        return None if _STATE.phase is not None and _STATE.phase.hides_constraints else self._constraint

    @constraint.setter
    def constraint(self, value: Any) -> None:
        keras.Variable.constraint.fset(self, value)

    @property
    def regularizer(self) -> Any:
        # Keras applies it to the variable, which would read a table whole; a phase may have only rows of it to apply it to.
        current = _STATE.phase
        return self._regularizer if current is None else current.regularizer(self, self._regularizer)

    @regularizer.setter
    def regularizer(self, value: Any) -> None:
        keras.Variable.regularizer.fset(self, value)


def compiled_value(graph: Any, variable: ParameterServerVariable) -> tf.Tensor:
    """The value of `variable` as it is whenever the function of `graph` is called: a tensor, as XLA takes no resource of a ps.

    A GradientTape that watches the call sees the read.
    """
    key = ("kerasps", id(variable))
    captures = graph._function_captures
    if key not in captures.by_ref_external:

        def read() -> list[tf.Tensor]:
            current = variable._resolves_through()
            if current is not None:
                return [tf.convert_to_tensor(current.read(variable))]
            outer = variable.compiled_graph(in_call=True)
            if outer is None:
                return [tf.convert_to_tensor(variable._value)]
            if variable.trainable:
                _compat.record_variable_access(variable)
            return [compiled_value(outer, variable)]

        graph.capture_call_time_value(read, tf.TensorSpec(variable._value.shape, variable._value.dtype), key=key)
        # Where a graph calls the function, TensorFlow would read before that graph runs, and miss what it assigns.
        read.output_spec = captures.by_ref_external[key].output_spec  # type: ignore[attr-defined]
        captures.by_ref_external[key] = read
    return captures.by_ref_internal[key]


def is_metric_state(variable: keras.Variable) -> bool:
    """Whether `variable` is the state of a metric: Keras marks these, and these alone, as synchronized on read."""
    return bool(variable.synchronization == "on_read")


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether `variable` is the state of a `keras.random.SeedGenerator`: two integers, the seed and a counter."""
    return bool(variable.name == "seed_generator_state" and tuple(variable.shape) == (2,))


def make_parameter_server_variable(cls: type, *args: Any, **kwargs: Any) -> keras.Variable:
    """`keras.Variable.__new__` once a strategy exists: makes ours while one of our strategies is current."""
    if cls is keras.Variable and hasattr(_strategy_of_new_variables().extended, "placing"):
        return object.__new__(ParameterServerVariable)
    return object.__new__(cls)
