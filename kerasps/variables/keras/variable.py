"""The Keras variable that lives on a ps task.

`keras.Variable(...)` returns a `ParameterServerVariable` while a `kerasps.ParameterServerStrategy`
is current. Outside a training step it is an ordinary Keras variable whose storage is remote. While
a step is traced it resolves through the phase that the current thread has entered (`phase.py`):

* in the compute phase, to the tensor that was pulled for it; assignments become values of the step;
* in an update on a ps, to the storage, or for shared scalars to the value that the worker sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from kerasps import _compat
from kerasps.errors import InputError, UnsupportedError
from kerasps.runtime.calls import persist
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.errors import naming_lost_ps
from kerasps.runtime.fetching import fetch
from kerasps.variables.keras.initialization import RowInitializer
from kerasps.variables.keras.xla import captured_value, graph_for_xla
from kerasps.variables.lanes.phase import (
    _STATE,
    Phase,
    check_replica,
    note_assignment,
    strategy_of_new_variables,
    wait_for_steps,
)
from kerasps.variables.placing.creation import InitialShard, create_copy, create_storage
from kerasps.variables.placing.placing import is_ours
from kerasps.variables.rows.chunks import StoredRows, chunks_of, write_rows
from kerasps.variables.rows.sharding import ShardedStorage, Sharding, from_start, shards_of
from kerasps.variables.storage.kinds import is_metric_state, is_seed_state
from kerasps.variables.storage.tensor_like import note_read


class ParameterServerVariable(keras.Variable):
    """A `keras.Variable` whose storage is on ps tasks, as shards that are a `tf.Variable` each.

    `keras.Variable(...)`, layers, optimizers and metrics make it under `strategy.scope()`; the
    constructor is Keras's. The strategy's `variable_partitioner` decides how many shards there are.
    To Keras they are one variable. The tasks that store it compute the initial value; the
    coordinator computes and sends a small one. `assign_add` and `assign_sub` are atomic (per
    shard), so no update of concurrent workers is lost. States of metrics and seed generators are on
    the coordinator, which alone writes them.
    """

    # The dtype in which values and gradients are sent; None for that of the variable.
    wire_dtype: tf.DType | None = None
    # False for a table without a vocabulary, which no operation may read as a whole.
    has_whole_value = True
    # None until there is a value: a step that makes a variable reads its shape before that.
    _value: Any = None
    # For the state of a metric or a seed generator: its stand-in on a ps, and the function that
    # fetches the stand-in's value (see `StandIns`).
    stand_in: ParameterServerVariable | None = None
    fetch_stand_ins: Callable[[ParameterServerVariable], None] | None = None

    @property
    def storage(self) -> tf.Variable | ShardedStorage:
        """The `tf.Variable` or `ShardedStorage` with the value; reading it waits for flights."""
        self._make_current()
        return self._value

    def _make_current(self) -> None:
        """Wait until no step is in flight, and fetch the state that is on a ps (see `stand_in`)."""
        wait_for_steps()
        if self.fetch_stand_ins is not None and tf.executing_eagerly():
            self.fetch_stand_ins(self)

    @property
    def shards(self) -> tuple[Any, ...]:
        """The storages that hold the value, one for each shard; a whole variable has one.

        Each is a `tf.Variable`, or `PooledRows` if a table shares a storage with others.
        """
        return shards_of(self.storage)

    @property
    def sharding(self) -> Sharding | None:
        """The `Sharding`, which says which rows are in which shard; None for a whole variable."""
        storage = self._value
        is_sharded = isinstance(storage, ShardedStorage) and len(storage.shards) > 1
        return storage.sharding if is_sharded else None

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
        self._create_storage(
            tuple(value.shape),
            lambda: value,
            lambda sharding, shard: sharding.rows_in(value, shard),
        )

    def _constant(self, value: tf.Tensor) -> Any:
        """Return the constant value of a tensor that a step made for a new variable.

        The variable outlives the step, but the step's tensors do not.

        Raises:
            InputError: the tensor depends on the step's data.
        """
        constant = tf.get_static_value(value)
        if constant is None:
            raise InputError(
                f"Variable '{self.name}' is made in a step, from a value that depends on the "
                f"step's data. Expected: a number, an array or an initializer. Received: {value}. "
                "Make the variable in `__init__` or `build`, and assign it in the step."
            )
        return constant

    def _initialize_with_initializer(self, initializer: keras.initializers.Initializer) -> None:
        shape = tuple(self.shape)
        extended = strategy_of_new_variables().extended
        if extended.key_pools is not None and extended.key_pools.begins(self, initializer):
            return

        # Called only if there are shards, and cached, because it draws the seed.
        @functools.cache
        def rows() -> RowInitializer:
            return RowInitializer(initializer, shape, self._dtype)

        self._create_storage(
            shape,
            lambda: initializer(shape, dtype=self._dtype),
            lambda sharding, shard: rows()(sharding.rows(shard)),
        )

    def _create_storage(
        self,
        shape: tuple[int, ...],
        initial_value: Callable[[], object],
        initial_shard: InitialShard,
    ) -> None:
        dtype = tf.as_dtype(self._dtype)
        rule = strategy_of_new_variables().extended.wire_rule
        # The states of layers and optimizers are sent in the variable's dtype.
        self.wire_dtype = rule.dtype_of(self.path, dtype) if self.trainable else dtype
        self._value = create_storage(
            initial_value,
            initial_shard,
            shape=shape,
            dtype=self._dtype,
            trainable=self.trainable,
            name=self.name,
            on_coordinator=is_metric_state(self) or is_seed_state(self),
        )

    def take_over(self, value: tf.Variable) -> None:
        """Store a variable that was made outside the strategy on ps tasks, with its value."""
        shape = tuple(value.shape)

        def create(initial_value: Callable[[], object], initial_shard: InitialShard) -> Any:
            self._create_storage(shape, initial_value, initial_shard)
            return self._value

        create_copy(value, create)
        self._value._unique_id = value._unique_id  # optimizers know the variable by it

    def is_beside(self, other: ParameterServerVariable) -> bool:
        """Return whether each shard is on the device of the same shard of `other`.

        If the shapes differ, this variable must be whole and on the device of `other`'s first
        shard.
        """
        if tuple(self.shape) != tuple(other.shape):
            return self.device == other.device and self.sharding is None
        return self.sharding == other.sharding and [s.device for s in self.shards] == [
            s.device for s in other.shards
        ]

    def move_to(self, other: ParameterServerVariable) -> None:
        """Move the storage, with its value, beside that of `other`.

        It is sharded like `other` if the shapes are the same, else whole.
        """
        value = self._value
        # The old storage lives until its value has been copied.
        with tf.distribute.get_strategy().extended.colocate_vars_with(other.storage):
            self._create_storage(
                tuple(value.shape),
                value.read_value,
                lambda sharding, shard: sharding.rows_in(value.read_value(), shard),
            )

    def resolves_through(self) -> Phase | None:
        """Return the phase that this variable resolves through now, None outside a step.

        Also return None if a `keras.StatelessScope` holds a value of the variable.
        """
        current = _STATE.phase
        if current is None or self._value is None or self._is_held_by_scope():
            return None
        return current

    def compiled_graph(self, *, in_call: bool = False) -> Any:
        """Return the graph that XLA will compile if that graph cannot reach the storage, else None.

        Args:
            in_call: whether the current graph is not that function's, but is about to call it.
        """
        if tf.executing_eagerly() or self._value is None or "/job:ps" not in self.device:
            return None
        return None if self._is_held_by_scope() else graph_for_xla(in_call=in_call)

    def _read_at_call(self) -> Any:
        """Return the value, at a call of a function that XLA compiles; a GradientTape sees it."""
        current = self.resolves_through()
        if current is not None:
            return current.read(self)
        outer = self.compiled_graph(in_call=True)
        if outer is None:
            return self._value
        note_read(self)
        return captured_value(outer, self, self._read_at_call)

    def _is_held_by_scope(self) -> bool:
        scope = _compat.get_stateless_scope()
        return scope is not None and scope.get_current_value(self) is not None

    def _check_replica(self) -> None:
        # A worker cannot reach these states, which are on the coordinator.
        if is_metric_state(self) or is_seed_state(self):
            check_replica()

    def _check_assignment(self) -> None:
        if _compat.get_stateless_scope() is None and self.compiled_graph() is not None:
            raise UnsupportedError(
                f"A function that is compiled by XLA assigns to '{self.path}', which is on a ps, "
                "and XLA cannot reach another machine. Expected: the variable read there, and "
                "assigned outside. Received: `jit_compile=True`. Leave it out, or train with "
                "`model.fit`, whose steps may be compiled."
            )

    @property
    def value(self) -> Any:
        current = self.resolves_through()
        if current is None:
            self._make_current()
            compiled = self.compiled_graph()
            if compiled is None:
                return super().value
            value = captured_value(compiled, self, self._read_at_call)
        else:
            value = current.read(self)
        # A GradientTape sees the read of a `tf.Variable`, but not this read of a tensor.
        if not isinstance(value, tf.Variable):
            note_read(self)
        return self.autocast(value)

    def autocast(self, value: object) -> Any:
        """Return a value in the compute dtype of the layer that is being called."""
        return self._maybe_autocast(value)

    @property
    def shape(self) -> tf.TensorShape:
        current = self.resolves_through()
        return super().shape if current is None else current.shape(self)

    @property
    def _shared_name(self) -> str:
        # Checkpoints name the variable by it, as they name one of plain Keras.
        return str(self.path)

    @property
    def handle(self) -> Any:
        # A GradientTape takes gradients with respect to this; in a step it is the pulled tensor.
        current = self.resolves_through()
        if current is not None:
            return current.source(self)
        compiled = self.compiled_graph()
        if compiled is not None:
            return captured_value(compiled, self, self._read_at_call)
        if isinstance(self._value, ShardedStorage):
            raise AttributeError(
                f"'{self.path}' has no single handle: its rows are in {len(self.shards)} shard(s), "
                "or in a storage that it shares with other tables. Expected: a use of its value, "
                "or gradients by `tf.GradientTape`. Received: a use of its handle. To pass its "
                "handle to TensorFlow, leave the variable whole and make the strategy with "
                "`sparse_updates='dense'`."
            )
        return self.storage.handle

    def take(self, ids: object, *, from_end: bool = False) -> tf.Tensor:
        """Return the rows `ids` of the variable; in a step, only these rows are fetched.

        Args:
            ids: integers of any shape, each at least 0 and less than the number of rows.
            from_end: whether negative ids count from the end.

        Returns:
            A tensor of shape `ids.shape + shape[1:]`.
        """
        ids = tf.convert_to_tensor(ids)
        current = self.resolves_through()
        if current is None:
            wait_for_steps()
            compiled = self.compiled_graph()
            if from_end:
                ids = from_start(ids, self.shape[0])
            return tf.gather(super().value if compiled is None else self.value, ids)
        note_read(self)  # before the rows are read, else a GradientTape does not see the read
        return self._maybe_autocast(current.read_rows(self, ids, from_end=from_end))

    def ref(self) -> Any:
        """Return a hashable reference to the variable, as `tf.Variable.ref` does."""
        return tf.Variable.ref(self)

    def get_shape(self) -> tf.TensorShape:
        """Return the shape, as a `tf.Variable` does; lookups in several variables call this."""
        return tf.TensorShape(self.shape)

    def sparse_read(self, indices: object, name: str | None = None) -> tf.Tensor:
        """Return the rows `indices`, as `take` does; `tf.gather` calls it."""
        del name
        return self.take(indices)

    def assign(self, value: object) -> Any:
        if _STATE.phase is None or _compat.get_stateless_scope() is not None:
            self._check_replica()
            note_assignment()
            self._make_current()
            self._check_assignment()
            if isinstance(value, StoredRows):
                return self._assign_rows(value)
            assigned = super().assign(value)
            self._assign_stand_in()
            return assigned
        value = keras.ops.convert_to_tensor(value, dtype=self._dtype)
        _STATE.phase.assign(self, value)
        return value

    def _assign_stand_in(self) -> None:
        """Set the stand-in of a seed generator's state to the value that was assigned here."""
        if self.stand_in is not None and is_seed_state(self) and tf.executing_eagerly():
            self.stand_in._value.assign(self._value.read_value())

    def _assign_rows(self, value: StoredRows) -> StoredRows:
        """Set the value to that of a file, in chunks.

        Raises:
            ValueError: the value in the file has another shape.
        """
        if value.shape != tuple(self._value.shape):
            raise ValueError(
                f"A file has a value of another shape than the variable '{self.path}'. Expected: "
                f"{tuple(self._value.shape)}. Received: {value.shape}. Load it into a model of the "
                "size that was saved."
            )
        for rows in chunks_of(self._value):
            with tf.device(COORDINATOR_CPU):
                chunk = tf.cast(value[rows.start : rows.stop], self._dtype)
            write_rows(self._value, rows, chunk, COORDINATOR_CPU)
        return value

    def assign_add(self, value: object) -> Any:
        if _compat.get_stateless_scope() is not None:
            return super().assign_add(value)
        value = keras.ops.convert_to_tensor(value, dtype=self._dtype)
        if _STATE.phase is None:
            self._check_replica()
            note_assignment()
            self._check_assignment()
            self.storage.assign_add(value)  # atomic; Keras's `assign_add` reads, then writes
            self._assign_stand_in()
        else:
            _STATE.phase.assign_add(self, value)
        return self.value

    def assign_sub(self, value: object) -> Any:
        return self.assign_add(-keras.ops.convert_to_tensor(value, dtype=self._dtype))

    def _serialize_to_tensors(self) -> Any:
        return self._value._serialize_to_tensors()

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        note_assignment()
        self._make_current()
        restored = self._value._restore_from_tensors(restored_tensors)
        self._assign_stand_in()
        return restored

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # For a checkpoint that is written while training continues. Each copy is on the device of
        # the shard that it copies.
        for shard in self.shards:
            shard._copy_trackable_to_cpu(object_map)
        copies = [object_map[shard] for shard in self.shards]
        sharding = self.sharding
        object_map[self] = (
            copies[0] if sharding is None else ShardedStorage(copies, sharding, self.name)
        )

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy  # a value fetched from a ps is a copy

        def read() -> np.ndarray:
            # Not `.numpy()`: each call of it leaves an operation on the ps.
            return fetch([tf.convert_to_tensor(self.value)])[0]

        with naming_lost_ps:
            return np.asarray(persist(read), dtype)

    def __repr__(self) -> str:
        if not isinstance(self._value, ShardedStorage):
            return str(super().__repr__())
        # Keras prints the value, and would read a whole table for that.
        value = f"dtype={self.dtype}, value={self._value}"
        return f"<Variable path={self.path}, shape={self.shape}, {value}>"

    @property
    def constraint(self) -> Any:
        # `Optimizer.apply` would run it on the worker, on the value before the update. The push
        # runs it on the ps, on the value after the update.
        current = _STATE.phase
        return None if current is not None and current.hides_constraints else super().constraint

    @constraint.setter
    def constraint(self, value: object) -> None:
        keras.Variable.constraint.fset(self, value)

    @property
    def regularizer(self) -> Any:
        # Keras applies it to the variable, which would read a whole table. A phase may have only
        # some rows to apply it to.
        current, given = _STATE.phase, super().regularizer
        return given if current is None else current.regularizer(self, given)

    @regularizer.setter
    def regularizer(self, value: object) -> None:
        keras.Variable.regularizer.fset(self, value)


def make_parameter_server_variable(new: keras.Variable) -> None:
    """Turn a new variable into a `ParameterServerVariable` while a kerasps strategy is current.

    Args:
        new: a variable whose `__init__` begins. A variable of a user's subclass is not changed.
    """
    if type(new) is keras.Variable and is_ours(strategy_of_new_variables()):
        new.__class__ = ParameterServerVariable
