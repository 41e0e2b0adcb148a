"""Rows of a storage that tables share, which replace a variable for each table."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from kerasps import _compat
from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.storage.named import NamedVariable, on_own_task, plain_variable
from kerasps.variables.storage.tensor_like import TensorLike, new_value


class Pool(Protocol):
    """The pool that rows belong to (`row_pools.py`), which they keep alive."""

    number: int

    def add_slot(self, rows: PooledRows, dtype: tf.DType, name: str) -> PooledRows | None:
        """Return the rows of a new slot of a table; None if the slot must be stored separately."""


class PooledRows(TensorLike):
    """Some rows of a variable on a ps, in place of a `tf.Variable` with these rows.

    Reads and writes, of all rows or of some, affect no rows of other tables. Indices count from its
    first row; an index out of its range is an error, as for a variable.
    """

    def __init__(
        self, holder: NamedVariable, rows: range, pool: Pool, *, trainable: bool, name: str
    ) -> None:
        # The rows, by their places in the holder.
        self.store = RowStore(holder, rows.start, str(holder.device))
        # Whether values that this process assigns outside of steps are written.
        self.takes_values = holder.takes_values
        self.pool = pool
        self.trainable = trainable
        self._num_rows = len(rows)
        self._name = f"{name}:0"
        self._unique_id = uuid.uuid4().hex
        self._adder: Any = None
        with tf.init_scope():
            # Two more variables with the holder's storage: reads of some rows go through the first,
            # reads of all rows through the second. A GradientTape tells these rows from those of
            # other tables by these variables.
            self.watched = [on_own_task(self._make_view) for _ in range(2)]
        self._by_rows, self._as_whole = self.watched

    def _make_view(self) -> tf.Variable:
        """Return another variable with the holder's storage."""
        holder = self.store.holder
        with tf.device(self.device):
            handle = tf.raw_ops.VarHandleOp(
                dtype=holder.dtype,
                shape=holder.shape,
                container="",
                shared_name=holder.shared_name,
            )
        handle._name, handle._unique_id = self._name, self._unique_id
        _compat.set_handle_data(handle, _compat.create_handle_data(holder.shape, holder.dtype))
        # A graph that captures the handle finds the holder by its name.
        handle.named_variable = weakref.ref(holder)
        return _compat.ResourceVariable(
            trainable=self.trainable, shape=holder.shape, dtype=holder.dtype, handle=handle
        )

    @property
    def name(self) -> str:
        """The name in messages."""
        return self._name

    @property
    def _shared_name(self) -> str:
        return self._name.removesuffix(":0")

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the elements."""
        return self.store.holder.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of these rows together."""
        return tf.TensorShape([self._num_rows, *self.store.holder.shape[1:]])

    @property
    def device(self) -> str:
        """The device of the holder."""
        return self.store.device

    def read_value(self) -> tf.Tensor:
        """Return all rows."""
        value = on_own_task(lambda: self._read(self._as_whole, self._places()), is_repeatable=True)
        value.set_shape(self.shape)
        return value

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Return the rows `indices`, of shape `indices.shape + shape[1:]`; `tf.gather` calls it."""
        del name
        return on_own_task(
            lambda: self._read(self._by_rows, self._checked(indices)), is_repeatable=True
        )

    def _read(self, view: tf.Variable, places: tf.Tensor) -> tf.Tensor:
        """Return rows of the holder, read through one of `watched`."""
        if tf.executing_eagerly():
            return view.sparse_read(places)
        # In a graph, operations on one handle run in order, but writes use the holder's handle and
        # not the view's. So use the holder's handle before and after the read.
        with tf.control_dependencies([self._touch()]):
            rows = view.sparse_read(places)
        with tf.control_dependencies([rows]):
            self._touch()
        return rows

    def _touch(self) -> tf.Tensor:
        with tf.device(self.device):
            return tf.raw_ops.VarIsInitializedOp(resource=self.store.holder.handle)

    def assign(self, value: object, *unused: object, **unused_too: object) -> PooledRows:
        """Set all rows."""
        value = new_value(self, value)
        on_own_task(lambda: self.store.write(range(self._num_rows), value), is_repeatable=True)
        return self

    def assign_add(self, value: object, *unused: object, **unused_too: object) -> PooledRows:
        """Add a value of the shape of these rows; atomic."""
        value = new_value(self, value)
        if not tf.executing_eagerly():
            self._add(value)
            return self
        if self._adder is None:
            # Outside a function, the operation finds no shape in a handle of another machine.
            self._adder = tf.function(self._add, autograph=False)
        adder = self._adder

        def add() -> None:
            with tf.device(self.device):
                adder(value)

        on_own_task(add)
        return self

    def _add(self, value: tf.Tensor) -> tf.Tensor:
        with tf.device(self.device):
            tf.raw_ops.ResourceScatterNdAdd(
                ref=self.store.holder.handle,
                indices=self._places()[:, None],
                updates=value,
                use_locking=True,
            )
            # TensorFlow does not wait for a remote call that returns nothing.
            return tf.constant(0)

    def assign_sub(self, value: object, *unused: object, **unused_too: object) -> PooledRows:
        """Subtract a value of the shape of these rows; atomic."""
        return self.assign_add(-new_value(self, value))

    def scatter_add(self, slices: tf.IndexedSlices) -> PooledRows:
        """Add slices to their rows."""
        return self._scatter(tf.raw_ops.ResourceScatterAdd, slices)

    def scatter_sub(self, slices: tf.IndexedSlices) -> PooledRows:
        """Subtract slices from their rows."""
        return self._scatter(tf.raw_ops.ResourceScatterSub, slices)

    def scatter_update(self, slices: tf.IndexedSlices) -> PooledRows:
        """Set rows to the values of slices."""
        return self._scatter(tf.raw_ops.ResourceScatterUpdate, slices)

    def _scatter(self, operation: Callable[..., object], slices: tf.IndexedSlices) -> PooledRows:
        def write() -> None:
            places = self._checked(slices.indices)
            with tf.device(self.device):
                values = tf.cast(slices.values, self.dtype)
                operation(resource=self.store.holder.handle, indices=places, updates=values)

        on_own_task(write)
        return self

    def rows_gradient(
        self,
        by_rows: tf.Tensor | tf.IndexedSlices | None,
        as_whole: tf.Tensor | tf.IndexedSlices | None,
    ) -> Any:
        """Return the gradient of these rows; None if there is none.

        Args:
            by_rows: the gradient that a GradientTape returned for the first of `watched`.
            as_whole: that for the second.
        """
        if as_whole is None:
            return None if by_rows is None else self._from_holder(by_rows)
        dense = tf.convert_to_tensor(self._from_holder(as_whole))
        return (
            dense if by_rows is None else dense + tf.convert_to_tensor(self._from_holder(by_rows))
        )

    def _from_holder(self, gradient: tf.Tensor | tf.IndexedSlices) -> Any:
        """Return a gradient of the holder, which is of these rows only, as one of these rows."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient[self.store.begin : self.store.begin + self._num_rows]
        places = gradient.indices - tf.constant(self.store.begin, gradient.indices.dtype)
        shape = tf.constant(self.shape.as_list(), places.dtype)
        return tf.IndexedSlices(gradient.values, places, shape)

    def _places(self) -> tf.Tensor:
        """Return the places of all rows in the holder."""
        with tf.device(self.device):
            return tf.range(self.store.begin, self.store.begin + self._num_rows)

    def _checked(self, indices: tf.Tensor) -> tf.Tensor:
        """Return the places of the rows `indices` in the holder.

        Raises tf.errors.InvalidArgumentError if one is out of range, where another table may have
        rows.
        """
        indices = tf.convert_to_tensor(indices)
        with tf.device(self.device):
            indices = tf.cast(indices, tf.int64)
            is_in_range = (indices >= 0) & (indices < self._num_rows)
            check = tf.debugging.Assert(
                tf.reduce_all(is_in_range),
                [
                    f"'{self.name}' has {self._num_rows} rows. Expected: indices in "
                    f"[0, {self._num_rows}). Received:",
                    tf.boolean_mask(indices, ~is_in_range),
                ],
            )
            # Without a graph, the check has run already, and `check` is None.
            with tf.control_dependencies([check] if check is not None else []):
                return tf.identity(indices) + self.store.begin

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # For a checkpoint that is written while training goes on.
        with tf.device(self.device):
            if self not in object_map:
                object_map[self] = plain_variable(
                    initial_value=self.read_value(), trainable=self.trainable, name=self._name
                )
            else:
                object_map[self].assign(self.read_value())

    def __repr__(self) -> str:
        return f"<PooledRows '{self.name}' shape={self.shape} dtype={self.dtype.name}>"


def store_of(shard: tf.Variable | PooledRows) -> RowStore:
    """Return the rows of a shard, by place: those of a variable, or some rows in a pool."""
    store = getattr(shard, "store", None)
    return RowStore(shard, 0, shard.device) if store is None else store
